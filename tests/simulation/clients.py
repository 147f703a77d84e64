"""Clients of the simulated router: each knows its answer beforehand, and holds every token against it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from router.answer import Delta
from router.job import Outcome
from router.pipeline import Pipeline
from tandem.errors import RequestError
from tandem.request import FinishReason
from tandem.v1 import inference_pb2 as pb
from tests.simulation.cluster import Front
from tests.simulation.scenario import Ask, expected
from tests.simulation.world import Condition, Process, World

__all__ = ["Client"]


@dataclass
class Client:
    """error: how it ended without its answer; "left" when it went itself, "router died" with its router. on_end: told then."""

    number: int
    ask: Ask
    world: World
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    outcome: Outcome | None = None
    error: str = ""
    ended_s: float = 0.0
    on_end: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.wanted_tokens, self.wanted_text, self.wanted_reason = expected(self.ask)
        self._process: Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        if self._task is None:
            return False
        return self._task.done() or (self._process is not None and self._process.condition is Condition.DEAD)

    def start(self, front: Front) -> None:
        process = self._process = front.process
        self._task = process.spawn(self._run(front.pipeline))
        process.on_death.append(self._router_died)
        if self.ask.leaves_after_s is not None:
            process.call_later(self.ask.leaves_after_s, self._task.cancel)

    def _router_died(self) -> None:
        if self._task is not None and not self._task.done():
            self._end("router died")

    def _end(self, error: str) -> None:
        if not self.ended_s:
            self.error, self.ended_s = error, self.world.now
            self.on_end()

    async def _run(self, pipeline: Pipeline) -> None:
        try:
            stream = pipeline.generate(_message(self.ask), f"client-{self.number}", self.ask.deadline_s)
            async with contextlib.aclosing(stream):
                async for item in stream:
                    self._take(item)
            if self.outcome is None:
                self._wrong("its stream ended without an outcome")
            self._end("")
        except asyncio.CancelledError:
            self._end("left")
        except TimeoutError:
            self._end("deadline")
        except RequestError as error:
            self._end(f"{type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001  no client may be shown anything else
            self._end("bug")
            self._wrong(f"it got {error!r}")

    def _take(self, item: Delta | Outcome) -> None:
        if self.outcome is not None or self.ended_s:
            self._wrong("it got something after the end")
        if isinstance(item, Delta):
            self.tokens += item.token_ids
            self.text += item.text
            if self.tokens != self.wanted_tokens[: len(self.tokens)]:
                self._wrong(f"it got {self.tokens}, wanted {self.wanted_tokens}")
            if not self.wanted_text.startswith(self.text):
                self._wrong(f"it got {self.text!r}, wanted {self.wanted_text!r}")
            return
        self.outcome = item
        got = (self.tokens, self.text, item.finish_reason, item.prompt_tokens, item.completion_tokens)
        wanted: tuple[list[int], str, FinishReason, int, int]
        wanted = (self.wanted_tokens, self.wanted_text, self.wanted_reason, len(self.ask.prompt), len(self.wanted_tokens))
        if got != wanted:
            self._wrong(f"it ended with {got}, wanted {wanted}")

    def _wrong(self, what: str) -> None:
        self.world.complain(f"client {self.number}: {what}")


def _message(ask: Ask) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ask.prompt),
        max_new_tokens=ask.max_new_tokens,
        stop_token_ids=ask.stop_token_ids,
        stop=ask.stop,
        service_class=pb.SERVICE_CLASS_BATCH if ask.batch else pb.SERVICE_CLASS_INTERACTIVE,
        min_new_tokens=ask.min_new_tokens,
        sampling=pb.Sampling(
            temperature=ask.sampling.temperature,
            top_p=ask.sampling.top_p,
            top_k=ask.sampling.top_k,
            seed=ask.sampling.seed,
            presence_penalty=ask.sampling.presence_penalty,
            frequency_penalty=ask.sampling.frequency_penalty,
        ),
    )

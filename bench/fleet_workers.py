"""Workers that compute nothing and take the time that a cost model says: the real scheduling code on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol, cast

from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import Key, LocalMemory, PrefillTask, RunningPrompt, WaitingPrompt
from prefill_worker.prompts import PromptTable
from prefill_worker.scheduler import PrefillPolicy, plan_step
from router.handles import load_of
from router.model import ModelInfo
from router.prefixes import PrefixEntry
from router.state import WorkerTable
from router.worker import PREFILL, WorkerInfo, WorkerLoad
from tandem.cache.pool import IndexPool
from tandem.config import DecodeConfig, PrefillConfig
from tandem.v1 import worker_pb2 as pb

__all__ = ["TELL_S", "Costs", "FakeHandle", "Journey", "PrefillSim", "Sizes"]

TELL_S = 0.002


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds; by default about those of a 27B model on one accelerator of 1 PFLOP/s and 4 TB/s at realistic efficiency."""

    prefill_step: float = 0.006
    prefill_token: float = 0.00011
    decode_step: float = 0.016
    decode_sequence: float = 0.00012
    decode_context_token: float = 0.000000025

    def prefill_s(self, num_tokens: int) -> float:
        return self.prefill_step + self.prefill_token * num_tokens

    def decode_s(self, num_sequences: int, context_tokens: int) -> float:
        return self.decode_step + self.decode_sequence * num_sequences + self.decode_context_token * context_tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one worker."""

    block_tokens: int = 128
    blocks: int = 3000
    slots: int = 64
    checkpoints: int = 96


@dataclass(slots=True)
class Journey:
    """One request on its way. Moments are virtual seconds. cached_tokens: that its prefill worker had; held_tokens: that its
    decode worker had. end: of its prompt's full blocks."""

    task: PrefillTask
    answer_tokens: int
    arrived_s: float
    first_token_s: float = 0.0
    finished_s: float = 0.0
    cached_tokens: int = 0
    held_tokens: int = 0
    end: PrefixEntry | None = None
    on_first_token: Callable[[], None] = lambda: None
    on_finished: Callable[[], None] = lambda: None

    @property
    def context_tokens(self) -> int:
        return self.task.num_tokens


class Reader(Protocol):
    """What a prefill worker wants of a decode worker."""

    def reserve(self, num_blocks: int, granted: Callable[[], None]) -> None: ...

    def join(self, journey: Journey, num_blocks: int) -> None: ...

    def release(self, num_blocks: int) -> None: ...


class FakeHandle:
    """What the router's table wants of a worker."""

    def __init__(self, worker_id: str, role: str, model: ModelInfo, sizes: Sizes, slots: int) -> None:
        self.info = WorkerInfo(worker_id, role, "", model, kv_blocks_total=sizes.blocks, state_slots_total=slots)
        load = pb.WorkerLoad(kv_blocks_total=sizes.blocks, state_slots_total=slots, batch_share=DecodeConfig().batch_share)
        self.load: WorkerLoad | None = load_of(load)


@dataclass(slots=True)
class _Begun:
    journey: Journey
    memory: LocalMemory
    decode: Reader
    num_blocks: int
    came_at: int
    running: RunningPrompt | None = field(default=None)


class PrefillSim:
    """The real table of prompts, chunk planner and prefix cache; only the forward pass is a sleep."""

    def __init__(self, number: int, table: WorkerTable, model: ModelInfo, sizes: Sizes, costs: Costs, config: PrefillConfig):
        self.handle = FakeHandle(f"p{number}", PREFILL, model, sizes, sizes.slots)
        self.num_tokens = 0
        self.busy_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._table, self._costs = table, costs
        self._policy = PrefillPolicy(config.chunk_tokens, 1, config.ageing, config.batch_share)
        self._prompts = PromptTable()
        self._memory = PromptMemory(_engine(model, sizes), config)
        self._journeys: dict[Key, tuple[Journey, Reader]] = {}
        self._begun: dict[Key, _Begun] = {}
        self._credit = 0.0
        self._computes = False
        self._published = 0
        self._sizes = sizes

    def submit(self, journey: Journey, decode: Reader) -> None:
        self._journeys[journey.task.key] = (journey, decode)
        self._prompts.wait(journey.task)
        self._turn()

    def _turn(self) -> None:
        """Once around, unless a step runs."""
        while (waiting := self._prompts.next_to_begin(self._policy, 0.0)) is not None and self._begin(waiting):
            pass
        if self._computes:
            return
        plan = plan_step(self._prompts.works(), self._policy, self._credit)
        self._credit = plan.batch_credit
        if plan.chunks:
            chunks = [(self._prompts.running[chunk.index], chunk.num_tokens) for chunk in plan.chunks]
            num_tokens = sum(count for _, count in chunks)
            seconds = self._costs.prefill_s(num_tokens)
            self.busy_s, self.num_tokens = self.busy_s + seconds, self.num_tokens + num_tokens
            self._computes = True
            self._loop.call_later(seconds, self._settle, chunks)

    def _begin(self, waiting: WaitingPrompt) -> bool:
        memory = self._memory.take(waiting.task)
        if memory is None:
            return False
        key = waiting.task.key
        self._prompts.waiting.remove(waiting)
        journey, decode = self._journeys.pop(key)
        journey.cached_tokens = memory.num_cached
        num_blocks = -(-(waiting.task.num_tokens + journey.answer_tokens - 1) // self._sizes.block_tokens)
        self._begun[key] = _Begun(journey, memory, decode, num_blocks, waiting.came_at)
        decode.reserve(num_blocks, lambda: self._granted(key))
        return True

    def _granted(self, key: Key) -> None:
        begun = self._begun[key]
        task, memory = begun.journey.task, begun.memory
        begun.running = RunningPrompt(
            *(task, memory, None, None, begun.came_at), num_computed=memory.num_cached, tokens=task.request.tokens
        )
        self._prompts.running.append(begun.running)
        self._turn()

    def _settle(self, chunks: list[tuple[RunningPrompt, int]]) -> None:
        self._computes = False
        for prompt, num_tokens in chunks:
            prompt.num_computed += num_tokens
            self._prompts.num_computed_tokens += num_tokens
            self._memory.computed(prompt.memory, prompt.num_computed)
            if not prompt.num_remaining:
                self._prompts.running.remove(prompt)
                self._complete(self._begun.pop(prompt.task.key))
        self._memory.publish()
        load = pb.WorkerLoad(queue_tokens=self._prompts.num_queued_tokens, running=len(self._prompts.running))
        load.prefixes.CopyFrom(self._memory.index)
        if self._published != self._memory.index.version:
            self._published = self._memory.index.version
        else:
            load.ClearField("prefixes")
        self.handle.load = load_of(load, self.handle.load)
        self._table.changed(self.handle.info.id)
        self._turn()

    def _complete(self, begun: _Begun) -> None:
        begun.journey.first_token_s = self._loop.time()
        self._memory.free(begun.memory)
        begun.journey.on_first_token()
        if begun.journey.answer_tokens > 1:
            self._loop.call_later(TELL_S, begun.decode.join, begun.journey, begun.num_blocks)
        else:
            begun.decode.release(begun.num_blocks)
            begun.journey.finished_s = self._loop.time()
            begun.journey.on_finished()


def _engine(model: ModelInfo, sizes: Sizes) -> Any:
    """The part of an engine that has to do with memory."""
    memory = SimpleNamespace(
        specs=SimpleNamespace(blocks_for=lambda tokens: -(-tokens // sizes.block_tokens)),
        copy_slot=lambda source, target: None,
        copy_block=lambda source, target: None,
    )
    return cast(
        Any,
        SimpleNamespace(
            memory=memory,
            loaded=SimpleNamespace(fingerprint=model.fingerprint),
            checkpoint_slots=range(sizes.slots, sizes.slots + sizes.checkpoints),
            blocks=IndexPool(sizes.blocks, "KV blocks"),
            slots=IndexPool(sizes.slots, "state slots"),
            block_size_tokens=sizes.block_tokens,
        ),
    )

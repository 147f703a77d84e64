"""Workers without processes: for tests of the router, and of what stands on it.

`FakeWorkerHandle` is driven by hand, event by event. `FakeCluster` drives its handles by a script: what each answer is, how
long steps take, which worker fails when.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from router.events import AttemptEvent, AttemptKey, Failed, FirstToken, PrefillStarted, Ready, Standing, Tokens
from router.model import ModelInfo
from router.state import WorkerTable
from router.worker import DECODE, PREFILL, Sink, Subscriptions, WorkerInfo, WorkerLoad
from tandem.request import Request, TokenLogprobs

__all__ = ["FakeCluster", "FakeWorkerHandle", "Script", "count_up"]


class FakeWorkerHandle:
    """submitted: (request, attempt, decode worker) of each task. asked, cancelled: keys in the order they came.
    absorbed: requests with their answers."""

    def __init__(self, info: WorkerInfo, load: WorkerLoad | None = None) -> None:
        self.info = info
        self.load: WorkerLoad | None = load or WorkerLoad(
            kv_blocks_total=info.kv_blocks_total, state_slots_total=info.state_slots_total
        )
        self.submitted: list[tuple[Request, int, str]] = []
        self.asked: list[AttemptKey] = []
        self.cancelled: list[AttemptKey] = []
        self.absorbed: list[Request] = []
        self.subscriptions = Subscriptions(info.id)
        self.on_submit: Callable[[Request, int, str], None] = lambda request, attempt, decode_id: None
        self.on_ask: Callable[[AttemptKey], None] = lambda key: None
        self.on_cancel: Callable[[AttemptKey], None] = lambda key: None

    def subscribe(self, key: AttemptKey, sink: Sink) -> None:
        self.subscriptions.add(key, sink)

    def unsubscribe(self, key: AttemptKey) -> None:
        self.subscriptions.remove(key)

    def submit(self, request: Request, attempt: int, decode_worker_id: str) -> None:
        self.submitted.append((request, attempt, decode_worker_id))
        self.on_submit(request, attempt, decode_worker_id)

    def absorb(self, request: Request) -> None:
        self.absorbed.append(request)

    def ask(self, key: AttemptKey) -> None:
        self.asked.append(key)
        self.on_ask(key)

    def cancel(self, key: AttemptKey) -> None:
        self.cancelled.append(key)
        self.on_cancel(key)

    async def close(self) -> None:
        self.lose("left")

    def emit(self, key: AttemptKey, event: AttemptEvent) -> None:
        self.subscriptions.deliver(key, event)

    def fail(self, key: AttemptKey, kind: str, reason: str = "as scripted", retryable: bool = True) -> None:
        self.emit(key, Failed(self.info.id, kind, reason, retryable))

    def lose(self, reason: str = "the connection broke") -> None:
        self.load = None
        self.subscriptions.lose(reason)


def count_up(request: Request, index: int) -> int:
    """A token that depends on the prompt and its index only, as a real model's does: every attempt repeats it."""
    return (sum(request.prompt) + index) % 200 + 20


@dataclass(slots=True)
class Script:
    """answer: the token at an index of the answer. prefill_s, step_s: 0 still gives others a turn.

    refusals: worker id → kinds of failure, one for each of its next prefill tasks, before the first token.
    handoff_failures: kinds of failure, one for each of the next hand-offs, after the first token.
    lost_after: decode worker id → it is lost once it has sent that many tokens.
    """

    answer: Callable[[Request, int], int] = count_up
    prefill_s: float = 0.0
    step_s: float = 0.0
    refusals: dict[str, list[str]] = field(default_factory=dict)
    handoff_failures: list[str] = field(default_factory=list)
    lost_after: dict[str, int] = field(default_factory=dict)


class FakeCluster:
    """num_prefill workers p0, p1, … and num_decode workers d0, d1, …, in a table of their own. local_prefill_tokens: longest
    prompt that a decode worker computes itself."""

    def __init__(
        self,
        model: ModelInfo,
        num_prefill: int = 1,
        num_decode: int = 1,
        script: Script | None = None,
        kv_blocks: int = 64,
        slots: int = 8,
        batch_share: float = 1.0,
        local_prefill_tokens: int = 0,
    ) -> None:
        self.script = script or Script()
        self.table = WorkerTable()
        self._batch_share = batch_share
        self._local_tokens = local_prefill_tokens
        self.prefill = [self._worker(f"p{i}", PREFILL, model, kv_blocks, slots) for i in range(num_prefill)]
        self.decode = [self._worker(f"d{i}", DECODE, model, kv_blocks, slots) for i in range(num_decode)]
        self.by_id = {handle.info.id: handle for handle in (*self.prefill, *self.decode)}
        self._running: dict[AttemptKey, asyncio.Task[None]] = {}
        self._sent: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Attempts that hold something at a worker."""
        return len(self._running)

    def cancels(self) -> dict[str, list[AttemptKey]]:
        return {worker_id: handle.cancelled for worker_id, handle in self.by_id.items()}

    def lose(self, worker_id: str) -> None:
        self.by_id[worker_id].lose()
        self.table.changed()

    def _worker(self, worker_id: str, role: str, model: ModelInfo, kv_blocks: int, slots: int) -> FakeWorkerHandle:
        info = WorkerInfo(worker_id, role, "", model, kv_blocks_total=kv_blocks, state_slots_total=slots)
        load = WorkerLoad(
            kv_blocks_total=kv_blocks,
            state_slots_total=slots,
            batch_share=self._batch_share,
            local_prefill_tokens=self._local_tokens if role == DECODE else 0,
        )
        handle = FakeWorkerHandle(info, load)
        handle.on_cancel = self._cancel
        handle.on_ask = lambda key: handle.emit(key, Standing(known=key in self._running))
        handle.on_submit = lambda request, attempt, decode_id: self._submit(handle, request, attempt, decode_id)
        self.table.add(handle)
        return handle

    def _submit(self, prefill: FakeWorkerHandle, request: Request, attempt: int, decode_id: str) -> None:
        key = (request.request_id, attempt)
        task = asyncio.get_running_loop().create_task(self._run(prefill, self.by_id[decode_id], request, key))
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    def _cancel(self, key: AttemptKey) -> None:
        if task := self._running.get(key):
            task.cancel()

    async def _run(self, prefill: FakeWorkerHandle, decode: FakeWorkerHandle, request: Request, key: AttemptKey) -> None:
        script = self.script
        prefill.emit(key, PrefillStarted())
        await asyncio.sleep(script.prefill_s)
        if kinds := script.refusals.get(prefill.info.id):
            prefill.fail(key, kinds.pop(0))
            return
        index = len(request.generated)
        token = script.answer(request, index)
        reason = request.stop.finish_reason(index + 1, token)
        told = _told(token, request.output.logprobs)
        of_prompt = () if index else _told_prompt(request)
        prefill.emit(key, FirstToken(index, token, reason, script.prefill_s, told[0] if told else None, of_prompt))
        if reason is not None:
            return
        if script.handoff_failures:
            decode.fail(key, script.handoff_failures.pop(0))
            return
        decode.emit(key, Ready())
        await self._decode(decode, request, key, itertools.count(index + 1))

    async def _decode(self, decode: FakeWorkerHandle, request: Request, key: AttemptKey, places: itertools.count[int]) -> None:
        for index in places:
            await asyncio.sleep(self.script.step_s)
            if self.script.lost_after.get(decode.info.id, -1) == self._sent[decode.info.id]:
                self.lose(decode.info.id)
                return
            token = self.script.answer(request, index)
            reason = request.stop.finish_reason(index + 1, token)
            self._sent[decode.info.id] += 1
            decode.emit(key, Tokens(index, (token,), reason, _told(token, request.output.logprobs)))
            if reason is not None:
                return


def _told(token: int, wanted: int | None) -> tuple[TokenLogprobs, ...]:
    """Each token has half of what is left: of the likeliest -ln 2, of the next -2 ln 2, …"""
    if wanted is None:
        return ()
    top = tuple((token + place, -math.log(2) * (place + 1)) for place in range(wanted))
    return (TokenLogprobs(-math.log(2), top),)


def _told_prompt(request: Request) -> tuple[TokenLogprobs, ...]:
    return tuple(entry for token in request.prompt[1:] for entry in _told(token, request.output.prompt_logprobs))

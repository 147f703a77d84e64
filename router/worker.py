"""The router's side of a worker: the seam between the request pipeline and the wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from router.events import AttemptEvent, AttemptKey, Failed
from router.model import ModelInfo
from router.prefixes import PrefixEntry
from tandem.request import Request

__all__ = ["DECODE", "PREFILL", "Sink", "Subscriptions", "WorkerHandle", "WorkerInfo", "WorkerLoad"]

PREFILL = "prefill"
DECODE = "decode"

Sink = Callable[[AttemptEvent], None]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's description of itself. id: never reused. role: PREFILL or DECODE. metrics_address: host:port of its own
    /metrics; empty: it has none. block_bytes, state_bytes: of one KV block, and of one sequence's states."""

    id: str
    role: str
    address: str
    model: ModelInfo
    pid: int = 0
    node: str = ""
    transport: str = ""
    kv_blocks_total: int = 0
    state_slots_total: int = 0
    metrics_address: str = ""
    block_bytes: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's newest report. queue_tokens: prompt tokens that wait. leases: by state, of decode workers; lease_ages: seconds
    that the longest-standing one has spent in its state. pool_mismatches: blocks and slots that it once found missing.
    transport: what carries the hand-offs now, as the worker's transfer agent reports it. leaving: it takes no
    new work. wasted_chunks, worst_wasted_chunks: prompt chunks computed for clients that were gone; in all, most for one.
    prefixes: what a prefill worker need not compute again, or a decode worker not be sent. kv_blocks_counted: that a decode
    worker takes for used when it is asked for room, which with overcommit is more than it holds. overcommit, batch_share: as
    its `DecodeConfig` has them.
    evictions: sequences that gave way at a decode worker since start, by how they come back.
    token_s: to compute a prompt token, lately. reserve_s: for a prefill worker to get a reservation, lately. 0: not seen.
    step_tokens: that a step of a prefill worker has at most, now.
    local_prefill_tokens, local_prefill_share: of a decode worker, as its `DecodeConfig` has them."""

    queue: int = 0
    queue_tokens: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    state_slots_used: int = 0
    state_slots_total: int = 0
    leases: Mapping[str, int] = field(default_factory=dict)
    lease_ages: Mapping[str, float] = field(default_factory=dict)
    pool_mismatches: int = 0
    step_s: float = 0.0
    transport: str = ""
    leaving: bool = False
    wasted_chunks: int = 0
    worst_wasted_chunks: int = 0
    prefixes: tuple[PrefixEntry, ...] = ()
    kv_blocks_counted: int = 0
    overcommit: float = 1.0
    batch_share: float = 1.0
    evictions: Mapping[str, int] = field(default_factory=dict)
    token_s: float = 0.0
    reserve_s: float = 0.0
    step_tokens: int = 0
    local_prefill_tokens: int = 0
    local_prefill_share: float = 1.0


class WorkerHandle(Protocol):
    """One connected worker. No method waits: commands are queued, events go to the sinks on the event loop.

    A worker that is lost gives `Failed` (retryable) to every subscription, and at once to one made later.
    """

    @property
    def info(self) -> WorkerInfo: ...

    @property
    def load(self) -> WorkerLoad | None:
        """Newest report; None while the worker is not connected or has not yet spoken."""
        ...

    def subscribe(self, key: AttemptKey, sink: Sink) -> None: ...

    def unsubscribe(self, key: AttemptKey) -> None:
        """No event of `key` reaches its sink after this."""
        ...

    def submit(self, request: Request, attempt: int, decode_worker_id: str) -> None:
        """Give a prefill worker its task; or a decode worker, that of a prompt which it computes itself."""
        ...

    def absorb(self, request: Request) -> None:
        """Let a prefill worker keep, if it can, the state after prompt and answer (`generated`): the next turn begins there."""
        ...

    def ask(self, key: AttemptKey) -> None:
        """Let the worker that the task was given to say, as a `Standing`, whether it holds it."""
        ...

    def cancel(self, key: AttemptKey) -> None:
        """The worker frees what the attempt holds; one it does not know is no error."""
        ...

    async def close(self) -> None: ...


class Subscriptions:
    """Who wants the events of which attempt, at one worker."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._sinks: dict[AttemptKey, Sink] = {}
        self._lost: str | None = None

    def __len__(self) -> int:
        return len(self._sinks)

    def add(self, key: AttemptKey, sink: Sink) -> None:
        if self._lost is not None:
            sink(self._failure(self._lost))
            return
        self._sinks[key] = sink

    def remove(self, key: AttemptKey) -> None:
        self._sinks.pop(key, None)

    def deliver(self, key: AttemptKey, event: AttemptEvent) -> bool:
        """False: nobody waits for this attempt any more."""
        sink = self._sinks.get(key)
        if sink is None:
            return False
        sink(event)
        return True

    def lose(self, reason: str) -> None:
        """Fail every attempt here, and those that come before `restore`."""
        self._lost = reason
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink(self._failure(reason))

    def restore(self) -> None:
        self._lost = None

    def _failure(self, reason: str) -> Failed:
        return Failed(self._worker_id, "WorkerLost", reason, retryable=True)

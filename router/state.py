"""The workers that a router knows: their handles, their states, and what this router has assigned to them.

Loads are reported once a step. What is assigned in between is counted here, so that a burst does not all land on one worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.events import AttemptKey
from router.placement import Need, Placement, Snapshot, WorkerView
from router.prefixes import PrefixDirectory, PrefixEntry
from router.worker import DECODE, PREFILL, WorkerHandle, WorkerLoad

__all__ = ["WorkerEntry", "WorkerTable"]


@dataclass(slots=True)
class WorkerEntry:
    """draining: takes no new request. assigned_tokens: prompt tokens per attempt, without first token so far.
    assigned_blocks: KV blocks per attempt at a decode worker, until the attempt ends."""

    handle: WorkerHandle
    draining: bool = False
    seen: bool = False
    prefixes: tuple[PrefixEntry, ...] = ()
    assigned_tokens: dict[AttemptKey, int] = field(default_factory=dict)
    assigned_blocks: dict[AttemptKey, int] = field(default_factory=dict)

    @property
    def state(self) -> str:
        if self.handle.load is None:
            return "lost" if self.seen else "starting"
        return "draining" if self.draining or self.handle.load.leaving else "ready"

    def view(self) -> WorkerView:
        """The greater of what the worker reports and what this router knows: each lags behind the other in turn."""
        info = self.handle.info
        load = self.handle.load or WorkerLoad()
        return WorkerView(
            id=info.id,
            ready=self.state == "ready",
            queue_tokens=max(load.queue_tokens, sum(self.assigned_tokens.values())),
            running=load.running,
            kv_blocks_used=max(load.kv_blocks_used, load.kv_blocks_counted, sum(self.assigned_blocks.values())),
            kv_blocks_total=load.kv_blocks_total or info.kv_blocks_total,
            state_slots_used=max(load.state_slots_used, len(self.assigned_blocks)),
            state_slots_total=load.state_slots_total or info.state_slots_total,
            block_size_tokens=info.model.block_size_tokens,
            overcommit=load.overcommit,
        )


class WorkerTable:
    """Only workers of the served model are in it. `changed` tells the listeners that a placement may come out differently."""

    def __init__(self) -> None:
        self._entries: dict[str, WorkerEntry] = {}
        self.prefixes = PrefixDirectory()
        self._listeners: list[Callable[[], None]] = []

    @property
    def entries(self) -> tuple[WorkerEntry, ...]:
        return tuple(self._entries.values())

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._entries

    def handle(self, worker_id: str) -> WorkerHandle | None:
        """None: the worker has left."""
        entry = self._entries.get(worker_id)
        return entry.handle if entry else None

    def listen(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def changed(self) -> None:
        for entry in self._entries.values():
            entry.seen = entry.seen or entry.handle.load is not None
            self._note_prefixes(entry, entry.handle.load.prefixes if entry.handle.load else ())
        for listener in self._listeners:
            listener()

    def add(self, handle: WorkerHandle, draining: bool = False) -> None:
        self._entries[handle.info.id] = WorkerEntry(handle, draining)
        self.changed()

    def set_draining(self, worker_id: str, draining: bool) -> None:
        if self._entries[worker_id].draining != draining:
            self._entries[worker_id].draining = draining
            self.changed()

    def remove(self, worker_id: str) -> WorkerHandle:
        """The caller closes the handle, which fails the attempts there."""
        entry = self._entries.pop(worker_id)
        self._note_prefixes(entry, ())
        self.changed()
        return entry.handle

    def num_ready(self, role: str) -> int:
        return sum(entry.handle.info.role == role and entry.state == "ready" for entry in self._entries.values())

    @property
    def can_serve(self) -> bool:
        return self.num_ready(PREFILL) > 0 and self.num_ready(DECODE) > 0

    def snapshot(self) -> Snapshot:
        def pool(role: str) -> tuple[WorkerView, ...]:
            return tuple(entry.view() for entry in self._entries.values() if entry.handle.info.role == role)

        return Snapshot(pool(PREFILL), pool(DECODE), self.prefixes)

    def _note_prefixes(self, entry: WorkerEntry, prefixes: tuple[PrefixEntry, ...]) -> None:
        if entry.prefixes is not prefixes:
            entry.prefixes = prefixes
            self.prefixes.replace(entry.handle.info.id, prefixes)

    def assign(self, key: AttemptKey, placement: Placement, prefill_tokens: int, need: Need) -> None:
        """Count the attempt at both workers until `prefill_done` and `release`. What the prefill worker has is no work."""
        self._entries[placement.prefill_id].assigned_tokens[key] = max(1, prefill_tokens - placement.hit_tokens)
        entry = self._entries[placement.decode_id]
        entry.assigned_blocks[key] = entry.view().expected_blocks(need)

    def prefill_done(self, key: AttemptKey) -> None:
        for entry in self._entries.values():
            entry.assigned_tokens.pop(key, None)

    def release(self, key: AttemptKey) -> None:
        """The attempt holds nothing any more. Harmless when it is not assigned."""
        self.prefill_done(key)
        freed = [entry.assigned_blocks.pop(key, None) for entry in self._entries.values()]
        if any(blocks is not None for blocks in freed):
            self.changed()

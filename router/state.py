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
from tandem.request import ServiceClass

__all__ = ["WORKER_STATES", "WorkerEntry", "WorkerTable"]

WORKER_STATES = ("starting", "ready", "draining", "lost")


@dataclass(slots=True, eq=False)
class WorkerEntry:
    """draining: takes no new request. assigned_tokens: prompt tokens per attempt, without first token so far.
    assigned_blocks: KV blocks per attempt at a decode worker, until the attempt ends. batch: attempts of that class here.
    room: ready, blocks and slots used, when the listeners were told last. newest: the view as of the last change that the table
    was told of."""

    handle: WorkerHandle
    draining: bool = False
    seen: bool = False
    prefixes: tuple[PrefixEntry, ...] = ()
    assigned_tokens: dict[AttemptKey, int] = field(default_factory=dict)
    assigned_blocks: dict[AttemptKey, int] = field(default_factory=dict)
    batch: set[AttemptKey] = field(default_factory=set)
    room: tuple[bool, int, int] = (False, 0, 0)
    newest: WorkerView | None = None
    _made_of: tuple[WorkerLoad | None, bool] = (None, False)

    @property
    def state(self) -> str:
        if self.handle.load is None:
            return "lost" if self.seen else "starting"
        return "draining" if self.draining or self.handle.load.leaving else "ready"

    def view(self) -> WorkerView:
        """The greater of what the worker reports and what this router knows: each lags behind the other in turn. Made anew only
        when something of it has changed: a placement looks at every worker."""
        made_of = (self.handle.load, self.draining)
        if self.newest is None or self._made_of[0] is not made_of[0] or self._made_of[1] is not made_of[1]:
            self.newest, self._made_of = self._make_view(), made_of
        return self.newest

    def assigned(self) -> None:
        """What is assigned here has changed."""
        self.newest = None

    def _make_view(self) -> WorkerView:
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
            batch_tokens=sum(self.assigned_tokens.get(key, 0) for key in self.batch),
            batch_blocks=sum(self.assigned_blocks.get(key, 0) for key in self.batch),
            batch_slots=sum(key in self.assigned_blocks for key in self.batch),
            overcommit=load.overcommit,
            batch_share=load.batch_share,
            token_s=load.token_s,
            step_s=load.step_s,
            reserve_s=load.reserve_s,
            step_tokens=load.step_tokens,
            local_tokens=load.local_prefill_tokens,
            local_share=load.local_prefill_share,
            block_bytes=info.block_bytes,
            state_bytes=info.state_bytes,
        )


class WorkerTable:
    """Only workers of the served model are in it. `changed` tells the listeners that a placement may come out differently."""

    def __init__(self) -> None:
        self._entries: dict[str, WorkerEntry] = {}
        self._pools: dict[str, list[WorkerEntry]] = {PREFILL: [], DECODE: []}
        self.prefixes = PrefixDirectory()
        self._assigned: dict[AttemptKey, tuple[WorkerEntry, WorkerEntry]] = {}
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

    def changed(self, worker_id: str | None = None) -> None:
        """Of one worker, which may have left, or of any. Workers speak at every step; the listeners are told when one's
        readiness or room is another: nothing else lets a request be placed that could not be before."""
        one = self._entries.get(worker_id) if worker_id is not None else None
        entries = self.entries if worker_id is None else (one,) if one else ()
        has_changed = [self._look_at(entry) for entry in entries]
        if worker_id is None or any(has_changed):
            self._tell()

    def _look_at(self, entry: WorkerEntry) -> bool:
        """Whether its readiness or its room is another than before."""
        load = entry.handle.load
        entry.seen = entry.seen or load is not None
        self._note_prefixes(entry, load.prefixes if load else ())
        view, before = entry.view(), entry.room
        entry.room = (view.ready, view.kv_blocks_used, view.state_slots_used)
        return entry.room != before

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def add(self, handle: WorkerHandle, draining: bool = False) -> None:
        entry = self._entries[handle.info.id] = WorkerEntry(handle, draining)
        self._pools[handle.info.role].append(entry)
        self.changed()

    def set_draining(self, worker_id: str, draining: bool) -> None:
        if self._entries[worker_id].draining != draining:
            self._entries[worker_id].draining = draining
            self.changed()

    def remove(self, worker_id: str) -> WorkerHandle:
        """The caller closes the handle, which fails the attempts there."""
        entry = self._entries.pop(worker_id)
        self._pools[entry.handle.info.role].remove(entry)
        self._note_prefixes(entry, ())
        self.changed()
        return entry.handle

    def num_ready(self, role: str) -> int:
        return sum(entry.state == "ready" for entry in self._pools[role])

    @property
    def can_serve(self) -> bool:
        return self.num_ready(PREFILL) > 0 and self.num_ready(DECODE) > 0

    def snapshot(self) -> Snapshot:
        return Snapshot(self._views(PREFILL), self._views(DECODE), self.prefixes)

    @property
    def batch_part(self) -> float:
        """How much of the decode pool requests of class batch hold, of blocks or of slots, whichever is more. 0 … 1."""
        views = self._views(DECODE)
        blocks = sum(view.batch_blocks for view in views) / max(1, sum(view.kv_blocks_total for view in views))
        slots = sum(view.batch_slots for view in views) / max(1, sum(view.state_slots_total for view in views))
        return max(blocks, slots)

    def _views(self, role: str) -> tuple[WorkerView, ...]:
        return tuple([entry.newest or entry.view() for entry in self._pools[role]])

    def _note_prefixes(self, entry: WorkerEntry, prefixes: tuple[PrefixEntry, ...]) -> None:
        if entry.prefixes is not prefixes:
            entry.prefixes = prefixes
            self.prefixes.replace(entry.handle.info.id, prefixes)

    def assign(self, key: AttemptKey, placement: Placement, prefill_tokens: int, need: Need) -> None:
        """Count the attempt at both workers until `prefill_done` and `release`; they are one where the decode worker computes
        the prompt. What the prefill worker has is no work."""
        prefill, decode = self._entries[placement.prefill_id], self._entries[placement.decode_id]
        self._assigned[key] = (prefill, decode)
        prefill.assigned_tokens[key] = max(1, prefill_tokens - placement.hit_tokens)
        decode.assigned_blocks[key] = decode.view().expected_blocks(need)
        for entry in (prefill, decode):
            if need.service_class is ServiceClass.BATCH:
                entry.batch.add(key)
            entry.assigned()

    def prefill_done(self, key: AttemptKey) -> None:
        if key in self._assigned:
            prefill, _ = self._assigned[key]
            prefill.assigned_tokens.pop(key, None)
            prefill.assigned()

    def release(self, key: AttemptKey) -> None:
        """The attempt holds nothing any more. Harmless when it is not assigned."""
        if key not in self._assigned:
            return
        self.prefill_done(key)
        prefill, decode = self._assigned.pop(key)
        decode.assigned_blocks.pop(key, None)
        for entry in (prefill, decode):
            entry.batch.discard(key)
            entry.assigned()
            if self._entries.get(entry.handle.info.id) is entry:  # it may have left
                self._look_at(entry)
        self._tell()

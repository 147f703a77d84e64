"""Reservations of a decode worker's memory, and who may free it when. Pure bookkeeping behind one lock."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, OrderedDict, deque
from dataclasses import replace
from typing import TypeVar

from tandem.cache.pool import IndexPool
from tandem.cache.spec import CacheSpecs
from tandem.clock import Clock
from tandem.errors import LeaseLost, NoRoom
from tandem.request import Request
from transfer.kept_index import KeptIndex
from transfer.lease_memory import AdmissionPolicy, LeaseMemory
from transfer.lease_state import AWAITED_STATES, FINAL_STATES, LIVE_STATES, MOVES, NO_SLOT, Lease, LeaseState, Transition
from transfer.record import NONCE_BYTES

__all__ = ["Lease", "LeaseState", "LeaseTable"]

K = TypeVar("K")
S = LeaseState
_REMEMBERED_ENDED = 4096
RECORD_GRACE_S = 2.0
"""How long a record may be on its way after its writer said, over another connection, that it was sent."""


class LeaseTable:
    """All leases of one decode worker's life. Called from the gRPC service, the receiver and the decode loop; every method is
    short and takes one lock.

    blocks, slots: the pools; nobody else allocates from them. specs: of the caches behind them. ttl_s: a reservation expires
    after so long without a sign of its writer. epoch: names this life of the worker, so that a lease of a former life is
    never mistaken. policy: who is let in. fingerprint: of the model; names of prefixes
    begin with it.
    """

    def __init__(
        self,
        blocks: IndexPool,
        slots: IndexPool,
        specs: CacheSpecs,
        clock: Clock,
        ttl_s: float,
        epoch: int,
        policy: AdmissionPolicy | None = None,
        fingerprint: str = "",
    ) -> None:
        self.epoch = epoch
        self._memory = LeaseMemory(blocks, slots, specs, policy or AdmissionPolicy(), fingerprint)
        self._clock = clock
        self._ttl_s = ttl_s
        self._lock = threading.Lock()
        self._live: dict[str, Lease] = {}
        self._by_key: dict[tuple[str, int], str] = {}
        self._ended: OrderedDict[str, Lease] = OrderedDict()
        self._past: deque[Lease] = deque(maxlen=_REMEMBERED_ENDED)
        self._ended_counts: Counter[LeaseState] = Counter()
        self._abandoned: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._dead_writers: OrderedDict[str, None] = OrderedDict()

    # ---- the writer's side asks ----

    def reserve(
        self, request: Request, attempt: int, router_id: str, writer_id: str, *, may_share: bool = False, is_local: bool = False
    ) -> Lease:
        """One slot and blocks for every position the request can reach, or with overcommit for those it starts with, all or
        nothing. Asking again for the same attempt gives the same lease, so that a caller whose first answer was lost can
        learn what it must release. may_share: its writer leaves out the blocks that are held already (`Lease.num_held`).
        is_local: the decode loop is the writer, see `LeaseState.COMPUTING`; it writes every block, so none may be shared.

        Raises:
            InvalidRequest: it could never fit, even alone.
            NoRoom: too little is free now; says what. LeaseLost: its writer has abandoned the attempt, or is dead and
            nobody would ever release what it asks for.
        """
        assert not (may_share and is_local), "what is computed here is written whole"
        claim, prefix = self._memory.claim(request), self._memory.prefix_of(request)
        with self._lock:
            key = (request.request_id, attempt)
            if (known := self._by_key.get(key)) is not None:
                lease = self._live[known]
                if lease.writer_id != writer_id:
                    raise NoRoom(f"attempt {attempt} of {request.request_id} is reserved for another writer")
                return lease
            if key in self._abandoned:
                raise LeaseLost(f"attempt {attempt} of {request.request_id} was abandoned")
            if writer_id in self._dead_writers:
                raise LeaseLost(f"writer {writer_id} is dead: this was sent before")
            self._memory.require_room(claim, list(self._live.values()))
            lease_id = secrets.token_hex(16)
            grant = self._memory.take(lease_id, claim.first, prefix, may_share=may_share)
            now = self._clock.now()
            lease = Lease(
                id=lease_id,
                epoch=self.epoch,
                nonce=secrets.token_bytes(NONCE_BYTES),
                request=request,
                attempt=attempt,
                router_id=router_id,
                writer_id=writer_id,
                block_ids=grant.block_ids,
                slot=grant.slot,
                expires_at=now + self._ttl_s,
                history=(Transition(now, S.RESERVED, "reserve"),),
                claim=claim,
                num_held=grant.num_held,
            )
            self._live[lease.id] = lease
            self._by_key[key] = lease.id
            return self._move(lease, S.COMPUTING, "its prompt is computed here") if is_local else lease

    def writer_quiet(self, lease_id: str, epoch: int, writer_id: str, *, record_sent: bool = False) -> Lease:
        """The writer has no write in flight and will start none: what waits for it is freed. Once verified, a lease is the
        decode loop's, and this changes nothing. `record_sent`: the record is on its way or was processed, so a lease that
        still waits goes on waiting for it, but not for long: a record lost or spoilt on the way must not hold up the
        request's next attempt. It then expires without quarantine.

        Raises:
            LeaseLost: unknown, of another epoch, or of another writer.
        """
        with self._lock:
            lease = self._find(lease_id, epoch)
            if lease.writer_id != writer_id:
                raise LeaseLost(f"lease {lease_id} is not held by writer {writer_id}")
            if lease.state in AWAITED_STATES and record_sent:
                soon = min(lease.expires_at, self._clock.now() + RECORD_GRACE_S)
                lease = self._live[lease_id] = replace(lease, writer_finished=True, expires_at=soon)
                return lease
            return self._settle(lease, "writer quiet")

    def abandon(self, request_id: str, attempt: int, writer_id: str) -> None:
        """The writer never learnt what it was granted for this attempt, so it wrote nothing: end it. A reservation that is
        still on its way will be refused."""
        with self._lock:
            lease_id = self._by_key.get((request_id, attempt))
            if lease_id is None:
                _remember(self._abandoned, (request_id, attempt))
            elif self._live[lease_id].writer_id == writer_id:
                self._settle(self._live[lease_id], "abandoned")

    def writer_dead(self, writer_id: str) -> list[Lease]:
        """The writer's process is known to be gone, so it writes no more: frees all that waited for it. What it asked for
        before, and what is still on its way, is refused from now on. Returns the leases that ended."""
        with self._lock:
            _remember(self._dead_writers, writer_id)
            mine = [lease for lease in self._live.values() if lease.writer_id == writer_id]
            waiting = [lease for lease in mine if lease.state in AWAITED_STATES or lease.state is S.QUARANTINED]
            return [self._settle(lease, "writer dead") for lease in waiting]

    # ---- the receiver reports ----

    def write_seen(self, lease_id: str, epoch: int) -> Lease:
        """The writer gave a sign of life: its writes began or go on. Moves the expiry; no news for other states.

        Raises:
            LeaseLost: unknown, ended or of another epoch.
        """
        with self._lock:
            lease = self._find_live(lease_id, epoch)
            if lease.state not in AWAITED_STATES:
                return lease
            if lease.state is S.RESERVED:
                lease = self._move(lease, S.RECEIVING, "first write")
            lease = self._live[lease_id] = replace(lease, expires_at=self._clock.now() + self._ttl_s)
            return lease

    def verified(self, lease_id: str, epoch: int) -> Lease:
        """The record held in every field. Raises LeaseLost if the lease is no longer waiting for it."""
        with self._lock:
            lease = self._find_live(lease_id, epoch)
            if lease.state not in AWAITED_STATES:
                raise LeaseLost(f"lease {lease_id} is {lease.state.value}")
            self._memory.keep(lease)
            return self._move(lease, S.VERIFIED, "record verified")

    def computed(self, lease_id: str, epoch: int) -> Lease:
        """Its prompt was computed here, and is as good as one whose record was verified. Raises LeaseLost: it has ended."""
        with self._lock:
            lease = self._find_live(lease_id, epoch)
            if lease.state is not S.COMPUTING:
                raise LeaseLost(f"lease {lease_id} is {lease.state.value}, not computing")
            self._memory.keep(lease)
            return self._move(lease, S.VERIFIED, "its prompt was computed here")

    # ---- the decode loop acts ----

    def start_running(self, lease_id: str, epoch: int) -> Lease:
        """The sequence joins the batch. Raises LeaseLost if the lease was aborted since it was verified."""
        with self._lock:
            lease = self._find_live(lease_id, epoch)
            if lease.state is not S.VERIFIED:
                raise LeaseLost(f"lease {lease_id} is {lease.state.value}, not verified")
            return self._move(lease, S.RUNNING, "joined the batch")

    def release(self, lease_id: str, epoch: int, cause: str = "finished") -> bool:
        """The sequence ended: free its memory. False: it had ended already; nothing is freed twice.

        Raises:
            LeaseLost: unknown or of another epoch.
        """
        with self._lock:
            lease = self._find(lease_id, epoch)
            if lease.id not in self._live:
                return False
            self._end(self._running(lease_id, epoch), S.RELEASED, cause)
            return True

    def grow(self, lease_id: str, epoch: int, num_blocks: int) -> Lease:
        """The running sequence takes blocks until it has so many. They come from the free ones alone, so no writer of another
        lease can still reach them.

        Raises:
            NoRoom: fewer are free; nothing was taken. LeaseLost: it does not run.
        """
        with self._lock:
            lease = self._running(lease_id, epoch)
            taken = self._memory.take_blocks(lease_id, max(0, num_blocks - len(lease.block_ids)))
            lease = self._live[lease_id] = replace(lease, block_ids=lease.block_ids + taken)
            return lease

    def swap_out(self, lease_id: str, epoch: int, cause: str) -> Lease:
        """The running sequence was copied to host memory: free all it holds here. Raises LeaseLost: it does not run."""
        with self._lock:
            lease = self._running(lease_id, epoch)
            self._memory.free(lease)
            moved = self._move(lease, S.SWAPPED, cause)
            self._past.append(moved)
            away = self._live[lease_id] = replace(moved, block_ids=(), slot=NO_SLOT)
            return away

    def swap_in(self, lease_id: str, epoch: int, num_blocks: int) -> Lease:
        """It comes back, to other blocks and another slot; what they hold is for the caller to restore.

        Raises:
            NoRoom: too little is free. LeaseLost: it was aborted meanwhile.
        """
        with self._lock:
            lease = self._find_live(lease_id, epoch)
            if lease.state is not S.SWAPPED:
                raise LeaseLost(f"lease {lease_id} is {lease.state.value}, not swapped")
            # Its copy is written into all of them, so none may be others' too.
            grant = self._memory.take(lease_id, num_blocks, self._memory.no_prefix, may_share=False)
            moved = self._move(lease, S.RUNNING, "came back")
            back = self._live[lease_id] = replace(moved, block_ids=grant.block_ids, slot=grant.slot, num_held=0)
            return back

    # ---- anybody ends it ----

    def abort(self, lease_id: str, cause: str) -> Lease:
        """End a lease early. While the writer may write, its memory goes to quarantine; after verification it is freed at once.
        A *running* or *computing* lease may be aborted only by the decode loop, and while no step of it is under way: such a
        step writes into its blocks.
        A swapped one holds nothing; its copy is the decode loop's.
        For an ended lease nothing happens.

        Raises:
            LeaseLost: unknown.
        """
        with self._lock:
            lease = self._find(lease_id, self.epoch)
            if lease.state in AWAITED_STATES:
                return self._end(lease, S.ABORTED, cause) if lease.writer_finished else self._move(lease, S.QUARANTINED, cause)
            if lease.state in (S.COMPUTING, S.VERIFIED, S.RUNNING, S.SWAPPED):
                return self._end(lease, S.ABORTED, cause)
            return lease

    def expire(self, now: float) -> list[Lease]:
        """End what waited in vain until `now`; the memory goes to quarantine unless the writer has finished.
        Returns those leases."""
        with self._lock:
            late = [lease for lease in self._live.values() if lease.state in AWAITED_STATES and lease.expires_at <= now]
            return [
                self._end(lease, S.EXPIRED, "expired") if lease.writer_finished else self._move(lease, S.QUARANTINED, "expired")
                for lease in late
            ]

    # ---- anybody looks ----

    def get(self, lease_id: str, epoch: int) -> Lease:
        """The newest snapshot, of an ended lease too while it is remembered. Raises LeaseLost."""
        with self._lock:
            return self._find(lease_id, epoch)

    def find(self, request_id: str, attempt: int) -> Lease | None:
        """The live lease of one attempt of a request."""
        with self._lock:
            lease_id = self._by_key.get((request_id, attempt))
            return None if lease_id is None else self._live[lease_id]

    def find_or_refuse(self, request_id: str, attempt: int) -> Lease | None:
        """As `find`, for an attempt that nobody waits for any more: where there is no lease, a reservation that is still on its
        way will be refused. It comes from the prefill worker, and the router's word may pass it."""
        with self._lock:
            lease_id = self._by_key.get((request_id, attempt))
            if lease_id is None:
                _remember(self._abandoned, (request_id, attempt))
                return None
            return self._live[lease_id]

    def of_router(self, router_id: str) -> list[Lease]:
        """The live leases whose stream is this router's."""
        with self._lock:
            return [lease for lease in self._live.values() if lease.router_id == router_id]

    def all_live(self) -> list[Lease]:
        """Whatever holds memory."""
        with self._lock:
            return list(self._live.values())

    @property
    def num_awaited(self) -> int:
        """Leases whose record has yet to come."""
        with self._lock:
            return sum(lease.state in AWAITED_STATES for lease in self._live.values())

    def counts_by_state(self) -> dict[str, int]:
        """Leases that hold memory, by state; every live state is present, so that a metric is never absent."""
        with self._lock:
            counts = Counter(lease.state for lease in self._live.values())
            return {state.value: counts[state] for state in LIVE_STATES}

    def ended_by_state(self) -> dict[str, int]:
        """How many leases ended in each final state since start."""
        with self._lock:
            return {state.value: self._ended_counts[state] for state in FINAL_STATES}

    def oldest_age_by_state(self) -> dict[str, float]:
        """Seconds that the longest-standing lease has spent in its present state; 0.0 where there is none."""
        with self._lock:
            now = self._clock.now()
            ages = dict.fromkeys((state.value for state in LIVE_STATES), 0.0)
            for lease in self._live.values():
                ages[lease.state.value] = max(ages[lease.state.value], now - lease.history[-1].at_s)
            return ages

    def check(self) -> list[str]:
        """What does not sum: an index neither free nor held, or held twice. Empty when all is well."""
        with self._lock:
            return self._memory.check(list(self._live.values()))

    def kept(self) -> KeptIndex:
        """The prompts whose blocks are kept."""
        with self._lock:
            return self._memory.kept()

    def num_blocks_free(self) -> int:
        """Blocks that could be had at once."""
        with self._lock:
            return self._memory.num_free

    def num_blocks_used(self) -> int:
        """Blocks that leases hold; what is only kept is not among them."""
        with self._lock:
            return self._memory.blocks.size - self._memory.num_free

    def num_blocks_counted(self) -> int:
        """Blocks that a new reservation takes for used: held, or expected of what is here."""
        with self._lock:
            return self._memory.num_counted(self._live.values())

    def history(self, name: str) -> str:
        """The newest lease that held what `check` calls "block 7" or "slot 2", if only until its end or its eviction, and what
        became of it."""
        kind, index = name.split()
        with self._lock:
            for lease in (*self._live.values(), *reversed(self._past)):
                if int(index) in (lease.block_ids if kind == "block" else lease.slots):
                    return f"last held by {lease.story}"
        return f"none of the last {_REMEMBERED_ENDED} leases held it"

    # ---- under the lock ----

    def _find(self, lease_id: str, epoch: int) -> Lease:
        lease = self._live.get(lease_id) or self._ended.get(lease_id)
        if lease is None or epoch != self.epoch:
            raise LeaseLost(f"lease {lease_id} of epoch {epoch} is not known (this is epoch {self.epoch})")
        return lease

    def _find_live(self, lease_id: str, epoch: int) -> Lease:
        lease = self._find(lease_id, epoch)
        if lease.id not in self._live:
            raise LeaseLost(f"lease {lease_id} is {lease.state.value}: {lease.history[-1].cause}")
        return lease

    def _running(self, lease_id: str, epoch: int) -> Lease:
        lease = self._find_live(lease_id, epoch)
        if lease.state is not S.RUNNING:
            raise LeaseLost(f"lease {lease_id} is {lease.state.value}, not running")
        return lease

    def _settle(self, lease: Lease, cause: str) -> Lease:
        """Free what waited for the writer; leave everything else as it is."""
        if lease.state in AWAITED_STATES:
            return self._end(lease, S.ABORTED, cause)
        if lease.state is S.QUARANTINED:
            expired = lease.history[-1].cause == "expired"
            return self._end(lease, S.EXPIRED if expired else S.ABORTED, cause)
        return lease

    def _move(self, lease: Lease, state: LeaseState, cause: str) -> Lease:
        assert state in MOVES[lease.state], f"{lease.state.value} → {state.value}"
        moved = replace(lease, history=(*lease.history, Transition(self._clock.now(), state, cause)))
        self._live[lease.id] = moved
        return moved

    def _end(self, lease: Lease, state: LeaseState, cause: str) -> Lease:
        """Where memory becomes free for good."""
        ended = self._move(lease, state, cause)
        del self._live[lease.id]
        del self._by_key[lease.key]
        self._memory.free(lease)
        self._ended[lease.id] = ended
        self._past.append(ended)
        self._ended_counts[state] += 1
        if len(self._ended) > _REMEMBERED_ENDED:
            self._ended.popitem(last=False)
        return ended


def _remember(known: OrderedDict[K, None], key: K) -> None:
    """The newest few thousand: what comes late comes soon."""
    known[key] = None
    if len(known) > _REMEMBERED_ENDED:
        known.popitem(last=False)

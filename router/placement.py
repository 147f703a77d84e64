"""Which two workers serve a request: a pure decision over a snapshot.

Prefill: the least work before the first token, that is the prompt tokens that go first there less those of this prompt that the
worker need not compute again. So requests that begin alike find the same worker, until its queue outweighs what that would
save. Decode: the most headroom, the smaller of the free shares of KV blocks and of state slots, since a full state pool
refuses work however many blocks are free; a worker that keeps the prompt's blocks is preferred to one with little more. Ties
are broken by a hash of request and worker, so equal workers share the load and the same request finds the same worker.

A short prompt may be computed on the decode worker itself (`router.local_prefill`), which is chosen as for any other.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from router.local_prefill import LocalWay, ShippedWay, is_local_better
from router.prefixes import PrefixDirectory
from tandem.cache.growth import expected_blocks
from tandem.cache.names import Prefix
from tandem.request import ServiceClass

__all__ = ["Decision", "Need", "NeverFits", "NoRoomNow", "NoWorker", "Placement", "Snapshot", "WorkerView", "place"]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. What this router has assigned and the worker has not yet reported is counted in.

    ready: connected, not draining, of the right model. queue_tokens: prompt tokens waiting or being computed. batch_tokens,
    batch_blocks, batch_slots: of these, those of requests of class batch. overcommit, batch_share: of a decode worker, see
    `DecodeConfig`: by the first it counts a request with less than the blocks of its longest answer, by the second it gives no
    more to requests of class batch. token_s, step_s, step_tokens, reserve_s: see `router.local_prefill`. local_tokens,
    local_share: of a decode worker: longest prompt that it computes itself, 0: none, and its share of a step's time.
    block_bytes, state_bytes: of what travels.

    A placement looks at every worker, so what it compares is made once. headroom: 0 (full) … 1 (empty). free_blocks: -1
    where no state slot is free. kind: workers of the same one count a request with the same blocks.
    """

    id: str
    ready: bool = True
    queue_tokens: int = 0
    running: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    state_slots_used: int = 0
    state_slots_total: int = 0
    block_size_tokens: int = 1
    batch_tokens: int = 0
    batch_blocks: int = 0
    batch_slots: int = 0
    overcommit: float = 1.0
    batch_share: float = 1.0
    token_s: float = 0.0
    step_s: float = 0.0
    reserve_s: float = 0.0
    step_tokens: int = 0
    local_tokens: int = 0
    local_share: float = 1.0
    block_bytes: int = 0
    state_bytes: int = 0
    headroom: float = field(init=False)
    free_blocks: int = field(init=False)
    kind: tuple[int, float] = field(init=False)

    def __post_init__(self) -> None:
        used = max(self.kv_blocks_used / (self.kv_blocks_total or 1), self.state_slots_used / (self.state_slots_total or 1))
        has_slot = self.state_slots_used < self.state_slots_total
        object.__setattr__(self, "headroom", max(0.0, 1.0 - used))
        object.__setattr__(self, "free_blocks", self.kv_blocks_total - self.kv_blocks_used if has_slot else -1)
        object.__setattr__(self, "kind", (self.block_size_tokens, self.overcommit))

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size_tokens)

    def can_ever_hold(self, tokens: int) -> bool:
        return self.blocks(tokens) <= self.kv_blocks_total and self.state_slots_total > 0

    def expected_blocks(self, need: Need) -> int:
        """What a decode worker counts the request with."""
        now, whole = self.blocks(need.num_prompt_tokens), self.blocks(need.max_total_tokens)
        return expected_blocks(now, whole, self.overcommit, resumed=need.is_resumed)

    def has_batch_room(self, num_blocks: int) -> bool:
        """Batch would hold no more than its share of blocks and of slots. One request of it may always be here.
        num_blocks: that it counts the request with."""
        if not self.batch_slots:
            return True
        blocks_fit = self.batch_blocks + num_blocks <= int(self.batch_share * self.kv_blocks_total)
        return blocks_fit and self.batch_slots + 1 <= int(self.batch_share * self.state_slots_total)


@dataclass(frozen=True, slots=True)
class Snapshot:
    prefill: tuple[WorkerView, ...] = ()
    decode: tuple[WorkerView, ...] = ()
    prefixes: PrefixDirectory = field(default_factory=PrefixDirectory)


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of its workers. max_total_tokens: positions that the sequence can reach. prefix: what is to be
    absorbed, if any of it may have been before. num_tokens: positions that prefill absorbs; 0: as many as it can reach.
    is_resumed: part of the answer was delivered already. was_refused: a decode worker would not compute its prompt."""

    request_id: str
    max_total_tokens: int
    prefix: Prefix | None = None
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    num_tokens: int = 0
    is_resumed: bool = False
    was_refused: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens or self.max_total_tokens

    @property
    def ends_at_once(self) -> bool:
        """The first token is the last: nothing travels."""
        return self.num_tokens == self.max_total_tokens


@dataclass(frozen=True, slots=True)
class Placement:
    """prefill_id: who computes the prompt; it may be the decode worker. hit_tokens: that a prefill worker is expected to have.
    absorber_id: where the decode worker computes the prompt: the prefill worker that would have; empty: there is none.
    saved_bytes: that then do not travel."""

    prefill_id: str
    decode_id: str
    hit_tokens: int = 0
    absorber_id: str = ""
    saved_bytes: int = 0

    @property
    def is_local(self) -> bool:
        return self.prefill_id == self.decode_id


@dataclass(frozen=True, slots=True)
class NoWorker:
    """A pool has no ready worker: wait for one to come."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoRoomNow:
    """Ready workers exist, all of them too full: wait for one of their requests to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class NeverFits:
    """No worker, however empty, can hold the request: refuse it."""

    reason: str


Decision = Placement | NoWorker | NoRoomNow | NeverFits
# Excluded ones come last; then what is compared; then what decides among equals.
_Cost = tuple[bool, float, int]

# A decode worker that keeps a whole prompt's blocks, which then need not travel, is chosen although its headroom is by so much
# less. Bounded, so that what many prompts share makes no hot spot.
_HELD_WORTH = 0.1


def place(snapshot: Snapshot, need: Need, exclude: Set[str] = frozenset(), handoff_s: float = 0.0) -> Decision:
    """Two workers for `need`, or why there are none. Workers in `exclude` are taken only when no other will do.
    handoff_s: see `ShippedWay`."""
    tokens = need.max_total_tokens
    if snapshot.decode and not any(worker.can_ever_hold(tokens) for worker in snapshot.decode):
        most = max(w.kv_blocks_total * w.block_size_tokens if w.state_slots_total else 0 for w in snapshot.decode)
        return NeverFits(f"the sequence can reach {tokens} tokens, and no decode worker can hold more than {most}")
    prefill = [worker for worker in snapshot.prefill if worker.ready]
    decode = [worker for worker in snapshot.decode if worker.ready]
    able = decode if prefill else [worker for worker in decode if need.num_prompt_tokens <= worker.local_tokens]
    if not able:
        missing = " and ".join(name for name, pool in (("prefill", prefill), ("decode", decode)) if not pool)
        return NoWorker(f"no {missing} worker is ready")
    blocks = {worker.kind: worker.expected_blocks(need) for worker in {worker.kind: worker for worker in able}.values()}
    roomy = [worker for worker in able if blocks[worker.kind] <= worker.free_blocks]
    if not roomy:
        return NoRoomNow(f"no decode worker has room for {tokens} tokens now")
    if need.service_class is ServiceClass.BATCH:
        roomy = [worker for worker in roomy if worker.has_batch_room(blocks[worker.kind])]
        if not roomy:
            return NoRoomNow("requests of class batch hold their share of all decode workers with room")

    hits = snapshot.prefixes.hits(need.prefix) if need.prefix is not None else {}
    chosen_decode = _least(roomy, _fullness(roomy, need, hits, exclude), need.request_id)
    if not prefill:
        return _local(need, chosen_decode, "")
    chosen_prefill = _least(prefill, _work(prefill, need, hits, exclude), need.request_id)
    shipped = Placement(chosen_prefill.id, chosen_decode.id, hits.get(chosen_prefill.id, 0))
    if _may_be_local(need, chosen_decode) and is_local_better(*_ways(need, chosen_prefill, chosen_decode, shipped, handoff_s)):
        return _local(need, chosen_decode, chosen_prefill.id)
    return shipped


def _may_be_local(need: Need, decode: WorkerView) -> bool:
    """Batch requests are in no hurry, and whoever was refused is not sent there again."""
    is_urgent = need.service_class is ServiceClass.INTERACTIVE and not need.was_refused
    return is_urgent and need.num_prompt_tokens <= decode.local_tokens


def _ways(
    need: Need, prefill: WorkerView, decode: WorkerView, shipped: Placement, handoff_s: float
) -> tuple[ShippedWay, LocalWay]:
    num_tokens = need.num_prompt_tokens
    there = ShippedWay(
        num_tokens=max(1, num_tokens - shipped.hit_tokens),
        queue_tokens=prefill.queue_tokens - prefill.batch_tokens,
        token_s=prefill.token_s,
        step_tokens=prefill.step_tokens,
        reserve_s=prefill.reserve_s,
        handoff_s=handoff_s,
        num_bytes=_travelling_bytes(need, decode),
    )
    here = LocalWay(num_tokens, decode.queue_tokens, decode.token_s, decode.step_s, decode.running, decode.local_share)
    return there, here


def _local(need: Need, decode: WorkerView, absorber_id: str) -> Placement:
    return Placement(decode.id, decode.id, absorber_id=absorber_id, saved_bytes=_travelling_bytes(need, decode))


def _travelling_bytes(need: Need, decode: WorkerView) -> int:
    return 0 if need.ends_at_once else decode.state_bytes + decode.blocks(need.num_prompt_tokens) * decode.block_bytes


def _work(workers: Sequence[WorkerView], need: Need, hits: Mapping[str, int], exclude: Set[str]) -> list[_Cost]:
    """Tokens that each would compute before it is done with the prompt, but for those of the prompt, which are the same."""
    # Interactive prompts pass batch ones.
    passes = need.service_class is ServiceClass.INTERACTIVE
    return [
        (w.id in exclude, w.queue_tokens - (w.batch_tokens if passes else 0) - hits.get(w.id, 0), w.running) for w in workers
    ]


def _fullness(workers: Sequence[WorkerView], need: Need, hits: Mapping[str, int], exclude: Set[str]) -> list[_Cost]:
    worth = _HELD_WORTH / len(need.prefix.tokens) if need.prefix is not None and hits else 0.0
    return [(w.id in exclude, -w.headroom - worth * hits.get(w.id, 0), 0) for w in workers]


def _least(workers: Sequence[WorkerView], costs: Sequence[_Cost], request_id: str) -> WorkerView:
    """Ties by the hash of request and worker; it is made for those alone that tie."""
    least = min(costs)
    tied = [worker for worker, its in zip(workers, costs, strict=True) if its == least]
    return tied[0] if len(tied) == 1 else min(tied, key=lambda worker: zlib.crc32(f"{request_id}/{worker.id}".encode()))

"""The two pools behind a decode worker's leases, and who is let in. Not thread-safe: used under the table's lock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.cache.growth import expected_blocks
from tandem.cache.names import Prefix
from tandem.cache.pool import IndexPool
from tandem.cache.prefix import Hit, Holding, PrefixCache
from tandem.cache.spec import CacheSpecs
from tandem.errors import InvalidRequest, NoRoom
from tandem.request import Request, ServiceClass
from transfer.kept_index import KeptIndex, KeptIndexer
from transfer.lease_state import Claim, Lease, LeaseState

__all__ = ["AdmissionPolicy", "Grant", "LeaseMemory", "claim_of"]


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """overcommit, batch_share, keep_prefixes: see `DecodeConfig`. whole_tokens: prompts are kept up to a multiple of it."""

    overcommit: float = 1.0
    batch_share: float = 0.75
    keep_prefixes: bool = False
    whole_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Grant:
    """num_held: leading blocks that hold the prompt's keys and values already, and may be others' too."""

    block_ids: tuple[int, ...]
    slot: int
    num_held: int = 0


def claim_of(request: Request, specs: CacheSpecs, overcommit: float) -> Claim:
    """What a request takes at once, is counted with, and can reach. Without overcommit these are the same."""
    num_tokens, resumed = len(request.tokens), bool(request.generated)
    whole = specs.blocks_for(request.max_total_tokens)
    expected = expected_blocks(specs.blocks_for(num_tokens), whole, overcommit, resumed=resumed)
    first = whole if expected == whole else specs.blocks_for(num_tokens + 1)
    return Claim(first, expected, whole, request.service_class is ServiceClass.BATCH)


class LeaseMemory:
    """Admission counts, for every lease, the greater of what it holds and what it is expected to take; one slot each.

    While a sequence waits in host memory nobody is let in: it comes back before anything new begins.

    Full blocks of verified prompts stay when their lease ends, as long as nobody needs them (`AdmissionPolicy.keep_prefixes`).
    A lease's blocks from `num_held` on are its own until its record is verified: only those does its writer write.
    """

    def __init__(
        self, blocks: IndexPool, slots: IndexPool, specs: CacheSpecs, policy: AdmissionPolicy, fingerprint: str
    ) -> None:
        self.blocks = blocks
        self.slots = slots
        self._specs = specs
        self._policy = policy
        self._kept = PrefixCache(blocks, (), specs.block_size_tokens, keeps_kv_alone=policy.keep_prefixes)
        self._kept_index = KeptIndexer(self._kept)
        self._holdings: dict[str, Holding] = {}
        self._fingerprint = fingerprint
        self.no_prefix = Prefix.of("", specs.block_size_tokens, ())

    @property
    def num_free(self) -> int:
        """Blocks that can be had at once: those that are only kept make room."""
        return self.blocks.num_free + self._kept.num_unpinned

    def prefix_of(self, request: Request) -> Prefix:
        """With the names of its blocks, which takes a while for a long prompt."""
        if not self._policy.keep_prefixes:
            return self.no_prefix
        prefix = Prefix.of(self._fingerprint, self._specs.block_size_tokens, request.tokens)
        _ = prefix.names
        return prefix

    def claim(self, request: Request) -> Claim:
        """Raises InvalidRequest: it could never fit, even alone."""
        claim = claim_of(request, self._specs, self._policy.overcommit)
        if claim.whole > self.blocks.size:
            field = "prompt" if self._specs.blocks_for(len(request.prompt)) > self.blocks.size else "max_new_tokens"
            limit = self.blocks.size * self._specs.block_size_tokens
            raise InvalidRequest(field, f"{request.max_total_tokens} positions, a decode worker holds at most {limit}")
        return claim

    def num_counted(self, live: Iterable[Lease]) -> int:
        """Blocks that admission takes for used."""
        leases = list(live)
        if any(lease.state is LeaseState.SWAPPED for lease in leases):
            return self.blocks.size
        return sum(map(_counted, leases))

    def require_room(self, claim: Claim, live: Sequence[Lease]) -> None:
        """Raises NoRoom, with all that is short."""
        away = sum(lease.state is LeaseState.SWAPPED for lease in live)
        if away:
            raise NoRoom(f"{away} evicted sequences come back first")
        short = []
        free = self.blocks.size - self.num_counted(live)
        if claim.expected > free:
            short.append(f"{claim.expected} KV blocks wanted, {max(0, free)} free")
        if not self.slots.can_allocate(1):
            short.append("no state slot free")
        if claim.is_batch:
            short += self._beyond_share(claim, [lease for lease in live if lease.claim.is_batch])
        if short:
            raise NoRoom("; ".join(short))

    def _beyond_share(self, claim: Claim, batch: Sequence[Lease]) -> list[str]:
        """What `batch` would take of the headroom of others. A lone request of it may take what it needs."""
        if not batch:
            return []
        beyond = []
        most_blocks, most_slots = (int(self._policy.batch_share * pool.size) for pool in (self.blocks, self.slots))
        if (num_blocks := claim.expected + sum(map(_counted, batch))) > most_blocks:
            beyond.append(f"batch requests would hold {num_blocks} KV blocks, {most_blocks} are theirs")
        if len(batch) >= most_slots:
            beyond.append(f"batch requests hold {len(batch)} state slots, {most_slots} are theirs")
        return beyond

    def take(self, lease_id: str, num_blocks: int, prefix: Prefix, *, may_share: bool) -> Grant:
        """Blocks and a slot; may_share: what is kept of `prefix` first. Raises NoRoom."""
        hit = self._kept.match_kv(prefix) if may_share else Hit()
        holding = self._kept.take(prefix, hit, num_blocks) if self.slots.can_allocate(1) else None
        if holding is None:
            raise NoRoom(f"{num_blocks} KV blocks and a slot wanted, {self.num_free} and {self.slots.num_free} free")
        self._holdings[lease_id] = holding
        return Grant(holding.block_ids, self.slots.allocate(1)[0], len(hit.path))

    def take_blocks(self, lease_id: str, count: int) -> tuple[int, ...]:
        """For a sequence that grows. Raises NoRoom."""
        taken = self._kept.grow(self._holdings[lease_id], count)
        if taken is None:
            raise NoRoom(f"{count} KV blocks wanted, {self.num_free} free")
        return taken

    def keep(self, lease: Lease) -> None:
        """Its record was verified, so its prompt's keys and values are final: later prompts may share the full blocks."""
        holding = self._holdings[lease.id]
        whole = self._policy.whole_tokens
        self._kept.commit(holding, len(lease.request.tokens) // whole * whole)
        if holding.path:
            self._kept_index.note(holding.path[-1])

    def kept(self) -> KeptIndex:
        """For routers."""
        return self._kept_index.index()

    def free(self, lease: Lease) -> None:
        """All that it holds; the inverse of what it took."""
        if (holding := self._holdings.pop(lease.id, None)) is not None:
            self._kept.release(holding)
        self.slots.free(lease.slots)

    def check(self, live: Sequence[Lease]) -> list[str]:
        """What does not sum: an index neither free nor held, or held twice. Empty when all is well."""
        kept = self._kept.block_ids()
        own_blocks = [block for lease in live for block in lease.block_ids if block not in kept]
        held_slots = [slot for lease in live for slot in lease.slots]
        wrong = [f"block {index}" for index in self.blocks.check([*kept, *own_blocks])]
        wrong += [name for name in self._kept.check(self._holdings.values()) if name not in wrong]
        return wrong + [f"slot {index}" for index in self.slots.check(held_slots)]


def _counted(lease: Lease) -> int:
    """A lease in quarantine grows no more."""
    held = len(lease.block_ids)
    return held if lease.state is LeaseState.QUARANTINED else max(held, lease.claim.expected)

"""Blocks and recurrent checkpoints that outlive their prompt, so that a prefix is computed once. Pure bookkeeping.

A tree of *nodes*. A node is one KV block together with everything before it: a full block, or (a leaf for ever) the partly
filled last block of a sequence whose state was kept at its very end. A node may own a *checkpoint*: the slot of a copy of the
recurrent and convolution state at its last position. A prompt can start only where both are.

A prompt pins a path from the root. What nobody pins may be evicted: the least recently used first, and of one path the
deepest first, so every node's ancestors are always there. With a node its checkpoint goes; a checkpoint may also go alone.

Where states come from elsewhere (on a decode worker) keys and values are of use alone: `match_kv` hits without checkpoints.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.cache.names import Prefix, child_name
from tandem.cache.pool import IndexPool

__all__ = ["Hit", "Holding", "Node", "PrefixCache"]


@dataclass(slots=True, eq=False)
class Node:
    """parent_name: of the full blocks before. tokens: of its block alone. num_tokens: position after its last one.
    pins: prompts on whose path it lies. used: tick of the newest use; a parent's is never older. slot: of its checkpoint."""

    name: bytes
    parent_name: bytes
    parent: Node | None
    is_partial: bool
    tokens: tuple[int, ...]
    num_tokens: int
    block_id: int
    pins: int = 0
    num_children: int = 0
    used: int = 0
    slot: int | None = None
    partials: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hit:
    """path: nodes of the full blocks that the prompt shares, as far as it starts after them. partial: the node whose block and
    checkpoint end inside a block, or None. slot: of the checkpoint at `num_tokens`; None exactly when that is 0.
    num_kv_tokens: so far keys and values were there, with or without a checkpoint."""

    num_tokens: int = 0
    path: tuple[Node, ...] = ()
    partial: Node | None = None
    slot: int | None = None
    num_kv_tokens: int = 0


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks of one prompt. Position i of `block_ids` is block i of the sequence. path: pinned nodes of its leading blocks,
    whether or not it uses their blocks. private: blocks that are nobody else's."""

    prefix: Prefix
    block_ids: tuple[int, ...]
    path: list[Node]
    private: set[int]
    last: Node | None = None


class PrefixCache:
    """blocks: the pool, shared with nobody else. slots: those that checkpoints may use; none turns the cache off, nothing is
    ever kept and nothing hits, unless it `keeps_kv_alone`. For one thread at a time.

    `take` and `release` are exact inverses. Of a `Hit`, what was not pinned by `take` is good until the next call here.
    """

    def __init__(
        self, blocks: IndexPool, slots: Sequence[int], block_size_tokens: int, *, keeps_kv_alone: bool = False
    ) -> None:
        self._blocks = blocks
        self._keeps_kv_alone = keeps_kv_alone
        self._block_size = block_size_tokens
        self._all_slots = tuple(slots)
        self._free_slots = list(reversed(self._all_slots))
        self._nodes: dict[bytes, Node] = {}
        self._top_partials: list[Node] = []
        self._checkpoints: OrderedDict[bytes, Node] = OrderedDict()
        self._evictable: list[tuple[int, int, int, Node]] = []
        self._ticks = itertools.count(1)
        self._numbers = itertools.count()
        self._num_unpinned = 0
        self.version = 0
        self.num_evicted = 0

    @property
    def is_on(self) -> bool:
        return bool(self._all_slots) or self._keeps_kv_alone

    @property
    def num_unpinned(self) -> int:
        """Cached blocks that would make room at once."""
        return self._num_unpinned

    @property
    def num_checkpoints(self) -> int:
        return len(self._checkpoints)

    # ---- a prompt comes ----

    def match(self, prefix: Prefix) -> Hit:
        """The deepest checkpoint that stands on this prompt's path, before its last position."""
        if not self._nodes and not self._top_partials:
            return Hit()
        last = len(prefix.tokens) - 1
        path: list[Node] = []
        best = Hit()
        for number in range(len(prefix.names) + 1):
            for node in self._partials_after(path):
                end = node.num_tokens
                if node.slot is not None and best.num_tokens < end <= last and self._continues(node, prefix, number):
                    best = Hit(end, tuple(path), node, node.slot)
            full = self._nodes.get(prefix.names[number]) if number < len(prefix.names) else None
            if full is None or full.tokens != prefix.block(number):  # equal hashes of unequal tokens: believe neither
                break
            path.append(full)
            if full.slot is not None and full.num_tokens <= last:
                best = Hit(full.num_tokens, tuple(path), None, full.slot)
        return Hit(best.num_tokens, best.path, best.partial, best.slot, len(path) * self._block_size)

    def match_kv(self, prefix: Prefix) -> Hit:
        """The full blocks on this prompt's path, up to its end, with or without checkpoints."""
        path: list[Node] = []
        if self._nodes:
            for number, name in enumerate(prefix.names):
                node = self._nodes.get(name)
                if node is None or node.tokens != prefix.block(number):
                    break
                path.append(node)
        num_tokens = len(path) * self._block_size
        return Hit(num_tokens, tuple(path), num_kv_tokens=num_tokens)

    def take(self, prefix: Prefix, hit: Hit, num_blocks: int) -> Holding | None:
        """Pin what was hit and allocate the rest of `num_blocks`, evicting if need be. None: there is no room, nothing changed.

        Of a partial hit the block is not shared: the caller copies `hit.partial.block_id` to the block after the path.
        """
        pinned = [*hit.path, *([hit.partial] if hit.partial else [])]
        self._pin(pinned)
        wanted = num_blocks - len(hit.path)
        if not self.can_allocate(wanted):
            self._unpin(pinned, touch=False)
            return None
        own = self._allocate(wanted)
        if hit.partial is not None:
            self._unpin([hit.partial])
        if hit.slot is not None:
            self._checkpoints.move_to_end((hit.partial or hit.path[-1]).name)
        shared = [node.block_id for node in hit.path]
        return Holding(prefix, (*shared, *own), list(hit.path), set(own))

    def can_allocate(self, count: int) -> bool:
        return count <= self._blocks.num_free + self._num_unpinned

    def grow(self, holding: Holding, count: int) -> tuple[int, ...] | None:
        """So many blocks more, which are nobody else's. None: there is no room, nothing changed."""
        if not self.can_allocate(count):
            return None
        taken = tuple(self._allocate(count))
        holding.block_ids += taken
        holding.private.update(taken)
        return taken

    def release(self, holding: Holding) -> None:
        """Nothing reads or writes its blocks any more. What was committed stays cached, the rest is free."""
        if holding.last is not None:
            self._unpin([holding.last])
        self._unpin(holding.path)
        self._blocks.free(sorted(holding.private))
        holding.private.clear()
        holding.path.clear()
        holding.last = None
        holding.prefix = Prefix(b"", (), self._block_size)  # whoever remembers the holding need not keep its tokens

    # ---- a prompt goes on ----

    def commit(self, holding: Holding, num_tokens: int) -> None:
        """The first `num_tokens` positions are final in the blocks: others may share the full ones from now on.

        Where another prompt was first, its block is the one that is shared; this prompt keeps using its own, and pins both.
        A cache that keeps KV alone goes no further there: what a prompt pins are then its own blocks, never more.
        """
        if not self.is_on:
            return
        prefix = holding.prefix
        for number in range(len(holding.path), num_tokens // self._block_size):
            name, block_id = prefix.names[number], holding.block_ids[number]
            node = self._nodes.get(name)
            if node is None:
                parent = holding.path[-1] if holding.path else None
                end = (number + 1) * self._block_size
                node = self._nodes[name] = Node(
                    name, prefix.name_of(number), parent, False, prefix.block(number), end, block_id
                )
                self._adopt(node, holding)
            elif node.tokens != prefix.block(number) or self._keeps_kv_alone:
                return
            self._pin([node])
            holding.path.append(node)

    def keep(self, holding: Holding, num_tokens: int) -> int | None:
        """A slot that becomes the checkpoint at `num_tokens`: the caller copies the state there at once. None: it is there
        already, or every slot is spoken for, or the position is not on the committed path."""
        node = self._node_at(holding, num_tokens)
        if node is None or node.slot is not None:
            return None
        slot = self._take_slot()
        if slot is None:
            self._drop_if_useless(node)
            return None
        self.attach(node, slot)
        return slot

    def attach(self, node: Node, slot: int) -> None:
        node.slot = slot
        self._checkpoints[node.name] = node
        self.version += 1

    # ---- what others see ----

    def newest(self, count: int) -> list[Node]:
        """Up to `count` nodes with checkpoints, the most recently used first."""
        return list(itertools.islice(reversed(self._checkpoints.values()), count))

    def holds(self, name: bytes) -> bool:
        """Whether the full block of that name is there, and so all before it."""
        return name in self._nodes

    def block_ids(self) -> set[int]:
        """Of all nodes: what is shared, or kept."""
        return {node.block_id for node in (*self._nodes.values(), *(n for some in self._all_partials() for n in some))}

    def check(self, holdings: Iterable[Holding]) -> list[str]:
        """Names ("block 7", "slot 3") of what does not sum while these are all the holdings. Empty when all is well."""
        holdings = list(holdings)
        nodes = [*self._nodes.values(), *(n for partials in self._all_partials() for n in partials)]
        owned = [n.block_id for n in nodes] + [block for h in holdings for block in h.private]
        wrong = [f"block {index}" for index in self._blocks.check(owned)]
        taken = Counter([n.slot for n in nodes if n.slot is not None] + self._free_slots)
        wrong += [f"slot {slot}" for slot in {*taken, *self._all_slots} if taken[slot] != (slot in self._all_slots)]
        wrong += [f"slot {n.slot}" for n in nodes if (self._checkpoints.get(n.name) is n) != (n.slot is not None)]
        pins = Counter(id(node) for h in holdings for node in (*h.path, *([h.last] if h.last else [])))
        wrong += [f"block {n.block_id}" for n in nodes if n.pins != pins[id(n)]]
        assert wrong or self._num_unpinned == sum(n.pins == 0 for n in nodes), "unpinned blocks are miscounted"
        return wrong

    # ---- within ----

    def _partials_after(self, path: Sequence[Node]) -> list[Node]:
        return path[-1].partials if path else self._top_partials

    def _continues(self, node: Node, prefix: Prefix, number: int) -> bool:
        start = number * self._block_size
        return prefix.tokens[start : start + len(node.tokens)] == node.tokens

    def _all_partials(self) -> Iterable[list[Node]]:
        yield self._top_partials
        for node in self._nodes.values():
            yield node.partials

    def _node_at(self, holding: Holding, num_tokens: int) -> Node | None:
        """The node that ends there; the partial one is made of the prompt's last block."""
        if not self.is_on:
            return None
        full, rest = divmod(num_tokens, self._block_size)
        if full > len(holding.path):
            return None
        if rest == 0:
            return holding.path[full - 1] if full else None
        if full != len(holding.path) or num_tokens != len(holding.prefix.tokens) or holding.last is not None:
            return None
        parent = holding.path[-1] if holding.path else None
        siblings = self._partials_after(holding.path)
        tokens = holding.prefix.block(full)
        known = next((node for node in siblings if node.tokens == tokens), None)
        if known is not None:
            return known
        above = holding.prefix.name_of(full)
        node = Node(child_name(above, tokens), above, parent, True, tokens, num_tokens, holding.block_ids[full])
        siblings.append(node)
        self._adopt(node, holding)
        self._pin([node])
        holding.last = node
        return node

    def _adopt(self, node: Node, holding: Holding) -> None:
        """A private block becomes the cache's."""
        holding.private.remove(node.block_id)
        self._num_unpinned += 1
        if node.parent is not None:
            node.parent.num_children += 1

    def _drop_if_useless(self, node: Node) -> None:
        """A partly filled block without its checkpoint serves nobody; pinned, it goes when its prompt does."""
        if node.slot is None and node.pins == 0 and node.is_partial:
            self._remove(node)

    def _pin(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self._num_unpinned -= node.pins == 0
            node.pins += 1

    def _unpin(self, nodes: Sequence[Node], *, touch: bool = True) -> None:
        """`nodes`: along a path, or one below what remains pinned."""
        tick = next(self._ticks)
        for node in reversed(nodes):
            node.pins -= 1
            if touch:
                node.used = tick
            if node.pins == 0:
                self._num_unpinned += 1
                self._offer(node)
                self._drop_if_useless(node)

    def _offer(self, node: Node) -> None:
        """Queue for eviction what nobody pins and nothing stands on. Entries that no longer hold are skipped later."""
        if node.pins == 0 and node.num_children == 0:
            heapq.heappush(self._evictable, (node.used, -node.num_tokens, next(self._numbers), node))
        if len(self._evictable) > 64 + 4 * len(self._nodes) + 4 * len(self._checkpoints):
            self._evictable = [entry for entry in self._evictable if self._holds(entry)]
            heapq.heapify(self._evictable)

    def _holds(self, entry: tuple[int, int, int, Node]) -> bool:
        node = entry[3]
        return entry[0] == node.used and node.pins == 0 and node.num_children == 0 and node.block_id >= 0

    def _allocate(self, count: int) -> list[int]:
        while not self._blocks.can_allocate(count):
            entry = heapq.heappop(self._evictable)
            if self._holds(entry):
                self._remove(entry[3])
        return self._blocks.allocate(count)

    def _take_slot(self) -> int | None:
        """A free slot, or that of the least recently used checkpoint. Copies are made at once, so none is ever in use."""
        if not self._free_slots and self._checkpoints:
            _, node = self._checkpoints.popitem(last=False)
            self._detach(node)
            self._drop_if_useless(node)
        return self._free_slots.pop() if self._free_slots else None

    def _detach(self, node: Node) -> None:
        self._checkpoints.pop(node.name, None)
        if node.slot is not None:
            self._free_slots.append(node.slot)
            node.slot = None
            self.version += 1

    def _remove(self, node: Node) -> None:
        """Evict an unpinned leaf: its block and its checkpoint's slot are free, and its parent may be the next leaf."""
        assert node.pins == 0, "evicted while pinned"
        assert node.num_children == 0, "evicted before what stands on it"
        self._detach(node)
        self.num_evicted += 1
        self._num_unpinned -= 1
        self._blocks.free((node.block_id,))
        node.block_id = -1
        if node.is_partial:
            (node.parent.partials if node.parent else self._top_partials).remove(node)
        else:
            del self._nodes[node.name]
        if node.parent is not None:
            node.parent.num_children -= 1
            self._offer(node.parent)

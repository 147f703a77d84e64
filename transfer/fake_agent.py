"""A transfer agent without a network: moves real bytes between registered tensors of one process, badly if so told.

Time is a clock that the test moves; chance is a seeded generator; so a run repeats exactly. Bytes are copied when a write
falls due, not when it is posted: whoever changes memory too early sees the damage.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.clock import Clock
from tandem.errors import PeerRefused, TransferFailed
from transfer.agent import XferHandle, XferState
from transfer.layout import CacheLayout, Kind
from transfer.plan import Indices

__all__ = ["FakeAgent", "FakeFabric", "Faults", "Landing"]


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong, by chance. delay_s: bounds of the time that a write or a notification takes. The rest are probabilities:

    write_fails: it ends FAILED after half of its items. write_hangs: half of its items land, and it does not end before
    `hang_s` have passed; then it FAILED. late_s: of a write that FAILED the other half lands within so long after.
    notify_lost, notify_doubled: per notification. notify_changed: one byte of it flips.
    read_early: the bytes are those of the moment of posting, not of landing.
    state_changed: per write of state, one bit of it flips on the way. Keys and values are not flipped: the record's checksum
    is over the state alone, and the transport answers for the rest.
    """

    delay_s: tuple[float, float] = (0.0, 0.0)
    write_fails: float = 0.0
    write_hangs: float = 0.0
    hang_s: float = math.inf
    late_s: float = 0.0
    read_early: float = 0.0
    notify_lost: float = 0.0
    notify_doubled: float = 0.0
    notify_changed: float = 0.0
    state_changed: float = 0.0


@dataclass(frozen=True, slots=True)
class Landing:
    """One item of a write at the moment in which its bytes arrive. source_item, target_item: descriptor indices on either side.
    tag: what the writing agent's `tag` was when it posted."""

    source: str
    source_item: int
    target: str
    target_item: int
    tag: object
    posted_s: float


@dataclass(slots=True, eq=False)
class _Write:
    """landed: leading items that have arrived. early: their bytes, if they were read when the write was posted."""

    source: FakeAgent
    target: str
    local: Indices
    remote: Indices
    due_s: float
    outcome: XferState
    changed: bool = False
    reads: bool = False
    posted_s: float = 0.0
    state: XferState = XferState.IN_PROGRESS
    tag: object = None
    landed: int = 0
    early: list[NDArray[np.uint8]] | None = None
    is_late: bool = False


@dataclass(slots=True)
class FakeFabric:
    """Connects `FakeAgent`s. `faults` may be replaced at any time and holds for what is posted from then on.

    on_land(target, descriptor index, when the write was posted), on_landing: called for every item that lands, to see who
    owns it. on_due(agent, when): at that time the agent has something to look at. held: pairs of agents between which
    nothing passes for now; stopped: agents whose writes stand still, as in a process that is stopped.
    """

    clock: Clock
    seed: int = 0
    faults: Faults = field(default_factory=Faults)
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    held: set[frozenset[str]] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    num_landed_items: int = 0
    on_land: Callable[[str, int, float], None] | None = None
    on_landing: Callable[[Landing], None] | None = None
    on_due: Callable[[str, float], None] | None = None
    _random: random.Random = field(init=False)
    _writes: list[_Write] = field(default_factory=list)
    _mail: list[tuple[float, str, str, bytes]] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)  # each agent may live in a thread of its own

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def agent(self, name: str) -> FakeAgent:
        if name in self.agents and name not in self.dead:
            raise ValueError(f"an agent {name} lives already")
        self.dead.discard(name)
        self.agents[name] = FakeAgent(name, self)
        return self.agents[name]

    def kill(self, name: str) -> None:
        """The process of `name` is gone: its own writes stop, writes to it fail, notifications to and from it vanish."""
        with self._lock:
            self.dead.add(name)
            self._writes = [write for write in self._writes if write.source.name != name]
            self._mail = [letter for letter in self._mail if name not in letter[1:3]]

    def in_flight(self, target: str) -> list[tuple[object, list[int]]]:
        """(tag, descriptor indices that it may still change) of every write to `target` that has not ended."""
        return [(w.tag, w.remote[w.landed :].tolist()) for w in self._writes if w.target == target and not w.reads]

    def start(self, write: _Write) -> None:
        with self._lock:
            write.posted_s = self.clock.now()
            write.due_s = write.posted_s + self._random.uniform(*self.faults.delay_s)
            chance = self._random.random()
            if write.target in self.dead or chance < self.faults.write_fails:
                write.outcome = XferState.FAILED
            elif chance < self.faults.write_fails + self.faults.write_hangs:
                write.outcome = XferState.IN_PROGRESS
            write.changed = self._random.random() < self.faults.state_changed
            if not write.reads and self._random.random() < self.faults.read_early:
                write.early = [write.source.item(local).copy() for local in write.local.tolist()]
            self._writes.append(write)
            self._tell(write.source.name, write.due_s)

    def post(self, source: str, target: str, message: bytes) -> None:
        with self._lock:
            copies = 0 if self._random.random() < self.faults.notify_lost else 1
            copies += self._random.random() < self.faults.notify_doubled
            for _ in range(copies):
                sent = message
                if self._random.random() < self.faults.notify_changed:
                    at = self._random.randrange(len(message))
                    sent = message[:at] + bytes([message[at] ^ 1 << self._random.randrange(8)]) + message[at + 1 :]
                due_s = self.clock.now() + self._random.uniform(*self.faults.delay_s)
                self._mail.append((due_s, source, target, sent))
                self._tell(target, due_s)

    def settle(self) -> None:
        """Let everything that is due by now happen."""
        with self._lock:
            now = self.clock.now()
            # On a connection that was closed, what is held up does not arrive at all.
            due = [write for write in self._writes if write.due_s <= now and (write.is_late or not self._is_held(write))]
            if due:
                self._writes = [write for write in self._writes if write not in due]
            for write in due:
                self._end(write)

    def _is_held(self, write: _Write) -> bool:
        return write.source.name in self.stopped or self._is_cut(write.source.name, write.target)

    def _is_cut(self, one: str, other: str) -> bool:
        return bool(self.held) and frozenset((one, other)) in self.held

    def _end(self, write: _Write) -> None:
        if write.target in self.dead or (write.is_late and self._is_held(write)):
            write.state = XferState.FAILED
            return
        if not write.reads:
            self._land(write, len(write.local) if write.outcome is XferState.DONE or write.is_late else len(write.local) // 2)
        if write.outcome is XferState.IN_PROGRESS:
            write.outcome, write.due_s = XferState.FAILED, write.posted_s + self.faults.hang_s
            self._writes.append(write)
            self._tell(write.source.name, write.due_s)
            return
        write.state = write.outcome
        if write.state is XferState.FAILED and self.faults.late_s and not write.is_late and not write.reads:
            due_s = self.clock.now() + self._random.uniform(0.0, self.faults.late_s)
            self._writes.append(dataclasses.replace(write, due_s=due_s, is_late=True))

    def _tell(self, name: str, due_s: float) -> None:
        if self.on_due is not None and due_s < math.inf:
            self.on_due(name, due_s)

    def mail_for(self, target: str) -> list[tuple[str, bytes]]:
        """What is due, in order of arrival, which need not be the order of sending."""
        with self._lock:
            now = self.clock.now()

            def arrives(letter: tuple[float, str, str, bytes]) -> bool:
                return letter[2] == target and letter[0] <= now and not self._is_cut(letter[1], target)

            due = sorted(filter(arrives, self._mail), key=lambda letter: letter[0])
            self._mail = [letter for letter in self._mail if not arrives(letter)]
            return [(source, message) for _, source, _, message in due if target not in self.dead]

    def _land(self, write: _Write, count: int) -> None:
        target = self.agents[write.target]
        first = write.landed
        for place, (local, remote) in enumerate(
            zip(write.local[first:count].tolist(), write.remote[first:count].tolist(), strict=True), start=first
        ):
            if self.on_land is not None:
                self.on_land(write.target, remote, write.posted_s)
            if self.on_landing is not None:
                self.on_landing(Landing(write.source.name, local, write.target, remote, write.tag, write.posted_s))
            target.item(remote)[:] = write.source.item(local) if write.early is None else write.early[place]
            self.num_landed_items += 1
        write.landed = max(first, count)
        if write.changed and first < count and target.kind(int(write.remote[0])) == "state":
            target.item(int(write.remote[0]))[0] ^= 1


class FakeAgent:
    """See `TransferAgent`. Made by `FakeFabric.agent`. tag: goes with what is posted, for those who watch."""

    transport = "fake"

    def __init__(self, name: str, fabric: FakeFabric) -> None:
        self.name = name
        self.tag: object = None
        self._fabric = fabric
        self._views: list[NDArray[np.uint8]] = []
        self._layout: CacheLayout | None = None
        self._peers: set[str] = set()
        self._xfers: dict[XferHandle, _Write] = {}
        self._handles = itertools.count(1)

    @property
    def metadata(self) -> bytes:
        return self.name.encode()

    def register(self, tensors: Sequence[torch.Tensor], layout: CacheLayout) -> None:
        self._layout = layout
        self._views = [tensor.view(torch.uint8).reshape(tensor.shape[0], -1).numpy() for tensor in tensors]

    def item(self, index: int) -> NDArray[np.uint8]:
        """The bytes of one descriptor of this agent's memory."""
        layout, group = self._group(index)
        item: NDArray[np.uint8] = self._views[group][index - layout.firsts[group]]
        return item

    def kind(self, index: int) -> Kind:
        layout, group = self._group(index)
        return layout.groups[group].kind

    def add_peer(self, metadata: bytes, remote: CacheLayout) -> str:
        peer = metadata.decode()
        if peer not in self._fabric.agents or peer in self._fabric.dead:
            raise PeerRefused(f"no agent {peer}")
        self._peers.add(peer)
        return peer

    def probe(self, peer: str) -> XferHandle:
        return self._start(peer, np.zeros(1, np.int32), np.zeros(1, np.int32), reads=True)

    def remove_peer(self, peer: str) -> None:
        self._peers.discard(peer)
        self._xfers = {handle: write for handle, write in self._xfers.items() if write.target != peer}

    def post_write(self, peer: str, local: Indices, remote: Indices) -> XferHandle:
        return self._start(peer, local, remote, reads=False)

    def poll(self, handle: XferHandle) -> XferState:
        self._fabric.settle()
        return self._xfers[handle].state

    def release(self, handle: XferHandle) -> None:
        # A write in progress stays with the fabric and lands in its time, as with the real library.
        del self._xfers[handle]

    def notify(self, peer: str, message: bytes) -> None:
        if peer not in self._peers or peer in self._fabric.dead:
            raise TransferFailed(f"no connection to {peer}")
        self._fabric.post(self.name, peer, message)

    def take_notifications(self) -> list[tuple[str, bytes]]:
        self._fabric.settle()
        return self._fabric.mail_for(self.name)

    def close(self) -> None:
        self._fabric.kill(self.name)

    def _group(self, index: int) -> tuple[CacheLayout, int]:
        assert self._layout is not None, "register first"
        return self._layout, max(i for i, first in enumerate(self._layout.firsts) if first <= index)

    def _start(self, peer: str, local: Indices, remote: Indices, *, reads: bool) -> XferHandle:
        if peer not in self._peers:
            raise TransferFailed(f"no connection to {peer}")
        write = _Write(self, peer, local.copy(), remote.copy(), due_s=0.0, outcome=XferState.DONE, reads=reads, tag=self.tag)
        handle = next(self._handles)
        self._xfers[handle] = write
        self._fabric.start(write)
        return handle

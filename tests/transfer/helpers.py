"""A small hybrid model's caches, and a prefill and a decode side joined by the fake fabric."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.clock import FakeClock
from tandem.config import TransferConfig
from tandem.errors import HandoffError, HandoffRefused
from tandem.request import Request, SamplingParams, StopRules
from transfer.agent import TransferAgent
from transfer.fake_agent import FakeAgent, FakeFabric, Faults
from transfer.handoff import HandoffResult, LeaseGrant, WriterIdentity
from transfer.layout import CacheLayout, group_tensors
from transfer.lease import LeaseTable
from transfer.lease_memory import AdmissionPolicy
from transfer.lease_state import Lease
from transfer.receiver import ReaderIdentity, Receiver
from transfer.record import HandoffRecord
from transfer.sender import Sender

BLOCK = 4
VOCAB = 100
EPOCH = 7
FINGERPRINT = "model-1"
KV = PagedKvSpec(num_kv_heads=2, head_dim=4, block_size_tokens=BLOCK, dtype="bfloat16")
CONV = ConvTailSpec(query_channels=4, key_channels=4, value_channels=8, width=4, dtype="bfloat16")
RECURRENT = RecurrentSpec(num_heads=2, key_dim=4, value_dim=4)
SPECS = CacheSpecs(layers=((CONV, RECURRENT), (CONV, RECURRENT), (KV,), (CONV, RECURRENT), (KV,)))


def request(num_prompt: int = 10, max_new_tokens: int = 4, request_id: str = "r") -> Request:
    return Request(request_id, tuple(range(num_prompt)), SamplingParams(), StopRules(max_new_tokens))


def memory_of(num_blocks: int = 16, num_slots: int = 4) -> CacheMemory:
    return CacheMemory.allocate(SPECS, PoolSizes(num_blocks, num_slots))


def fill(memory: CacheMemory, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in group_tensors(memory):
        flat = tensor.view(torch.uint8).reshape(-1)
        flat.copy_(torch.randint(0, 256, flat.shape, generator=generator, dtype=torch.uint8))


def sequence_bytes(memory: CacheMemory, block_ids: tuple[int, ...], slot: int) -> list[bytes]:
    """Everything of one sequence, comparable between workers."""
    parts = [kv[block] for kv in memory.kv.values() for block in block_ids]
    parts += [tensor[slot] for group in (memory.conv, memory.recurrent) for tensor in group.values()]
    return [part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts]


def lease_table(
    clock: FakeClock, num_blocks: int = 16, num_slots: int = 4, ttl_s: float = 60.0, policy: AdmissionPolicy | None = None
) -> LeaseTable:
    return LeaseTable(IndexPool(num_blocks, "blocks"), IndexPool(num_slots, "slots"), SPECS, clock, ttl_s, EPOCH, policy)


def grant_of(lease: Lease, peer_id: str = "d") -> LeaseGrant:
    return LeaseGrant(peer_id, lease.id, lease.epoch, lease.nonce, lease.block_ids, lease.slot, lease.num_held)


@dataclass
class DecodeSide:
    agent: TransferAgent
    clock: FakeClock
    ttl_s: float = 60.0
    verified: list[tuple[Lease, HandoffRecord, float]] = field(default_factory=list)
    refused: list[tuple[Lease | None, HandoffRefused]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = memory_of()
        self.layout = CacheLayout.of(self.memory)
        self.agent.register(group_tensors(self.memory), self.layout)
        self.leases = lease_table(self.clock, ttl_s=self.ttl_s, policy=AdmissionPolicy(keep_prefixes=True))
        self.receiver = Receiver(
            agent=self.agent,
            memory=self.memory,
            layout=self.layout,
            leases=self.leases,
            identity=ReaderIdentity(FINGERPRINT, VOCAB),
            config=TransferConfig(),
            clock=self.clock,
            on_verified=lambda lease, record, exposed_s: self.verified.append((lease, record, exposed_s)),
            on_refused=lambda lease, refusal: self.refused.append((lease, refusal)),
        )

    @property
    def refused_fields(self) -> list[str]:
        return [refusal.field for _, refusal in self.refused]


@dataclass
class Pair:
    """One prefill worker `p` and one decode worker `d` over a fake fabric."""

    faults: Faults = field(default_factory=Faults)
    seed: int = 0
    config: TransferConfig = field(default_factory=TransferConfig)
    results: list[HandoffResult | HandoffError] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = FakeClock(1000.0)
        self.fabric = FakeFabric(self.clock, self.seed)
        self.decode = DecodeSide(self.fabric.agent("d"), self.clock)
        self.memory = memory_of()
        fill(self.memory, seed=1)
        self.layout = CacheLayout.of(self.memory)
        self.agent: FakeAgent = self.fabric.agent("p")
        self.agent.register(group_tensors(self.memory), self.layout)
        identity = WriterIdentity("p", FINGERPRINT)
        self.sender = Sender(self.agent, self.memory, self.layout, identity, self.config, self.clock)
        connected = self.sender.connect_soon("d", self.decode.agent.metadata, self.decode.layout)
        self.run(0.1)
        connected.result(0)
        self.fabric.faults = self.faults

    def run(self, seconds: float, tick_s: float = 0.01) -> None:
        """Both threads' work, by turns, while time passes."""
        for _ in range(max(1, round(seconds / tick_s))):
            self.sender.step()
            self.decode.receiver.step()
            self.clock.advance(tick_s)
        self.sender.step()
        self.decode.receiver.step()

    def reserve(self, num_prompt: int = 10, request_id: str = "r", attempt: int = 1, *, may_share: bool = False) -> Lease:
        asked = request(num_prompt, request_id=request_id)
        return self.decode.leases.reserve(asked, attempt, "router", "p", may_share=may_share)

    def handoff(self, lease: Lease, blocks: tuple[int, ...] = (3, 9, 5), slot: int = 2) -> None:
        """A whole hand-off in two chunks, states at the end."""
        handoff = self.sender.begin(grant_of(lease), lease.request.request_id, lease.attempt, blocks, slot)
        full = len(lease.request.tokens) // BLOCK
        handoff.push_kv(0, full // 2)
        self.sender.step()
        for layer in SPECS_STATE_LAYERS:
            handoff.push_state(layer)
        handoff.push_kv(full // 2, full)
        handoff.finish(len(lease.request.tokens), 42, self.clock.now(), self.results.append)


SPECS_STATE_LAYERS = (0, 1, 3)

"""Whatever is changed in the hand-off on its way is refused, the request is placed again, and the answer is right.

Real NIXL, real gRPC, real workers: only the writer's agent is dressed up to spoil what the first attempt sends.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, fields, replace

import pytest
import pytest_asyncio
import torch

from tandem.cache.memory import CacheMemory
from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig, TransferConfig
from tandem.model.load import load_model
from tandem.request import Request, SamplingParams, StopRules
from tests.local_cluster import RANDOM, LocalCluster, local_cluster
from transfer.nixl_agent import NixlAgent
from transfer.record import HandoffRecord, decode_message

pytestmark = pytest.mark.slow

Spoil = Callable[[bytes], list[bytes]]
"""From the record as it was meant to what is sent in its place."""

REQUEST = Request("r", tuple(range(7, 107)), SamplingParams(), StopRules(8))

RESEALED: dict[str, Callable[[HandoffRecord], HandoffRecord]] = {
    "lease_id": lambda r: replace(r, lease_id="0" * len(r.lease_id)),
    "epoch": lambda r: replace(r, epoch=r.epoch ^ 1),
    "nonce": lambda r: replace(r, nonce=bytes(len(r.nonce))),
    "request_id": lambda r: replace(r, request_id=r.request_id + "x"),
    "attempt": lambda r: replace(r, attempt=r.attempt + 1),
    "writer_id": lambda r: replace(r, writer_id="prefill-9"),
    "fingerprint": lambda r: replace(r, fingerprint="f" * len(r.fingerprint)),
    "layout_digest": lambda r: replace(r, layout_digest="f" * len(r.layout_digest)),
    "num_positions": lambda r: replace(r, num_positions=r.num_positions - 1),
    "kv_bytes": lambda r: replace(r, kv_bytes=r.kv_bytes - 1),
    "state_bytes": lambda r: replace(r, state_bytes=r.state_bytes + 1),
    "state_checksum": lambda r: replace(r, state_checksum=r.state_checksum ^ 1),
    "first_token": lambda r: replace(r, first_token=1 << 31),
    "compute_done_s": lambda r: replace(r, compute_done_s=float("nan")),
    "clock_id": lambda r: replace(r, clock_id=""),
}
"""One change per field, sealed with a right checksum over the record: so the field's own check must find it."""


@dataclass
class Tampering:
    """Applied to records while `left` > 0."""

    spoil: Spoil = lambda message: [message]
    left: int = 0

    def arm(self, spoil: Spoil, times: int = 1) -> None:
        self.spoil, self.left = spoil, times

    def apply(self, message: bytes) -> list[bytes]:
        if self.left == 0 or not isinstance(decode_message(message), HandoffRecord):
            return [message]
        self.left -= 1
        return self.spoil(message)


class TamperingAgent(NixlAgent):
    tampering = Tampering()

    def __init__(self, name: str, config: TransferConfig) -> None:
        super().__init__(name, config)

    def notify(self, peer: str, message: bytes) -> None:
        for spoilt in self.tampering.apply(message):
            super().notify(peer, spoilt)


@pytest.fixture(scope="module")
def expected() -> list[int]:
    engine = ColocatedEngine(load_model(RANDOM), CacheConfig(block_size_tokens=16), chunk_tokens=64, max_batch=1)
    return engine.generate([REQUEST])[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster(num_decode=2, make_prefill_agent=TamperingAgent) as running:
        yield running


async def refused_then_right(cluster: LocalCluster, expected: list[int], attempts: int = 2) -> None:
    answer = await cluster.generate(REQUEST)
    assert answer.tokens == expected
    assert answer.finished.attempts == attempts
    assert TamperingAgent.tampering.left == 0
    await cluster.until_whole()


def test_every_field_of_the_record_has_its_change() -> None:
    assert set(RESEALED) == {f.name for f in fields(HandoffRecord)}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", RESEALED)
async def test_a_changed_field_is_refused_retried_and_answered_right(
    cluster: LocalCluster, expected: list[int], name: str
) -> None:
    TamperingAgent.tampering.arm(lambda message: [RESEALED[name](HandoffRecord.decode(message)).encode()])
    await refused_then_right(cluster, expected)
    refusals = [host.worker.refusals() for host in cluster.decode]
    assert sum(r.get(name, 0) for r in refusals) >= 1, refusals


@pytest.mark.asyncio(loop_scope="module")
async def test_a_plausible_wrong_first_token_does_not_pass_the_records_own_checksum(
    cluster: LocalCluster, expected: list[int]
) -> None:
    def spoil(message: bytes) -> list[bytes]:
        record = HandoffRecord.decode(message)
        changed = replace(record, first_token=record.first_token ^ 1).encode()
        return [changed[:-8] + message[-8:]]

    TamperingAgent.tampering.arm(spoil)
    await refused_then_right(cluster, expected)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda message: [], id="lost"),
        pytest.param(lambda message: [message[:-1]], id="cut short"),
        pytest.param(lambda message: [message + b"\x00"], id="too long"),
        pytest.param(lambda message: [message[:40] + bytes([message[40] ^ 0x10]) + message[41:]], id="one bit flipped"),
        pytest.param(lambda message: [b""], id="empty"),
    ],
)
async def test_a_spoilt_or_lost_record_is_retried_and_answered_right(
    cluster: LocalCluster, expected: list[int], spoil: Spoil
) -> None:
    TamperingAgent.tampering.arm(spoil)
    await refused_then_right(cluster, expected)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_state_that_changed_on_the_way_is_refused(cluster: LocalCluster, expected: list[int]) -> None:
    memories: list[CacheMemory] = [host.worker.engine.memory for host in cluster.decode]

    def spoil(message: bytes) -> list[bytes]:
        for memory in memories:
            for state in memory.recurrent.values():
                state.view(torch.int32).bitwise_xor_(1)
        return [message]

    TamperingAgent.tampering.arm(spoil)
    await refused_then_right(cluster, expected)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_record_sent_twice_changes_nothing(cluster: LocalCluster, expected: list[int]) -> None:
    TamperingAgent.tampering.arm(lambda message: [message, message])
    await refused_then_right(cluster, expected, attempts=1)
    await refused_then_right(cluster, expected, attempts=1)

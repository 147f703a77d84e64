"""What the workers report becomes a wish, with its reason; a worker that does not answer stops every decision."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from controller import autoscaler as autoscaler_module
from controller.autoscaler import Autoscaler
from controller.controller import Controller
from controller.events import EventKind
from controller.fake_launcher import FakeLauncher
from controller.life import Timing
from tandem.config import AutoscaleConfig
from tandem.v1 import worker_pb2

TIMING = Timing(look_s=30, progress_s=0, ping_s=30, stop_s=1, shutdown_s=0.01, kill_s=0.01, answer_s=1, connect_s=1)
FULL = worker_pb2.WorkerLoad(
    running=4, kv_blocks_used=97, kv_blocks_total=100, state_slots_used=3, state_slots_total=8, step_seconds=0.01
)


class Bed:
    def __init__(self) -> None:
        self.launcher = FakeLauncher({"prefill": 4, "decode": 4})
        self.controller = Controller(self.launcher, {"prefill": 1, "decode": 1}, "{}", timing=TIMING)
        self.autoscaler = Autoscaler(self.controller, AutoscaleConfig(enabled=True))
        self.running = asyncio.create_task(self.controller.run())

    def scaled(self) -> list[str]:
        return [event.text for event in self.controller.overview().events if event.kind is EventKind.SCALED]


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    bed = Bed()
    await bed.controller.wait_ready(1, 1)
    for worker in bed.launcher.of("decode"):
        worker.reported = FULL
    yield bed
    await bed.controller.shutdown()
    await bed.running


async def test_full_decode_workers_get_company_and_the_event_says_why(bed: Bed) -> None:
    for _ in range(3):
        await bed.autoscaler.look()
    reason = "97% of KV or state slots are in use, the target is 80%"
    assert bed.scaled() == [f"decode scaled from 1 to 2: autoscaler, {reason}"]
    await bed.controller.wait_ready(1, 2)
    assert bed.autoscaler.last_reason["decode"] == f"decode goes from 1 to 2: {reason}"


async def test_a_worker_that_does_not_answer_stops_every_decision(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_module, "_ANSWER_S", 0.001)
    bed.launcher.of("decode")[0].frozen = True
    for _ in range(5):
        await bed.autoscaler.look()
    assert bed.scaled() == []
    assert bed.autoscaler.last_reason["decode"] == "decode stays as it is: 1 of 1 workers gave no numbers"


async def test_a_worker_without_memory_is_no_idle_one(bed: Bed) -> None:
    bed.launcher.of("decode")[0].reported = worker_pb2.WorkerLoad()
    await bed.autoscaler.look()
    assert "gave what is no number" in bed.autoscaler.last_reason["decode"]


async def test_how_busy_a_prefill_worker_is_comes_from_two_looks(bed: Bed) -> None:
    (prefill,) = bed.launcher.of("prefill")
    await bed.autoscaler.look()
    assert "gave no numbers" in bed.autoscaler.last_reason["prefill"]
    prefill.reported = worker_pb2.WorkerLoad(busy_seconds=1e6, oldest_wait_seconds=9.0, queue_tokens=10)
    for _ in range(3):
        await bed.autoscaler.look()
        prefill.reported.busy_seconds += 1e6
    assert any(text.startswith("prefill scaled from 1 to 2: autoscaler, ") for text in bed.scaled())

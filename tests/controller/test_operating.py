"""What operators ask of the controller, and what its next life takes up: scaling, draining, replacing, restarting."""

import asyncio
from collections.abc import Callable, Collection

import pytest

from controller.controller import Controller, UnknownWorker
from controller.events import EventKind
from controller.fake_launcher import FakeLauncher, FakeWorker
from controller.life import Timing
from controller.saved import MemoryStore
from tandem.clock import FakeClock
from tandem.errors import InvalidRequest
from tandem.v1 import worker_pb2

TIMING = Timing(look_s=30, progress_s=0, ping_s=30, stop_s=5, shutdown_s=0.01, kill_s=0.01, answer_s=0.05, connect_s=1)


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110 - nothing to wait on but other tasks' turns
            await asyncio.sleep(0)


class Cluster:
    """A controller with workers that are no processes. `crash` ends it without a word; `come_back` is its next life."""

    def __init__(self, prefill: int, decode: int, units: int = 4) -> None:
        self.launcher = FakeLauncher({"prefill": units, "decode": units})
        self.store = MemoryStore()
        self.clock = FakeClock()
        self.controller = self._new({"prefill": prefill, "decode": decode})

    def _new(self, wishes: dict[str, int | None]) -> Controller:
        controller = Controller(self.launcher, wishes, "{}", timing=TIMING, clock=self.clock, store=self.store)
        self.loop = asyncio.create_task(controller.run())
        return controller

    async def crash(self) -> None:
        tasks = [self.loop, *(w.task for w in self.controller.roster.workers.values() if w.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def come_back(self) -> None:
        self.controller = self._new({"prefill": 9, "decode": 9})
        await self.controller.snapshot_after(0)

    def running(self, role: str) -> list[FakeWorker]:
        alive = self.states()
        return [worker for worker in self.launcher.of(role) if worker.worker_id in alive]

    def states(self) -> dict[str, str]:
        return {worker.worker_id: worker.state for worker in self.controller.overview().workers}

    def told(self, kind: EventKind) -> list[str]:
        return [event.text for event in self.controller.overview().events if event.kind is kind]

    async def members(self) -> dict[str, str]:
        snapshot: worker_pb2.MembershipSnapshot = await self.controller.snapshot_after(0)
        return {member.worker.worker_id: member.state for member in snapshot.members}

    async def end(self) -> None:
        for worker in self.launcher.workers:
            worker.drained.set()
        await self.controller.shutdown()
        await self.loop


# ---- scaling ----


async def test_each_pool_scales_alone() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    (prefill,) = cluster.launcher.of("prefill")
    pools = await cluster.controller.scale({"decode": 3})
    assert pools["decode"].wanted == 3
    await cluster.controller.wait_ready(1, 3)
    await cluster.controller.scale({"decode": 1})
    await until(lambda: len(cluster.running("decode")) == 1)
    assert cluster.launcher.of("prefill") == [prefill]
    assert "stop" not in prefill.calls
    assert cluster.running("decode") == cluster.launcher.of("decode")[:1]
    assert cluster.told(EventKind.SCALED) == ["decode scaled from 1 to 3", "decode scaled from 3 to 1"]
    await cluster.end()


async def test_what_nodes_do_not_offer_is_the_reason_why_a_pool_is_not_as_wished() -> None:
    cluster = Cluster(1, 1, units=2)
    await cluster.controller.wait_ready(1, 1)
    pools = await cluster.controller.scale({"decode": 5})
    assert pools["decode"].reason == "5 wanted, nodes offer 2 units"
    await cluster.controller.wait_ready(1, 2)
    assert cluster.controller.overview().pools["decode"].reason == "5 wanted, nodes offer 2 units"
    await cluster.end()


async def test_a_pool_goes_to_0_and_comes_back() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    await cluster.controller.scale({"prefill": 0, "decode": 0})
    await until(lambda: not cluster.states())
    assert await cluster.members() == {}
    await until(lambda: not cluster.controller.overview().pools["prefill"].reason)
    await cluster.controller.scale({"prefill": 1, "decode": 1})
    await cluster.controller.wait_ready(1, 1)
    assert len({worker.worker_id for worker in cluster.launcher.workers}) == 4
    await cluster.end()


@pytest.mark.parametrize("wishes", [{"decode": -1}, {"decode": 10_000_000}, {"router": 1}])
async def test_a_wish_that_makes_no_sense_is_refused_and_changes_nothing(wishes: dict[str, int]) -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    with pytest.raises(InvalidRequest):
        await cluster.controller.scale({"prefill": 3, **wishes})
    assert cluster.controller.roster.pools["prefill"].wanted == 1
    await cluster.end()


async def test_a_new_wish_lets_a_pool_that_gave_up_try_again() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    cluster.launcher.auto_start = False
    await cluster.controller.scale({"decode": 2})
    await until(lambda: len(cluster.launcher.of("decode")) == 2)
    from tandem.errors import CapacityError

    cluster.launcher.of("decode")[1].fail_start(CapacityError("too small"))
    await until(lambda: cluster.controller.overview().failure())
    cluster.launcher.auto_start = True
    await cluster.controller.scale({"decode": 2})
    await cluster.controller.wait_ready(1, 2)
    await cluster.end()


# ---- draining ----


async def test_a_drained_worker_gets_no_new_work_keeps_its_streams_and_is_replaced() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    (old,) = cluster.launcher.of("decode")
    old.drained.clear()
    await cluster.controller.drain(old.worker_id, 12)
    assert (await cluster.members())[old.worker_id] == "draining"
    await cluster.controller.wait_ready(1, 1)  # another: a unit was free
    await until(lambda: "stop 12" in old.calls)
    assert "kill" not in old.calls
    old.drained.set()
    await until(lambda: old.worker_id not in cluster.states())
    new = cluster.launcher.of("decode")[1]
    assert cluster.told(EventKind.REPLACED) == [f"{new.worker_id} starts in the place of {old.worker_id}"]
    assert cluster.told(EventKind.DRAINED)[0].startswith(f"{old.worker_id} has ended in order after")
    await cluster.end()


async def test_peers_hear_that_a_drained_worker_is_gone_when_it_is() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    (prefill,), (decode,) = cluster.launcher.of("prefill"), cluster.launcher.of("decode")
    prefill.drained.clear()
    await cluster.controller.drain(prefill.worker_id)
    for _ in range(20):
        await asyncio.sleep(0)
    assert f"disconnect {prefill.worker_id}" not in decode.calls
    prefill.drained.set()
    await until(lambda: f"disconnect {prefill.worker_id}" in decode.calls)
    await cluster.end()


async def test_a_drain_that_does_not_end_is_ended() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    (old,) = cluster.launcher.of("decode")
    old.frozen = True
    cluster.controller._lives._timing = Timing(**{**_fields(TIMING), "margin_s": 0.01})
    await cluster.controller.drain(old.worker_id, 0)
    await until(lambda: old.worker_id not in cluster.states())
    assert "kill" in old.calls
    assert "did not end in order" in cluster.told(EventKind.LOST)[0]
    await cluster.end()


def _fields(timing: Timing) -> dict[str, float]:
    return {name: getattr(timing, name) for name in Timing.__slots__}


async def test_a_worker_that_does_not_run_or_drains_already_cannot_be_drained() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    with pytest.raises(UnknownWorker, match="decode-nope-1"):
        await cluster.controller.drain("decode-nope-1")
    (old,) = cluster.launcher.of("decode")
    old.drained.clear()
    await cluster.controller.drain(old.worker_id)
    with pytest.raises(UnknownWorker, match="draining already"):
        await cluster.controller.drain(old.worker_id)
    for wrong in (-1.0, float("nan"), 1e9):
        with pytest.raises(InvalidRequest, match="timeout_s"):
            await cluster.controller.drain(old.worker_id, wrong)
    await cluster.end()


# ---- replacing a pool ----


async def test_a_pool_is_replaced_one_by_one_and_never_smaller_where_a_unit_is_free() -> None:
    cluster = Cluster(1, 2, units=3)
    await cluster.controller.wait_ready(1, 2)
    (prefill,) = cluster.launcher.of("prefill")
    fewest: list[int] = []
    for worker in cluster.launcher.of("decode"):
        stop = worker.stop

        async def note(drain_s: float | None = None, stop: Callable[..., object] = stop) -> None:
            fewest.append(cluster.controller.overview().pools["decode"].ready)
            await stop(drain_s)  # type: ignore[misc]

        worker.stop = note  # type: ignore[method-assign]
    old = await cluster.controller.replace("decode")
    assert len(old) == 2
    await until(lambda: not set(old) & set(cluster.states()) and len(cluster.states()) == 3)
    await cluster.controller.wait_ready(1, 2)
    assert fewest == [2, 2]
    assert cluster.launcher.of("prefill") == [prefill]
    assert len(cluster.told(EventKind.REPLACED)) == 2
    await cluster.end()


async def test_without_a_free_unit_the_old_one_makes_room() -> None:
    cluster = Cluster(1, 2, units=2)
    await cluster.controller.wait_ready(1, 2)
    old = await cluster.controller.replace("decode")
    await until(lambda: not set(old) & set(cluster.states()) and len(cluster.running("decode")) == 2)
    assert len(cluster.launcher.of("decode")) == 4
    await cluster.end()


async def test_a_pool_whose_newcomers_fail_keeps_its_old_workers() -> None:
    cluster = Cluster(1, 2, units=3)
    await cluster.controller.wait_ready(1, 2)
    cluster.launcher.auto_start = False
    old = await cluster.controller.replace("decode")
    await until(lambda: len(cluster.launcher.of("decode")) == 3)
    from tandem.errors import CheckpointError

    cluster.launcher.of("decode")[2].fail_start(CheckpointError("the new image cannot read the model"))
    await until(lambda: cluster.controller.overview().failure())
    await cluster.controller.step()
    assert {worker_id: cluster.states()[worker_id] for worker_id in old} == dict.fromkeys(old, "ready")
    assert "2 to be replaced" in cluster.controller.overview().pools["decode"].reason
    await cluster.end()


# ---- the controller's next life ----


async def test_a_controller_that_comes_back_finds_wishes_workers_and_events() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    await cluster.controller.scale({"decode": 2})
    await cluster.controller.wait_ready(1, 2)
    members = await cluster.members()
    await cluster.crash()
    await cluster.come_back()
    assert await cluster.members() == members  # the very first that routers hear
    assert len(cluster.launcher.workers) == 3
    assert cluster.controller.roster.pools["decode"].wanted == 2
    assert cluster.told(EventKind.SCALED) == ["decode scaled from 1 to 2"]
    assert cluster.told(EventKind.RESUMED) == ["the controller is back and takes up 3 workers"]
    numbers = [event.number for event in cluster.controller.overview().events]
    assert numbers == list(range(1, len(numbers) + 1))
    assert all("kill" not in worker.calls for worker in cluster.launcher.workers)
    await cluster.end()


async def test_ids_are_not_used_again_by_the_next_life() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    for _ in range(3):
        await cluster.crash()
        await cluster.come_back()
        await cluster.controller.wait_ready(1, 1)
        (old,) = cluster.running("decode")
        old.die()
        await until(lambda old=old: old.worker_id not in cluster.states())
        await cluster.controller.wait_ready(1, 1)
    ids = [worker.worker_id for worker in cluster.launcher.workers]
    assert len(ids) == 5 == len(set(ids))
    await cluster.end()


async def test_a_worker_that_died_while_the_controller_was_away_is_buried_and_replaced() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    await cluster.crash()
    (prefill,), (decode,) = cluster.launcher.of("prefill"), cluster.launcher.of("decode")
    prefill.die()
    await cluster.come_back()
    await until(lambda: f"disconnect {prefill.worker_id}" in decode.calls)
    assert "kill" in prefill.calls  # made certain before its peers may reuse memory
    await cluster.controller.wait_ready(1, 1)
    assert cluster.running("decode") == [decode]
    await cluster.end()


async def test_a_worker_that_was_just_being_launched_is_known_to_the_next_life() -> None:
    cluster = Cluster(1, 0)
    await cluster.controller.wait_ready(1, 0)
    launch = cluster.launcher.launch

    async def launch_and_hang(role: str, worker_id: str, config_json: str, avoid: Collection[str] = ()) -> FakeWorker:
        await launch(role, worker_id, config_json)
        return await asyncio.Event().wait()  # type: ignore[return-value]

    cluster.launcher.launch = launch_and_hang  # type: ignore[method-assign]
    await cluster.controller.scale({"decode": 1})
    await until(lambda: cluster.launcher.of("decode"))
    await cluster.crash()
    await cluster.come_back()
    await cluster.controller.wait_ready(1, 1)
    assert len(cluster.launcher.of("decode")) == 1
    await cluster.end()


async def test_a_worker_that_was_starting_is_taken_up_and_not_started_twice() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    cluster.launcher.auto_start = False
    await cluster.controller.scale({"decode": 2})
    await until(lambda: len(cluster.launcher.of("decode")) == 2)
    await cluster.crash()
    await cluster.come_back()
    cluster.launcher.of("decode")[1].let_start()
    await cluster.controller.wait_ready(1, 2)
    assert len(cluster.launcher.of("decode")) == 2
    await cluster.end()


async def test_a_drain_goes_on_under_the_next_life() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    (old,) = cluster.launcher.of("decode")
    old.drained.clear()
    await cluster.controller.drain(old.worker_id, 7)
    await cluster.controller.wait_ready(1, 1)
    await cluster.crash()
    await cluster.come_back()
    assert cluster.states()[old.worker_id] == "draining"
    await until(lambda: old.calls.count("stop 7") == 2)
    old.drained.set()
    await until(lambda: old.worker_id not in cluster.states())
    assert "an operator drains it" in cluster.told(EventKind.DRAINED)[0]
    await cluster.end()


async def test_a_pool_goes_on_being_replaced_under_the_next_life() -> None:
    cluster = Cluster(1, 2, units=3)
    await cluster.controller.wait_ready(1, 2)
    cluster.launcher.auto_start = False
    old = await cluster.controller.replace("decode")
    await until(lambda: len(cluster.launcher.of("decode")) == 3)
    await cluster.crash()
    cluster.launcher.auto_start = True
    await cluster.come_back()
    cluster.launcher.of("decode")[2].let_start()
    await until(lambda: not set(old) & set(cluster.states()) and len(cluster.running("decode")) == 2)
    await cluster.end()

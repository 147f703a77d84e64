"""The controller with workers that are no processes: pairing, publication, death, replacement, order at the end."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from controller.controller import Controller
from controller.events import EventKind
from controller.fake_launcher import FakeLauncher, FakeWorker
from controller.launcher import WorkerDied
from controller.life import Timing
from tandem.clock import FakeClock
from tandem.errors import CapacityError, TandemError
from tandem.v1 import worker_pb2
from tests.standstill import stand_still

QUICK = Timing(look_s=30, progress_s=0, ping_s=30, stop_s=0.01, shutdown_s=0.01, kill_s=0.01, answer_s=0.01, connect_s=1)


async def until(condition: Callable[[], object]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(2):
        while not condition():  # noqa: ASYNC110 - nothing to wait on but other tasks' turns
            await asyncio.sleep(0)


class Cluster:
    def __init__(self, prefill: int | None, decode: int | None, timing: Timing = QUICK, **options: bool) -> None:
        self.launcher = FakeLauncher({"prefill": prefill or 2, "decode": decode or 2}, **options)
        self.clock = FakeClock()
        self.controller = Controller(
            self.launcher, {"prefill": prefill, "decode": decode}, "{}", timing=timing, clock=self.clock
        )
        self.loop = asyncio.create_task(self.controller.run())

    async def snapshot(self) -> worker_pb2.MembershipSnapshot:
        return await self.controller.snapshot_after(0)

    async def members(self) -> set[str]:
        return {member.worker.worker_id for member in (await self.snapshot()).members}

    async def gone(self, worker: FakeWorker) -> None:
        await until(lambda: worker.worker_id not in {w.worker_id for w in self.controller.overview().workers})

    def ids(self) -> set[str]:
        return {worker.worker_id for worker in self.launcher.workers}


@pytest.fixture
async def two_and_two() -> AsyncIterator[Cluster]:
    cluster = Cluster(2, 2)
    await cluster.controller.wait_ready(2, 2)
    yield cluster
    await cluster.controller.shutdown()
    await cluster.loop


async def test_every_pair_is_connected_before_it_is_published(two_and_two: Cluster) -> None:
    decode = sorted(worker.worker_id for worker in two_and_two.launcher.of("decode"))
    assert [worker.peers for worker in two_and_two.launcher.of("prefill")] == [decode, decode]
    assert await two_and_two.members() == two_and_two.ids()


async def test_no_worker_is_published_while_its_pairing_lasts() -> None:
    cluster = Cluster(1, 1, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    prefill, decode = cluster.launcher.workers
    decode.let_start()
    await until(lambda: cluster.controller.overview().pools["decode"].ready)
    gate = asyncio.Event()
    connect = prefill.connect

    async def slow(peers: list[bytes]) -> list[tuple[str, str]]:
        await gate.wait()
        return await connect(peers)

    prefill.connect = slow  # type: ignore[method-assign]
    prefill.let_start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert await cluster.members() == {decode.worker_id}
    gate.set()
    await cluster.controller.wait_ready(1, 1)
    assert prefill.peers == [decode.worker_id]
    await cluster.controller.shutdown()


async def test_a_dead_worker_leaves_membership_at_once_its_peers_are_told_and_it_is_replaced(two_and_two: Cluster) -> None:
    dead = two_and_two.launcher.of("decode")[0]
    dead.die()
    await two_and_two.gone(dead)
    assert dead.worker_id not in await two_and_two.members()
    await two_and_two.controller.wait_ready(2, 2)
    newest = two_and_two.launcher.of("decode")[-1]
    for prefill in two_and_two.launcher.of("prefill"):
        await until(lambda prefill=prefill: f"disconnect {dead.worker_id}" in prefill.calls)
        assert newest.worker_id in prefill.peers
    assert len(two_and_two.ids()) == 5  # no id was used twice


async def test_what_went_wrong_is_kept_for_people_in_order(two_and_two: Cluster) -> None:
    first, second = two_and_two.launcher.of("decode")
    first.die("out of memory")
    await two_and_two.gone(first)
    second.end_by_itself("its step loop failed")
    await two_and_two.gone(second)
    lost = [event for event in two_and_two.controller.overview().events if event.kind is EventKind.LOST]
    assert [(event.subject, event.text) for event in lost] == [
        (first.worker_id, f"{first.worker_id} is lost: out of memory"),
        (second.worker_id, f"{second.worker_id} is lost: its step loop failed"),
    ]


async def test_peers_are_told_of_a_death_only_when_the_process_is_gone_for_certain(two_and_two: Cluster) -> None:
    prefill, decode = two_and_two.launcher.of("prefill")[0], two_and_two.launcher.of("decode")[0]
    seen: list[bool] = []
    disconnect = decode.disconnect

    async def watch(worker_id: str) -> None:
        seen.append("kill" in prefill.calls)
        await disconnect(worker_id)

    decode.disconnect = watch  # type: ignore[method-assign]
    prefill.end_by_itself("its step loop failed")
    await until(lambda: seen)
    assert seen == [True]


async def test_a_frozen_worker_is_killed_and_replaced() -> None:
    cluster = Cluster(
        1, 1, Timing(look_s=30, progress_s=0, ping_s=0.001, answer_s=0.01, stop_s=0.01, shutdown_s=0.01, kill_s=0.01)
    )
    await cluster.controller.wait_ready(1, 1)
    frozen = cluster.launcher.of("decode")[0]
    frozen.frozen = True
    await cluster.gone(frozen)
    assert "kill" in frozen.calls
    await cluster.controller.wait_ready(1, 1)
    assert len(cluster.launcher.of("decode")) == 2
    await cluster.controller.shutdown()


async def test_peers_keep_the_memory_of_a_worker_whose_end_is_not_certain(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    lost, decode = cluster.launcher.of("prefill")[0], cluster.launcher.of("decode")[0]
    lost.unkillable = True
    lost.end_by_itself("its step loop failed")
    await until(lambda: lost.calls.count("kill") > 2)
    assert "disconnect" not in " ".join(decode.calls)
    assert "not known to be gone" in caplog.text
    await cluster.controller.wait_ready(1, 1)  # its replacement does not wait for that
    assert lost.worker_id not in await cluster.members()
    lost.unkillable = False
    await until(lambda: f"disconnect {lost.worker_id}" in decode.calls)
    await cluster.controller.shutdown()


async def test_a_frozen_peer_does_not_hold_up_a_newcomer() -> None:
    cluster = Cluster(2, 1)
    await cluster.controller.wait_ready(2, 1)
    cluster.launcher.of("prefill")[0].frozen = True  # and not found out yet
    cluster.launcher.of("decode")[0].end_by_itself("its step loop failed")
    await cluster.gone(cluster.launcher.of("decode")[0])
    await cluster.controller.wait_ready(2, 1)
    newcomer = cluster.launcher.of("decode")[1]
    assert newcomer.worker_id in cluster.launcher.of("prefill")[1].peers
    assert cluster.controller.overview().pools["decode"].failure == ""
    await cluster.controller.shutdown()


async def test_a_newcomer_that_does_not_fit_is_not_published_and_the_reason_is_shown() -> None:
    cluster = Cluster(1, 1, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    prefill, decode = cluster.launcher.workers
    prefill.refuses[decode.worker_id] = "model fingerprints differ"
    prefill.let_start()
    await until(lambda: cluster.controller.overview().pools["prefill"].ready)
    decode.let_start()
    await cluster.gone(decode)
    assert await cluster.members() == {prefill.worker_id}
    assert "model fingerprints differ" in (await cluster.snapshot()).pools["decode"].reason
    await cluster.controller.shutdown()


async def test_a_users_error_ends_the_wait_with_its_sentence_and_is_not_retried() -> None:
    cluster = Cluster(1, 1, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    cluster.launcher.of("decode")[0].fail_start(CapacityError("the budget of 1 MiB cannot hold one sequence"))
    with pytest.raises(TandemError, match="the budget of 1 MiB cannot hold one sequence"):
        await cluster.controller.wait_ready(1, 1)
    cluster.clock.advance(1000)
    await cluster.controller.step()
    assert len(cluster.launcher.of("decode")) == 1
    await cluster.controller.shutdown()


async def test_a_crash_at_start_is_retried_after_its_backoff_with_a_new_id() -> None:
    cluster = Cluster(1, 1, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    first = cluster.launcher.of("prefill")[0]
    first.fail_start(WorkerDied("segmentation fault"))
    await cluster.gone(first)
    await cluster.controller.step()
    assert len(cluster.launcher.of("prefill")) == 1
    assert "segmentation fault" in cluster.controller.overview().pools["prefill"].reason
    cluster.clock.advance(1.0)
    await cluster.controller.step()
    second = cluster.launcher.of("prefill")[1]
    assert second.worker_id != first.worker_id
    second.let_start()
    await until(lambda: cluster.controller.overview().pools["prefill"].ready)
    assert cluster.controller.overview().pools["prefill"].reason == ""
    await cluster.controller.shutdown()


async def test_a_start_that_loads_nothing_is_given_up() -> None:
    timing = Timing(look_s=30, progress_s=0, stall_s=0.02, stop_s=0.01, shutdown_s=0.01, kill_s=0.01)
    cluster = Cluster(1, 1, timing, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    await until(lambda: "loaded nothing" in cluster.controller.overview().pools["prefill"].reason)
    await cluster.controller.shutdown()


async def test_a_start_is_not_given_up_because_the_controller_did_not_run() -> None:
    timing = Timing(look_s=30, progress_s=0.01, stall_s=0.2, stop_s=0.01, shutdown_s=0.01, kill_s=0.01)
    cluster = Cluster(1, 1, timing, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    for _ in range(2):
        await asyncio.sleep(0.02)
        stand_still(0.6)
        for worker in cluster.launcher.workers:
            worker.loaded = (worker.loaded[0] + 1, 9)
    for worker in cluster.launcher.workers:
        worker.let_start()
    await cluster.controller.wait_ready(1, 1)
    assert not cluster.controller.overview().pools["prefill"].reason
    await cluster.controller.shutdown()


async def test_a_node_that_joins_gets_workers_when_all_that_is_offered_is_wanted() -> None:
    cluster = Cluster(None, None)
    await cluster.controller.wait_ready(2, 2)
    cluster.launcher.units["decode"] = 3
    await cluster.controller.step()
    await cluster.controller.wait_ready(2, 3)
    cluster.launcher.units["decode"] = 1
    await cluster.controller.step()
    await until(lambda: len(cluster.controller.overview().workers) == 3)
    survivors = cluster.launcher.of("decode")
    assert ["stop" in worker.calls for worker in survivors] == [False, True, True]
    await cluster.controller.shutdown()


async def test_loading_progress_is_shown() -> None:
    cluster = Cluster(1, 1, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    cluster.launcher.workers[0].loaded = (40, 100)
    await until(lambda: cluster.controller.overview().workers[0].loaded_bytes == 40)
    await cluster.controller.shutdown()


async def test_versions_grow_with_every_change_and_only_then(two_and_two: Cluster) -> None:
    version = (await two_and_two.snapshot()).version
    await two_and_two.controller.step()
    assert (await two_and_two.snapshot()).version == version
    two_and_two.launcher.of("decode")[0].die()
    newer = await two_and_two.controller.snapshot_after(version)
    assert newer.version > version


async def test_shutdown_stops_writers_before_readers_and_leaves_nothing() -> None:
    cluster = Cluster(2, 2)
    await cluster.controller.wait_ready(2, 2)
    order: list[str] = []
    for worker in cluster.launcher.workers:
        kill = worker.kill

        async def note(worker: FakeWorker = worker, kill: Callable[[], object] = kill) -> None:
            order.append(worker.role)
            await kill()  # type: ignore[misc]

        worker.kill = note  # type: ignore[method-assign]
    await cluster.controller.shutdown()
    await cluster.loop
    assert order == ["prefill", "prefill", "decode", "decode"]
    assert cluster.controller.overview().workers == ()
    assert await cluster.members() == set()


async def test_shutdown_is_bounded_when_a_worker_is_frozen() -> None:
    cluster = Cluster(1, 1)
    await cluster.controller.wait_ready(1, 1)
    for worker in cluster.launcher.workers:
        worker.frozen = True
    async with asyncio.timeout(1):
        await cluster.controller.shutdown()


async def test_shutdown_while_workers_start_leaves_nothing() -> None:
    cluster = Cluster(1, 1, auto_start=False)
    await until(lambda: len(cluster.launcher.workers) == 2)
    await cluster.controller.shutdown()
    await cluster.loop
    assert all("kill" in worker.calls for worker in cluster.launcher.workers)


async def test_a_worker_is_not_replaced_because_the_controller_did_not_run() -> None:
    cluster = Cluster(1, 1, Timing(ping_s=0.01, answer_s=0.1, stop_s=0.01, shutdown_s=0.01, kill_s=0.01))
    await cluster.controller.wait_ready(1, 1)
    prefill = next(iter(cluster.launcher.of("prefill")))
    answered = asyncio.Event()

    async def progress() -> tuple[int, int]:
        stand_still(0.3)
        await asyncio.sleep(0.02)
        answered.set()
        return (1, 1)

    prefill.progress = progress  # type: ignore[method-assign]
    async with asyncio.timeout(2):
        await answered.wait()
    await asyncio.sleep(0.02)
    assert EventKind.LOST not in {event.kind for event in cluster.controller.overview().events}
    del prefill.progress
    await cluster.controller.shutdown()
    await cluster.loop

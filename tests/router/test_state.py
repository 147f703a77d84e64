"""Who is told when: a router hears thousands of messages a second, and looks at its queue when that may change something."""

from dataclasses import replace

import pytest

from router.fake_workers import FakeCluster, FakeWorkerHandle
from router.placement import Need, Placement
from router.prefixes import PrefixEntry
from router.worker import WorkerLoad
from tandem.request import ServiceClass
from tests.router.tools import MODEL


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster(MODEL)


@pytest.fixture
def told(cluster: FakeCluster) -> list[str]:
    calls: list[str] = []
    cluster.table.listen(lambda: calls.append("looked"))
    return calls


def report(cluster: FakeCluster, handle: FakeWorkerHandle, **news: int | tuple[PrefixEntry, ...]) -> None:
    handle.load = replace(handle.load or WorkerLoad(), **news)  # type: ignore[arg-type]
    cluster.table.changed(handle.info.id)


def test_a_step_that_frees_and_takes_nothing_wakes_nobody(cluster: FakeCluster, told: list[str]) -> None:
    report(cluster, cluster.decode[0], running=3)
    told.clear()
    report(cluster, cluster.decode[0], running=4)
    report(cluster, cluster.prefill[0], queue_tokens=70)
    assert told == []


@pytest.mark.parametrize("news", [{"kv_blocks_used": 5}, {"state_slots_used": 1}])
def test_other_room_wakes_the_queue(cluster: FakeCluster, told: list[str], news: dict[str, int]) -> None:
    cluster.table.changed()
    told.clear()
    report(cluster, cluster.decode[0], **news)
    assert told == ["looked"]


def test_a_lost_worker_and_one_that_is_back_wake_the_queue_and_one_that_left_nobody(
    cluster: FakeCluster, told: list[str]
) -> None:
    handle = cluster.decode[0]
    cluster.table.changed()
    told.clear()
    handle.load = None
    cluster.table.changed(handle.info.id)
    report(cluster, handle)
    assert told == ["looked", "looked"]
    cluster.table.remove(handle.info.id)
    told.clear()
    cluster.table.changed(handle.info.id)
    assert told == []


def test_what_ends_at_a_worker_that_has_left_brings_nothing_of_it_back(cluster: FakeCluster) -> None:
    table, handle = cluster.table, cluster.prefill[0]
    report(cluster, handle, prefixes=(PrefixEntry(1, 8),))
    table.assign(("r", 1), Placement("p0", "d0"), 20, Need("r", 32))
    assert not table.prefixes.is_empty
    table.remove("p0")
    table.release(("r", 1))
    assert table.prefixes.is_empty
    assert [view.id for view in table.snapshot().prefill] == []


def test_what_batch_holds_is_counted_until_it_is_released(cluster: FakeCluster) -> None:
    table, need = cluster.table, Need("b", 32, service_class=ServiceClass.BATCH)
    table.assign(("b", 1), Placement("p0", "d0"), 20, need)
    table.assign(("i", 1), Placement("p0", "d0"), 30, Need("i", 32))
    view, prefill = table.snapshot().decode[0], table.snapshot().prefill[0]
    assert (view.batch_blocks, view.batch_slots, view.state_slots_used) == (2, 1, 2)
    assert (prefill.batch_tokens, prefill.queue_tokens) == (20, 50)
    assert table.batch_part == 1 / 8
    table.prefill_done(("b", 1))
    assert table.snapshot().prefill[0].batch_tokens == 0
    table.release(("b", 1))
    assert (table.batch_part, table.snapshot().decode[0].batch_slots) == (0, 0)

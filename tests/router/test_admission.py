"""The queue: bounded, ordered, fair to batch, and it begins nothing that cannot be in time."""

import asyncio
from collections.abc import Iterator

import pytest

from router.admission import PlacementQueue, Ticket
from router.fake_workers import FakeCluster
from router.placement import Need, Placement
from tandem.errors import Overloaded
from tandem.request import ServiceClass
from tests.router.tools import MODEL

INTERACTIVE, BATCH = ServiceClass.INTERACTIVE, ServiceClass.BATCH
AGEING_S = 30.0


class Clock:
    """The loop's time, moved by hand."""

    def __init__(self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Line:
    """One decode worker with one slot, taken; requests queue behind it by name."""

    def __init__(self, clock: Clock, max_waiting: int = 100) -> None:
        self.clock = clock
        self.cluster = FakeCluster(MODEL, slots=1)
        self.queue = PlacementQueue(self.cluster.table, max_waiting, wait_s=1e6, batch_ageing_s=AGEING_S)
        self.placed: list[str] = []
        self.waiting: dict[str, asyncio.Task[None]] = {}
        self.late: dict[str, str] = {}
        self.cluster.table.assign(("blocker", 1), Placement("p0", "d0"), 0, Need("blocker", 1))

    def admit(self, service_class: ServiceClass = INTERACTIVE, deadline_s: float | None = None, tokens: int = 10) -> Ticket:
        return self.queue.admit(service_class, tokens, None if deadline_s is None else self.clock.now + deadline_s)

    async def join(self, name: str, service_class: ServiceClass = INTERACTIVE, deadline_s: float | None = None) -> None:
        ticket = self.admit(service_class, deadline_s)
        self.waiting[name] = asyncio.create_task(self._wait(name, ticket))
        await asyncio.sleep(0)

    async def _wait(self, name: str, ticket: Ticket) -> None:
        try:
            await self.queue.place(ticket, (name, 1), Need(name, 10), 10)
        except TimeoutError as late:
            self.late[name] = str(late)
        else:
            self.placed.append(name)

    async def free(self, name: str = "blocker") -> None:
        """The one slot becomes free, and somebody takes it."""
        self.cluster.table.release((name, 1))
        for _ in range(4):
            await asyncio.sleep(0)

    async def drain(self) -> list[str]:
        await self.free()
        while len(self.placed) + len(self.late) < len(self.waiting):
            await self.free(self.placed[-1])
        return self.placed


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    return Line(Clock(asyncio.get_running_loop(), monkeypatch))


async def test_first_come_first_served_within_a_class(line: Line) -> None:
    for name in ("a", "b", "c"):
        await line.join(name)
        line.clock.advance(1)
    assert await line.drain() == ["a", "b", "c"]


async def test_interactive_requests_pass_batch_for_a_bounded_time_only(line: Line) -> None:
    await line.join("batch", BATCH)
    line.clock.advance(AGEING_S - 1)
    await line.join("soon")
    line.clock.advance(2)
    await line.join("later")
    assert await line.drain() == ["soon", "batch", "later"]


async def test_batch_never_starves_under_an_endless_stream_of_interactive_requests(line: Line) -> None:
    await line.join("batch", BATCH)
    await line.free()
    for number in range(100):
        line.clock.advance(1.0)
        await line.join(f"i{number}")
        await line.free(line.placed[-1])
        if "batch" in line.placed:
            break
    assert line.placed.index("batch") <= AGEING_S + 1
    for task in line.waiting.values():
        task.cancel()


async def test_the_queue_is_bounded_and_the_hint_follows_its_pace(line: Line) -> None:
    line.queue._max_waiting = 6
    for name in "abcdef":
        await line.join(name)
    with pytest.raises(Overloaded) as blind:
        line.admit()
    assert blind.value.retry_after_s == pytest.approx(1.0)
    for name in ("blocker", "a", "b", "c"):
        line.clock.advance(0.25)
        await line.free(name)
    for name in "ghij":
        await line.join(name)
    line.clock.advance(1.0)  # the client that was refused is due by now
    with pytest.raises(Overloaded) as refused:
        line.admit()
    assert refused.value.retry_after_s == pytest.approx(0.25)
    await line.drain()


async def test_a_deadline_that_has_passed_begins_nothing(line: Line) -> None:
    await line.free()
    with pytest.raises(TimeoutError, match="the deadline passed"):
        line.admit(deadline_s=0.0)
    assert line.placed == []


async def test_a_deadline_shorter_than_half_the_estimated_wait_is_refused_before_it_waits(line: Line) -> None:
    for number in range(12):
        await line.join(f"r{number}")
    for name in ("blocker", "r0", "r1", "r2", "r3"):
        line.clock.advance(1.0)
        await line.free(name)
    assert line.queue.num_waiting == 7  # at 1 s each
    line.admit(deadline_s=3.6)
    with pytest.raises(TimeoutError, match=r"a first token takes 3\.5 s at least now, the deadline leaves 3\.4 s"):
        line.admit(deadline_s=3.4)
    line.admit(BATCH)  # no deadline: it may wait
    await line.drain()


async def test_a_deadline_that_runs_out_in_the_queue_is_not_placed(line: Line) -> None:
    for _ in range(4):
        line.queue.note_first_token(10, 0.5)
    await line.join("late", deadline_s=2.0)
    await line.join("patient")
    line.clock.advance(1.6)  # it leaves 0.4 s, and nobody got a first token in less than 0.5 s
    await line.free()
    assert line.placed == ["patient"]
    assert line.late == {"late": "a first token takes 0.5 s at least now, the deadline leaves 0.4 s"}
    assert ("late", 1) not in line.cluster.table.entries[0].assigned_tokens


async def test_an_old_slow_time_refuses_nobody(line: Line) -> None:
    for _ in range(8):
        line.queue.note_first_token(10, 50.0)
    with pytest.raises(TimeoutError):
        line.admit(deadline_s=10.0)
    line.clock.advance(31.0)
    line.admit(deadline_s=10.0)


@pytest.fixture(autouse=True)
def _cancel_leftovers(line: Line) -> Iterator[None]:
    yield
    for task in line.waiting.values():
        task.cancel()

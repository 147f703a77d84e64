"""The router's queue: requests that no two workers have room for yet.

In order of arrival within a class. Interactive requests pass batch ones; a batch request that has waited `batch_ageing_s`
longer goes first all the same, while its class holds less than `_BATCH_FLOOR` of the decode pool: so batch never starves, and a
flood of it does not come before anybody. The head blocks the rest, so that small requests do not overtake a large one for ever.
A retried request keeps its place in the order: it comes before what arrived after it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Set
from dataclasses import dataclass, field

from router.estimates import FirstTokens, HandoffPace, QueuePace
from router.events import AttemptKey
from router.placement import Need, NeverFits, NoRoomNow, NoWorker, Placement, place
from router.state import WorkerTable
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.request import ServiceClass

__all__ = ["PlacementQueue", "Ticket"]

# The wait is estimated from a mean; a request is refused for it only when half of it would be too long already.
_SURE_SHARE = 0.5
_BATCH_FLOOR = 0.1


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """A request's place in the order. due_s: when it arrived, or counts as arrived. until: its deadline on the event loop's
    clock; None: it has none."""

    due_s: float
    sequence: int
    until: float | None = field(default=None, compare=False)


@dataclass(slots=True, order=True)
class _Waiter:
    ticket: Ticket
    key: AttemptKey = field(compare=False)
    need: Need = field(compare=False)
    prefill_tokens: int = field(compare=False)
    exclude: Set[str] = field(compare=False)
    placed: asyncio.Future[Placement] = field(compare=False)


class PlacementQueue:
    """max_waiting: requests that may wait. wait_s: the longest that one waits, whatever its deadline. batch_ageing_s: see the
    module. Times are the event loop's."""

    def __init__(self, table: WorkerTable, max_waiting: int, wait_s: float, batch_ageing_s: float = 30.0) -> None:
        self._table = table
        self._max_waiting = max(1, max_waiting)
        self._wait_s = wait_s
        self._ageing_s = {ServiceClass.INTERACTIVE: 0.0, ServiceClass.BATCH: batch_ageing_s}
        self._sequence = itertools.count()
        self._lines: dict[ServiceClass, list[_Waiter]] = {service_class: [] for service_class in ServiceClass}
        self._blocked: NoWorker | NoRoomNow = NoRoomNow("all workers are busy")
        self._pace = QueuePace()
        self._first_tokens = FirstTokens()
        self._handoffs = HandoffPace()
        self.num_waiting = 0
        table.listen(self._pump)

    def admit(self, service_class: ServiceClass, prefill_tokens: int, until: float | None = None) -> Ticket:
        """A place in the order; `place` is to follow at once.

        Raises:
            Overloaded: as many requests wait as may. TimeoutError: its deadline has passed, or cannot be met any more.
        """
        now = _now()
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait already; try again later", self.retry_after_s())
        ticket = Ticket(now + self._ageing_s[service_class], next(self._sequence), until)
        if until is not None:
            ahead = _SURE_SHARE * self._pace.wait_s(self._num_ahead(ticket, service_class), now)
            self._require_in_time(ticket, prefill_tokens, now, ahead)
        return ticket

    async def place(
        self, ticket: Ticket, key: AttemptKey, need: Need, prefill_tokens: int, exclude: Set[str] = frozenset()
    ) -> Placement:
        """Two workers, counted as assigned in the table. The caller releases `key` there in any case, when cancelled too.

        Raises:
            InvalidRequest: no worker can ever hold the request. TimeoutError: its deadline cannot be met any more.
            Unavailable: no worker was ready in time. Overloaded: none had room in time.
        """
        if need.prefix is not None:
            _ = need.prefix.shorts  # a decision, which may be made many times, should not be the one that hashes a long prompt
        waiter = _Waiter(ticket, key, need, prefill_tokens, exclude, asyncio.get_running_loop().create_future())
        self.num_waiting += 1
        heapq.heappush(self._lines[need.service_class], waiter)
        self._pump()
        try:
            async with asyncio.timeout(self._wait_s) as waiting:
                return await waiter.placed
        except TimeoutError:
            if not waiting.expired():
                raise  # of the placement itself
            if isinstance(self._blocked, NoWorker):
                raise Unavailable(f"{self._blocked.reason}; start or repair workers, then try again") from None
            raise Overloaded(f"{self._blocked.reason}; try again later", self.retry_after_s()) from None
        finally:
            self.num_waiting -= 1
            self._forget_cancelled()
            self._pump()

    def retry_after_s(self) -> float:
        """When a client that is refused now should come again; see `QueuePace`."""
        return self._pace.retry_after_s(_now())

    def note_first_token(self, prefill_tokens: int, seconds: float) -> None:
        """A request got its first token so long after its placement."""
        self._first_tokens.note(prefill_tokens, seconds, _now())

    def note_handoff(self, exposed_s: float) -> None:
        """So much of a hand-off was exposed."""
        self._handoffs.note(exposed_s, _now())

    def _pump(self) -> None:
        """Place from the head on until one must wait."""
        while self._look():
            pass

    def _look(self) -> bool:
        """One decision. False: nobody waits, or whoever is next must go on waiting."""
        line = self._next_line()
        if line is None:
            self._pace.empty()
            return False
        if not self._settle(line[0]):
            self._pace.waiting(_now())
            return False
        heapq.heappop(line)
        return True

    def _next_line(self) -> list[_Waiter] | None:
        """Whose head is to be placed next; None: nobody waits."""
        for line in self._lines.values():
            while line and line[0].placed.done():
                heapq.heappop(line)
        interactive, batch = self._lines[ServiceClass.INTERACTIVE], self._lines[ServiceClass.BATCH]
        if not interactive or not batch:
            return interactive or batch or None
        aged = batch[0].ticket < interactive[0].ticket
        return batch if aged and self._table.batch_part < _BATCH_FLOOR else interactive

    def _num_ahead(self, ticket: Ticket, service_class: ServiceClass) -> int:
        """Of the same class; of interactive ones too when it is batch."""
        lines = {id(self._lines[each]): self._lines[each] for each in (ServiceClass.INTERACTIVE, service_class)}
        return sum(waiter.ticket < ticket and not waiter.placed.done() for line in lines.values() for waiter in line)

    def _settle(self, head: _Waiter) -> bool:
        """Place it, or refuse it for good. False: it must wait."""
        now = _now()
        try:
            self._require_in_time(head.ticket, head.prefill_tokens, now)
        except TimeoutError as late:
            head.placed.set_exception(late)
            return True
        decision = place(self._table.snapshot(), head.need, head.exclude, self._handoffs.least_s(now))
        if isinstance(decision, Placement):
            self._table.assign(head.key, decision, head.prefill_tokens, head.need)
            self._pace.left(now)
            head.placed.set_result(decision)
        elif isinstance(decision, NeverFits):
            head.placed.set_exception(InvalidRequest("max_new_tokens", decision.reason))
        else:
            self._blocked = decision
            return False
        return True

    def _require_in_time(self, ticket: Ticket, prefill_tokens: int, now: float, wait_s: float = 0.0) -> None:
        """Raises TimeoutError: nothing of the answer can come before the deadline, so nothing is begun."""
        if ticket.until is None:
            return
        remaining_s = ticket.until - now
        if remaining_s <= 0:
            raise TimeoutError("the deadline passed")
        needed_s = wait_s + self._first_tokens.least_s(prefill_tokens, now)
        if remaining_s < needed_s:
            raise TimeoutError(f"a first token takes {needed_s:.3g} s at least now, the deadline leaves {remaining_s:.3g} s")

    def _forget_cancelled(self) -> None:
        """Those that left the middle of the queue are removed once they outnumber the rest, so that a storm costs little."""
        if sum(map(len, self._lines.values())) > 2 * self.num_waiting + 16:
            for line in self._lines.values():
                line[:] = [waiter for waiter in line if not waiter.placed.done()]
                heapq.heapify(line)


def _now() -> float:
    return asyncio.get_running_loop().time()

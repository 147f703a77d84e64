"""The router's queue: requests that no two workers have room for yet.

Interactive before batch, then first come first served. The head blocks the rest, so that small requests do not overtake a
large one for ever. A retried request keeps its place in the order: it comes before what arrived after it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Set
from dataclasses import dataclass, field

from router.events import AttemptKey
from router.placement import Need, NeverFits, NoRoomNow, NoWorker, Placement, place
from router.state import WorkerTable
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.request import ServiceClass

__all__ = ["PlacementQueue", "Ticket"]

RETRY_AFTER_S = 1.0
_RANK = {ServiceClass.INTERACTIVE: 0, ServiceClass.BATCH: 1}


@dataclass(frozen=True, slots=True, order=True)
class Ticket:
    """A request's place in the order."""

    rank: int
    sequence: int


@dataclass(slots=True, order=True)
class _Waiter:
    ticket: Ticket
    key: AttemptKey = field(compare=False)
    need: Need = field(compare=False)
    prefill_tokens: int = field(compare=False)
    exclude: Set[str] = field(compare=False)
    placed: asyncio.Future[Placement] = field(compare=False)


class PlacementQueue:
    """max_waiting: requests that may wait. wait_s: the longest that one waits, whatever its deadline."""

    def __init__(self, table: WorkerTable, max_waiting: int, wait_s: float) -> None:
        self._table = table
        self._max_waiting = max(1, max_waiting)
        self._wait_s = wait_s
        self._sequence = itertools.count()
        self._waiters: list[_Waiter] = []
        self._blocked: NoWorker | NoRoomNow = NoRoomNow("all workers are busy")
        self.num_waiting = 0
        table.listen(self._pump)

    def admit(self, service_class: ServiceClass) -> Ticket:
        """
        Raises:
            Overloaded: as many requests wait as may.
        """
        if self.num_waiting >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests wait already; try again later", RETRY_AFTER_S)
        return Ticket(_RANK[service_class], next(self._sequence))

    async def place(
        self, ticket: Ticket, key: AttemptKey, need: Need, prefill_tokens: int, exclude: Set[str] = frozenset()
    ) -> Placement:
        """Two workers, counted as assigned in the table. The caller releases `key` there in any case, when cancelled too.

        Raises:
            InvalidRequest: no worker can ever hold the request.
            Unavailable: no worker was ready in time. Overloaded: none had room in time.
        """
        waiter = _Waiter(ticket, key, need, prefill_tokens, exclude, asyncio.get_running_loop().create_future())
        self.num_waiting += 1
        heapq.heappush(self._waiters, waiter)
        self._pump()
        try:
            async with asyncio.timeout(self._wait_s):
                return await waiter.placed
        except TimeoutError:
            if isinstance(self._blocked, NoWorker):
                raise Unavailable(f"{self._blocked.reason}; start or repair workers, then try again") from None
            raise Overloaded(f"{self._blocked.reason}; try again later", RETRY_AFTER_S) from None
        finally:
            self.num_waiting -= 1
            self._forget_cancelled()
            self._pump()

    def _pump(self) -> None:
        """Place from the head on until one must wait."""
        while self._waiters:
            head = self._waiters[0]
            if not head.placed.done():
                decision = place(self._table.snapshot(), head.need, head.exclude)
                if isinstance(decision, Placement):
                    self._table.assign(head.key, decision, head.prefill_tokens, head.need.max_total_tokens)
                    head.placed.set_result(decision)
                elif isinstance(decision, NeverFits):
                    head.placed.set_exception(InvalidRequest("max_new_tokens", decision.reason))
                else:
                    self._blocked = decision
                    return
            heapq.heappop(self._waiters)

    def _forget_cancelled(self) -> None:
        """Those that left the middle of the queue are removed once they outnumber the rest, so that a storm costs little."""
        if len(self._waiters) > 2 * self.num_waiting + 16:
            self._waiters = [waiter for waiter in self._waiters if not waiter.placed.done()]
            heapq.heapify(self._waiters)

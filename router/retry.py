"""Whether a request is placed again after an attempt failed, where not, and when. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.events import Failed
from tandem.errors import (
    Evicted,
    HandoffRefused,
    InvalidRequest,
    LeaseLost,
    Leaving,
    NoRoom,
    Overloaded,
    TransferFailed,
    Unavailable,
)

__all__ = ["Retries", "final_error"]

# Failures that either of two workers may be at fault for, whichever reports them; for lack of room it is the decode worker.
_ABOUT_DECODE = frozenset(kind.__name__ for kind in (Evicted, HandoffRefused, LeaseLost, Leaving, NoRoom, TransferFailed))
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_RETRY_AFTER_S = 1.0
# Ends that nobody is to blame for. A worker that leaves says so once; so many are a rolling restart of a large pool, more are a
# mistake. A request is evicted once: what was resumed reserves its whole answer.
_BLAMELESS = frozenset(kind.__name__ for kind in (Evicted, Leaving))
_MOST_BLAMELESS = 16


@dataclass(slots=True)
class Retries:
    """Of one request. max_attempts: failed attempts that end it. wait_s: pauses for lack of room that end it, added up.
    retry_after_s: what a client that is refused in the end is told.

    tried: workers to avoid while there are others. was_refused: a decode worker would not, or could not, compute the prompt
    itself; it goes to a prefill worker from now on.
    """

    max_attempts: int
    wait_s: float
    retry_after_s: Callable[[], float] = lambda: _RETRY_AFTER_S
    tried: set[str] = field(default_factory=set)
    was_refused: bool = False
    _full: set[str] = field(default_factory=set)
    _failures: int = 0
    _no_rooms: int = 0
    _blameless: int = 0
    _paused_s: float = 0.0

    def after(self, failure: Failed, decode_id: str) -> float:
        """Seconds to pause before the request is placed again.

        A worker's refusal for lack of room only says that our view of its load was old. It counts as no failed attempt,
        but pauses grow, so that it does not become a busy loop. A prefill worker whose queue is full is asked once; when the
        next one asked is that worker again, all are full. A worker that leaves does not count either, nor one that made room.

        Raises:
            RequestError: the failure is final, or there were too many. RuntimeError: it is final and should not exist.
        """
        if failure.kind == Overloaded.__name__:
            if failure.worker_id in self._full:
                raise Overloaded(failure.reason, self.retry_after_s())
            self._full.add(failure.worker_id)
            self.tried.add(failure.worker_id)
            return 0.0
        if not failure.retryable:
            raise final_error(failure)
        if failure.kind in _ABOUT_DECODE:
            self.tried.add(decode_id)
        if failure.kind == NoRoom.__name__:
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._no_rooms, 10))
            self._no_rooms += 1
            self._paused_s += pause_s
            if self._paused_s > self.wait_s:
                raise Overloaded(f"{failure.reason}; try again later", self.retry_after_s())
            return pause_s
        self.tried.add(failure.worker_id)
        if failure.kind in _BLAMELESS and self._blameless < _MOST_BLAMELESS:
            self._blameless += 1
            return 0.0
        self._failures += 1
        if self._failures >= self.max_attempts:
            last = f"{failure.kind} at {failure.worker_id}: {failure.reason}"
            raise Unavailable(f"{self._failures} attempts failed, the last with {last}")
        return 0.0


def final_error(failure: Failed) -> Exception:
    """The client's answer to a failure that no other worker would spare it."""
    if failure.kind == InvalidRequest.__name__:
        name, _, reason = failure.reason.partition(": ")
        return InvalidRequest(name, reason)
    if failure.kind == Unavailable.__name__:
        return Unavailable(failure.reason)
    return RuntimeError(f"{failure.kind} at {failure.worker_id}: {failure.reason}")

"""Every error that tandem raises on purpose.

::

    TandemError
    ├── ConfigError             the operator's input is wrong: print the sentence, exit 2
    │   ├── CheckpointError     a model folder cannot be served: print the sentence, exit 1
    │   └── CapacityError       the memory budget cannot hold one full-length sequence: exit 1
    ├── RequestError            the request ends; never retried by us
    │   ├── InvalidRequest      INVALID_ARGUMENT, names the field: the client must change the request
    │   ├── Unauthenticated     UNAUTHENTICATED: the client must send an API key that is known
    │   ├── Overloaded          RESOURCE_EXHAUSTED: the client may try again after `retry_after_s`
    │   ├── Unavailable         UNAVAILABLE: no worker could serve it within the bounded retries
    │   └── Cancelled           the client went away: free what it held, tell nobody
    ├── HandoffError            the attempt ends; the router places the request again
    │   ├── NoRoom              the decode worker cannot reserve now: wait for room, or take another worker
    │   ├── HandoffRefused      a field of the hand-off record did not match: release the lease, try again
    │   ├── Leaving             the worker is about to end: take another; nobody is to blame
    │   ├── Evicted             the decode worker ran out of memory for the answer: go on from the tokens so far; no failure
    │   ├── TransferFailed      a write did not complete: release the lease, drop the pair, try again
    │   └── LeaseLost           the lease expired, was aborted, or belongs to a former life: forget it
    └── PeerRefused             two workers do not fit together: do not pair them, report the reason

`ValueError` and `assert` remain for mistakes of the calling code.
"""

from __future__ import annotations

__all__ = [
    "Cancelled",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Evicted",
    "HandoffError",
    "HandoffRefused",
    "InvalidRequest",
    "LeaseLost",
    "Leaving",
    "NoRoom",
    "Overloaded",
    "PeerRefused",
    "RequestError",
    "TandemError",
    "TransferFailed",
    "Unauthenticated",
    "Unavailable",
    "first_line",
]


class TandemError(Exception):
    """Root of the tree; its text is one sentence that says what to do."""


class ConfigError(TandemError):
    """What the operator gave cannot be used. Print it; do not retry."""


class CheckpointError(ConfigError):
    """A model folder or hub id cannot be served. Names the file or tensor."""


class CapacityError(ConfigError):
    """The memory budget cannot hold one full-length sequence. Carries the numbers in its text."""


class RequestError(TandemError):
    """The request ends with this answer. The router maps it to a status; it is never retried by us."""


class InvalidRequest(RequestError):
    """The client must change the request; `field` names what is wrong, as in the proto."""

    def __init__(self, field: str, reason: str) -> None:
        self.field, self.reason = _as_text(field), _as_text(reason)
        super().__init__(f"{self.field}: {self.reason}")


def _as_text(quoted: str) -> str:
    """Half of a surrogate pair, which a client may name in JSON, is no text that could be sent back."""
    return quoted.encode(errors="replace").decode()


def first_line(error: BaseException) -> str:
    """What people need of an error whose text goes on, as those of other libraries do; its type where it has no text."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class UnknownModel(InvalidRequest):
    """The client asks for a model that is not served here; it should look at what is."""

    def __init__(self, reason: str) -> None:
        super().__init__("model", reason)


class Unauthenticated(RequestError):
    """No API key was given, or none that is known here."""


class Overloaded(RequestError):
    """The queue is full. The client may try again after `retry_after_s` seconds."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class Unavailable(RequestError):
    """No worker could serve the request within the bounded retries."""


class Cancelled(RequestError):
    """The client went away or asked to stop. Free what the request holds."""


class HandoffError(TandemError):
    """One attempt to serve a request ended. The router may place the request again."""


class NoRoom(HandoffError):
    """The decode worker has too few free blocks or no free slot at this moment."""


class HandoffRefused(HandoffError):
    """A field of the hand-off record is not what the receiver expects. The lease is released."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"hand-off refused: {field}: {reason}")
        self.field = field
        self.reason = reason


class TransferFailed(HandoffError):
    """A write ended in error or not at all. Nothing of it may be believed."""


class Leaving(HandoffError):
    """The worker is about to end in good order and takes no more work. Place the request elsewhere; it counts as no failure."""


class Evicted(HandoffError):
    """A running sequence gave its memory to others. Place the request again with the tokens so far: it then reserves its
    whole answer and is not sent back a second time. It counts as no failure."""


class LeaseLost(HandoffError):
    """The lease is not known any more under this id and epoch. Forget it; do not free anything twice."""


class PeerRefused(TandemError):
    """The two workers differ in model, layout or limits. They must not be paired."""

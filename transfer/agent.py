"""What moves bytes between workers, as seen by sender and receiver: NIXL, or the fake that ships beside it.

One thread at a time may call an agent; the sender's or the receiver's thread owns it once it runs.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import torch

from transfer.layout import CacheLayout
from transfer.plan import Indices

__all__ = ["TransferAgent", "XferHandle", "XferState"]

XferHandle = int


class XferState(enum.Enum):
    IN_PROGRESS = "in progress"
    DONE = "done"
    FAILED = "failed"


class TransferAgent(Protocol):
    """One-sided writes from this worker's registered memory into a peer's, and small notifications.

    Order that callers may rely on: a notification sent after a write was polled DONE arrives after that write's bytes. Two
    notifications may arrive in any order, and one may be lost with its connection.
    """

    @property
    def name(self) -> str:
        """Unique to this life of this worker."""
        ...

    @property
    def metadata(self) -> bytes:
        """What a peer needs to reach the registered memory. Valid after `register`."""
        ...

    @property
    def transport(self) -> str:
        """What really carries the bytes, as far as the library tells."""
        ...

    def register(self, tensors: Sequence[torch.Tensor], layout: CacheLayout) -> None:
        """Once, before anything else: pins the tensors behind `layout.groups`, in that order."""
        ...

    def add_peer(self, metadata: bytes, remote: CacheLayout) -> str:
        """Prepare everything for writing into a peer and begin to connect; returns the peer's agent name. The connection is
        known to stand when a `probe` is done. Raises PeerRefused when the metadata is unusable."""
        ...

    def probe(self, peer: str) -> XferHandle:
        """Read a few bytes of the peer's memory into a scratch buffer: done = the way stands, both ends progress."""
        ...

    def remove_peer(self, peer: str) -> None:
        """Close the connection; nothing that was posted to this peer may be polled after. Unknown peers are ignored."""
        ...

    def post_write(self, peer: str, local: Indices, remote: Indices) -> XferHandle:
        """Start writing local descriptor i into remote descriptor i. Raises TransferFailed."""
        ...

    def poll(self, handle: XferHandle) -> XferState:
        """Make progress and look. DONE: every byte is in the peer's memory, and the local memory may change."""
        ...

    def release(self, handle: XferHandle) -> None:
        """Forget a handle. Of a write in progress this is a wish to cancel: its bytes may still land."""
        ...

    def notify(self, peer: str, message: bytes) -> None:
        """Raises TransferFailed."""
        ...

    def take_notifications(self) -> list[tuple[str, bytes]]:
        """Make progress; (name that the sender gives itself, message) of what has come since the last call."""
        ...

    def close(self) -> None:
        """Give up all connections and registrations; the agent is unusable after."""
        ...

"""The seam between the controller and whatever runs worker processes: Ray (`actor`), or nothing (`fake_launcher`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Node", "ProcessRecord", "WorkerDied", "WorkerHandle", "WorkerLauncher"]

ProcessRecord = tuple[str, int, int]
"""Ray's id of a node, process id and start in ticks since boot: together they never name another process."""


@dataclass(frozen=True, slots=True)
class Node:
    """One that is alive. id: Ray's; a host that comes back has another. address, name: of its host. units: by role, those in
    use too."""

    id: str
    address: str
    name: str
    units: Mapping[str, int]


class WorkerDied(Exception):
    """The worker's process is gone, or failed in a way that is not the operator's doing. Text: one line, the reason.

    Internal to the controller: it replaces the worker and keeps the reason for people to read.
    """


class WorkerHandle(Protocol):
    """One worker process. Every method may raise `WorkerDied`; each may take for ever, so callers bound it."""

    @property
    def process_record(self) -> ProcessRecord | None:
        """None until `start` has returned."""
        ...

    async def start(self) -> bytes:
        """Load weights and open the worker's servers. Returns a serialised WorkerDescription; again the same when called again,
        by another controller too.

        Raises:
            ConfigError: the operator's input is wrong (model folder, memory budget); starting again cannot help.
        """
        ...

    async def progress(self) -> tuple[int, int]:
        """Bytes of weights loaded, and in all. Answers at once while `start` runs and after: also the health ping."""
        ...

    async def load(self) -> bytes:
        """A serialised WorkerLoad."""
        ...

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        """Prefill workers only: be able to write to these decode workers. Returns (worker id, reason) of the refused."""
        ...

    async def disconnect(self, worker_id: str) -> None:
        """This peer is dead: forget it, end what waits for it, trust that it writes no more. Unknown ids are fine."""
        ...

    async def wait_stopped(self) -> str:
        """Returns the reason when the worker ended by itself; raises `WorkerDied` when its process is gone."""
        ...

    async def stop(self, drain_s: float | None = None) -> None:
        """End in good order: no new work; what runs has `drain_s` (None: the worker's own), then goes on elsewhere."""
        ...

    async def kill(self) -> None:
        """End the process now, and return when it is gone for certain: peers' memory is reused after this."""
        ...


class WorkerLauncher(Protocol):
    async def nodes(self) -> Sequence[Node]: ...

    async def launch(self, role: str, worker_id: str, config_json: str, avoid: Collection[str] = ()) -> WorkerHandle:
        """Begin a worker, on none of the nodes with the ids `avoid`; returns at once. Most failures show in the handle's first
        call.

        Raises:
            WorkerDied: it could not even be begun.
        """
        ...

    async def find(self, worker_id: str, process: ProcessRecord | None) -> WorkerHandle:
        """A worker that an earlier controller launched. Of one that is gone every method raises `WorkerDied`, but `kill`, which
        makes sure of it."""
        ...

"""Ray's processes below this one, where it started them itself: which are there, and that none is left."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil

__all__ = ["LocalNode", "run_bounded"]

_RAYLET = "raylet"
_WORKERS = ("ray::PrefillWorkerActor", "ray::DecodeWorkerActor")
_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class LocalNode:
    """raylet: the process that every call to Ray from here depends on; None: this process joined a cluster of others.
    processes: all below it, at the time of looking."""

    raylet: psutil.Process | None
    processes: tuple[psutil.Process, ...]

    @classmethod
    def of_this_process(cls) -> LocalNode:
        children = psutil.Process().children(recursive=True)
        return cls(next((child for child in children if _name(child) == _RAYLET), None), ()).now()

    def now(self) -> LocalNode:
        """The same node with the processes of this moment, and those known before: of a raylet that is gone none could be
        found any more."""
        below: list[psutil.Process] = []
        if self.raylet is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = self.raylet.children(recursive=True)
        return replace(self, processes=tuple(dict.fromkeys((*self.processes, *below))))

    @property
    def lives(self) -> bool:
        """False once it is known that Ray cannot answer. Its calls then wait for a minute each."""
        return self.raylet is None or _runs(self.raylet)

    def workers(self) -> list[psutil.Process]:
        """Those that serve still, of the ones there were at the time of looking."""
        return [process for process in self.processes if _name(process).startswith(_WORKERS) and _runs(process)]

    def end(self, grace_s: float = _GRACE_S) -> None:
        """Ray's processes end with their node by themselves; what does not within `grace_s` is killed."""
        _, left = psutil.wait_procs(self.processes, timeout=grace_s)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def run_bounded(act: Callable[[], None], seconds: float) -> None:
    """Run it aside and wait for so long; what it does after that concerns nobody."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""Nothing that `up` started outlives it, not even when it is killed.

Some of Ray's helper processes notice the death of their cluster only after a minute. A forked child looks every second
which processes descend from `up`, waits on a pipe for its end, however that comes, and then kills what is left of them.
What was started in the last second is known by a mark in its environment (Ray's processes overwrite theirs).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import time
from pathlib import Path

__all__ = ["MARK", "Process", "descendants", "marked", "start_reaper"]

MARK = "TANDEM_UP"
Process = tuple[int, int]
"""Pid, and start in clock ticks since boot: together never reused."""

_LOOK_S = 1.0
_SWEEPS_S = 5.0
_SWEEP_PAUSE_S = 0.05


def start_reaper() -> int:
    """Fork the reaper; call it before threads exist. Returns its pid; it ends soon after this process."""
    mark = secrets.token_hex(16)
    os.environ[MARK] = mark
    read_end, _write_end = os.pipe()  # the write end stays open as long as this process lives, and in no descendant
    pid = os.fork()
    if pid:
        os.close(read_end)
        return pid
    try:
        os.close(_write_end)
        _detach()
        _sweep(mark, _watch(os.getppid(), read_end))
    finally:
        os._exit(0)


def descendants(root: int) -> set[Process]:
    """Every process below the process `root`, which is not one of them."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                # After the name, which may hold anything: state, parent, …; the start is the 20th of them.
                fields = (folder / "stat").read_bytes().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append((int(folder.name), int(fields[19])))
    found: set[Process] = set()
    pending = [root]
    while pending:
        below = children.get(pending.pop(), [])
        found.update(below)
        pending += [pid for pid, _ in below]
    return found


def marked(mark: str) -> list[int]:
    """Pids of this user's processes that were started with the mark in their environment."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _detach() -> None:
    """Out of reach of the terminal's signals, and holding none of its streams."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def _watch(root: int, read_end: int) -> set[Process]:
    """Until the other end of the pipe is closed; returns all that ever descended from `root`, but for this process."""
    known: set[Process] = set()
    ended = False
    while not ended:
        ended = bool(select.select([read_end], [], [], _LOOK_S)[0])
        known = {process for process in known if _is_running(process)} | descendants(root)
    return {process for process in known if process[0] != os.getpid()}


def _sweep(mark: str, known: set[Process]) -> None:
    deadline_s = time.monotonic() + _SWEEPS_S
    while time.monotonic() < deadline_s:
        pids = [pid for pid, start in known if _is_running((pid, start))] + marked(mark)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return
        time.sleep(_SWEEP_PAUSE_S)


def _is_running(process: Process) -> bool:
    pid, start = process
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return int(fields[19]) == start and fields[0] != b"Z"

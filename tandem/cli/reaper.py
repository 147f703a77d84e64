"""Nothing that `up` started outlives it, not even when it is killed.

Some of Ray's helper processes notice the death of their cluster only after a minute. A forked child waits on a pipe for
the end of `up`, however that comes, and then kills every process that carries the mark which `up` put into the
environment of all its descendants.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from pathlib import Path

__all__ = ["MARK", "marked", "start_reaper"]

MARK = "TANDEM_UP"
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
        while os.read(read_end, 1):
            pass
        _sweep(mark)
    finally:
        os._exit(0)


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


def _sweep(mark: str) -> None:
    deadline_s = time.monotonic() + _SWEEPS_S
    while time.monotonic() < deadline_s and (pids := marked(mark)):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_SWEEP_PAUSE_S)

"""The router as a child of `up`: started, watched, restarted a bounded number of times, stopped first."""

from __future__ import annotations

import contextlib
import subprocess

from tandem.child import module_command
from tandem.clock import Clock
from tandem.config import RouterConfig
from tandem.config_json import dump
from tandem.errors import TandemError

__all__ = ["RouterProcess"]

_MOST_RESTARTS = 5
_STABLE_S = 30.0
_PAUSE_S = 0.5
_KILL_WAIT_S = 5.0


class RouterProcess:
    """The cluster secret goes to the child through its standard input, since command lines are everybody's to read.

    command: what runs instead of the real router, for tests."""

    def __init__(self, config: RouterConfig, controller_address: str, clock: Clock, command: list[str] | None = None) -> None:
        self._clock = clock
        self._command = command or [
            *module_command("tandem.cli.main", "router", "--controller", controller_address),
            *("--settings", dump(config), "--cluster-secret-file", "-"),
        ]
        self._secret = config.trust.secret
        self._restarts = 0
        self._started_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """In a process group of its own: Ctrl-C in the terminal reaches `up` alone, which stops things in order."""
        self._started_s = self._clock.now()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:  # broken: it has ended already
            pipe.write(self._secret.reveal().encode())

    def ended(self) -> int | None:
        """Its exit status when it is no more."""
        return self._process.poll() if self._process else None

    def restart_if_ended(self) -> str:
        """Start it again when it has ended, later after each time. Returns what to tell people; empty: nothing happened.

        Raises:
            TandemError: it ended too often within short time.
        """
        status = self.ended()
        if status is None:
            return ""
        lived_s = self._clock.now() - self._started_s
        if lived_s >= _STABLE_S:
            self._restarts = 0
        if self._restarts >= _MOST_RESTARTS:
            raise TandemError(f"the router ended {_MOST_RESTARTS + 1} times in short succession (last {_describe(status)})")
        if lived_s < self._restarts * _PAUSE_S:
            return ""
        self._restarts += 1
        self.start()
        return f"the router ended ({_describe(status)}); started again"

    def stop(self, grace_s: float) -> None:
        """Ask it to drain and end; after `grace_s` it is killed."""
        if self._process is None or self.ended() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_KILL_WAIT_S)


def _describe(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"

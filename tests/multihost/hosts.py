"""Hosts as network namespaces. Needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN, and iproute2.

The namespaces are joined by a bridge that lives in the first of them: nothing of it is seen or reached from outside, and
nothing of this machine's own network is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
_STOP_S = 60.0
_RESTART_PAUSE_S = 1.0
# Each host has a /tmp/ray of its own: sockets and the pointer to the newest session would clash.
_ENTER = 'mkdir -p /tmp/ray && mount -t tmpfs tandem /tmp/ray && exec "$@"'


def why_not() -> str:
    """Why hosts cannot be made here; empty: they can."""
    if shutil.which("ip") is None:
        return "iproute2's `ip` is not installed"
    name = f"tandem{os.getpid()}x"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made: {made.stderr.strip()}"
    entered = subprocess.run(["ip", "netns", "exec", name, "true"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"network namespaces cannot be entered: {entered.stderr.strip()}" if entered.returncode else ""


@dataclass(frozen=True, slots=True)
class Host:
    """namespace: its network. address: in the network of all hosts. log: what its processes say."""

    namespace: str
    address: str
    log: Path

    def start(self, *arguments: str, stdout: int | None = None) -> subprocess.Popen[str]:
        """`tandem` with these arguments."""
        return self.start_python("-m", "tandem.cli.main", *arguments, stdout=stdout)

    def start_python(self, *arguments: str, stdout: int | None = None) -> subprocess.Popen[str]:
        command = ["ip", "netns", "exec", self.namespace, "sh", "-c", _ENTER, "host", sys.executable, *arguments]
        with self.log.open("a") as log:
            return subprocess.Popen(command, cwd=ROOT, stdout=stdout or log, stderr=log, text=True, process_group=0)

    def run(self, *arguments: str, timeout_s: float = 60.0) -> str:
        """Standard output of `tandem` with these arguments. Raises AssertionError: it failed, or took longer."""
        process = self.start(*arguments, stdout=subprocess.PIPE)
        try:
            out, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise AssertionError(f"{arguments}: not within {timeout_s:.0f} s") from error
        assert process.returncode == 0, f"{arguments}: exit code {process.returncode}, see {self.log}"
        return out


@dataclass(slots=True)
class Kept:
    """A process that is started again whenever it ends, as the kubelet does with a container."""

    host: Host
    arguments: Sequence[str]
    starts: int = 0
    _process: subprocess.Popen[str] | None = None
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._keep, name=self.host.namespace, daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        while not self._stopping.is_set():
            self.starts += 1
            self._process = self.host.start(*self.arguments)
            self._process.wait()
            self._stopping.wait(_RESTART_PAUSE_S)

    def stop(self) -> None:
        self._stopping.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        assert self._thread is not None
        self._thread.join(_STOP_S)
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._thread.join(_STOP_S)


class Network:
    """hosts: in one Ethernet, each with an address of 10.77.0.0/24."""

    def __init__(self, num_hosts: int, folder: Path) -> None:
        stem = f"tandem{os.getpid()}h"
        self.hosts = [Host(f"{stem}{i}", f"10.77.0.{i + 1}", folder / f"host{i}.log") for i in range(num_hosts)]

    def cut(self, host: Host) -> None:
        """No packet reaches `host` or leaves it any more; nobody is told."""
        self._port(host, "down")

    def heal(self, host: Host) -> None:
        self._port(host, "up")

    def _port(self, host: Host, state: str) -> None:
        assert host is not self.hosts[0], "the bridge lives there"
        _ip("-n", self.hosts[0].namespace, "link", "set", f"port{self.hosts.index(host)}", state)

    def create(self) -> None:
        first = self.hosts[0].namespace
        for host in self.hosts:
            _ip("netns", "add", host.namespace)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", "eth0", "type", "bridge")
        _ip("-n", first, "addr", "add", f"{self.hosts[0].address}/24", "dev", "eth0")
        _ip("-n", first, "link", "set", "eth0", "up")
        for number, host in enumerate(self.hosts[1:], 1):
            _ip("-n", first, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", first, "link", "set", f"port{number}", "master", "eth0", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")

    def delete(self) -> None:
        """With everything that still runs in it."""
        for host in self.hosts:
            pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True).stdout.split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)


@contextlib.contextmanager
def network(num_hosts: int, folder: Path) -> Iterator[Network]:
    made = Network(num_hosts, folder)
    try:
        made.create()
        yield made
    finally:
        made.delete()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"

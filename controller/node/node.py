"""One node of a pool: wait for the head, run the Ray node, tell whether its worker serves, leave in order.

Whatever ends the Ray node ends this process, so that its supervisor (the kubelet) starts both anew: a node that the head
took for dead cannot come back under its old identity.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from controller.node.place import NodePhase, Seen, find_own, phase_text
from controller.node.probes import probe_app
from controller.node.ray_process import RayProcess, is_reachable, node_command, token_environment
from controller.node.watch import watch
from router.http.server import start_http
from tandem.address import check_address
from tandem.cli.reaper import descendants
from tandem.clock import Clock, MonotonicClock
from tandem.config import TlsConfig
from tandem.errors import TandemError
from tandem.trust import Trust
from tandem.worker_process import find_process

__all__ = ["Node", "NodeSettings", "run_node"]

log = logging.getLogger(__name__)

_LOOK_S = 0.2
_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """role: prefill or decode. head, controller: host:port of the Ray head and of the controller's Membership service.
    host: this machine's address, as others reach it. probe_host, probe_port: where the probes are served.
    leave_s: longest that the worker may take to finish when the node leaves."""

    role: str
    head: str
    controller: str
    host: str
    probe_host: str = "0.0.0.0"
    probe_port: int = 8082
    leave_s: float = 330.0


@dataclass(slots=True)
class Node:
    """settings: see `NodeSettings`. is_own: whether a pid is a process below this one. terminate: asks it to end in order."""

    settings: NodeSettings
    is_own: Callable[[int], bool]
    terminate: Callable[[int], None]
    clock: Clock = field(default_factory=MonotonicClock)
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    phase: NodePhase = NodePhase.JOINING
    _members: Sequence[Seen] = ()
    _leaving: asyncio.Task[None] | None = None

    def text(self) -> str:
        return phase_text(self.phase, self.settings.role, self.settings.head)

    def joined(self) -> None:
        """The Ray node runs."""
        if self.phase is NodePhase.JOINING:
            self.phase = NodePhase.STARTING

    def on_members(self, members: Sequence[Seen]) -> None:
        self._members = members
        if self.phase in (NodePhase.STARTING, NodePhase.SERVING):
            own = self._own()
            self.phase = NodePhase.SERVING if own and own.state == "ready" else NodePhase.STARTING

    async def leave(self) -> None:
        """Drain the worker; returns when its process is gone, or after `leave_s`. Again is nothing more than to wait for it."""
        if self._leaving is None:
            self.phase = NodePhase.LEAVING
            self._leaving = asyncio.ensure_future(self._drain())
        await asyncio.shield(self._leaving)

    def _own(self) -> Seen | None:
        """A membership from before a restart of this node names a process that is not ours."""
        own = find_own(self._members, self.settings.role, self.settings.host)
        return own if own and self.is_own(own.pid) else None

    async def _drain(self) -> None:
        own = self._own()
        if own is not None:
            log.info("%s is asked to finish what runs, within %.0f s", own.worker_id, self.settings.leave_s)
            self.terminate(own.pid)
            deadline_s = self.clock.now() + self.settings.leave_s
            while self.is_own(own.pid):
                if self.clock.now() > deadline_s:
                    log.error("%s still runs after %.0f s; the node ends all the same", own.worker_id, self.settings.leave_s)
                    break
                await self.pause(_LOOK_S)
        self.phase = NodePhase.GONE


def is_below(pid: int) -> bool:
    """A running process that descends from this one."""
    found = find_process(pid)
    return found is not None and found[1] != "Z" and any(pid == below for below, _ in descendants(os.getpid()))


async def run_node(settings: NodeSettings, trust: Trust) -> None:
    """Until SIGTERM or SIGINT, after which the worker is drained and the Ray node ended.

    Raises:
        TandemError: the Ray node ended by itself.
        ConfigError: a port cannot be had.
    """
    node = Node(settings, is_below, lambda pid: os.kill(pid, signal.SIGTERM))
    head = check_address(settings.head, "--head")
    ray = RayProcess(
        node_command(settings.head, settings.host, {f"tandem_{settings.role}": 1}), token_environment(trust.secret)
    )
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked.set)
    probes = await start_http(
        probe_app(lambda: node.phase, node.text, node.leave), settings.probe_host, settings.probe_port, TlsConfig()
    )
    watching = asyncio.create_task(watch(settings.controller, f"node-{settings.host}", trust, node.on_members))
    try:
        while not await asyncio.to_thread(is_reachable, head):
            if await _within(asked, _LOOK_S):
                return
        ray.start()
        node.joined()
        await _until_asked(asked, node, ray)
        await node.leave()
    finally:
        # The unit goes with the Ray node, at once: the controller would start another worker on it.
        await asyncio.to_thread(ray.stop)
        watching.cancel()
        await probes.stop(_ANSWER_S)


async def _until_asked(asked: asyncio.Event, node: Node, ray: RayProcess) -> None:
    """By a signal, or by a request to leave. Raises TandemError: the Ray node is no more."""
    while not await _within(asked, _LOOK_S) and node.phase not in (NodePhase.LEAVING, NodePhase.GONE):
        if (status := ray.ended()) is not None:
            raise TandemError(f"the Ray node has ended (exit code {status}); its log and `ray start`'s output say why")


async def _within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True

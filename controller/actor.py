"""The controller as a detached Ray actor: a thin shell around `Controller`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import ray
import ray.util

from controller.autoscaler import Autoscaler
from controller.controller import Controller
from controller.life import Timing
from controller.membership import MembershipServer
from controller.overview import Overview
from controller.ray_workers import NAMESPACE, RayLauncher, resource
from controller.store import RayStore
from tandem.config import AutoscaleConfig, WorkerConfig
from tandem.config_json import load
from tandem.errors import ConfigError
from tandem.patience import Patience
from tandem.trust import Trust

__all__ = ["NAME", "NAMESPACE", "ControllerActor", "RayLauncher", "resource"]

NAME = "controller"

log = logging.getLogger(__name__)

_STOP_S = 10.0
_PORT_RETRY_S = 0.5


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


# When its process dies Ray starts it again with the same arguments, and it finds what the last life saved.
@ray.remote(num_cpus=0, max_restarts=-1)
class ControllerActor:
    """cluster_id: under it, wishes and workers are kept for its next life. wishes: see `Controller`. config_json: a
    WorkerConfig. autoscale_json: an AutoscaleConfig. host, port: where it listens; empty: this node's address; 0: the system
    chooses. owner_timeout_s: end everything when `overview` was not asked for so long; 0: never."""

    def __init__(
        self,
        cluster_id: str,
        wishes: dict[str, int | None],
        config_json: str,
        autoscale_json: str,
        host: str,
        owner_timeout_s: float,
        port: int = 0,
    ) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s controller %(levelname)s %(name)s: %(message)s")
        config = load(WorkerConfig, config_json, "worker configuration")
        timing = Timing(stop_s=config.drain_s + _STOP_S, margin_s=_STOP_S)
        self._store = RayStore(cluster_id)
        self._controller = Controller(RayLauncher(), wishes, config_json, timing=timing, store=self._store)
        self._autoscale = load(AutoscaleConfig, autoscale_json, "autoscale configuration")
        self._trust = Trust.load(config.trust)
        self._host, self._port = host or _node_address(), port
        self._owner_timeout_s, self._owner = owner_timeout_s, Patience(owner_timeout_s)
        self._opening: asyncio.Task[MembershipServer] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # By itself, since nobody calls `open` again after a restart.
        ray.get_runtime_context().current_actor.open.remote()

    async def open(self) -> str:
        """Begin to run the pools. Returns the address of the Membership service; again the same when called again."""
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return (await asyncio.shield(self._opening)).address

    async def _open(self) -> MembershipServer:
        """At the port of the last life, if there was one: there routers look for it."""
        await self._controller.resume()
        self._spawn(self._controller.run())
        if self._owner_timeout_s:
            self._spawn(self._watch_owner())
        if self._autoscale.enabled:
            self._spawn(Autoscaler(self._controller, self._autoscale).run())
        roster = self._controller.roster
        while True:
            port = roster.port or self._port
            try:
                server = await MembershipServer.start(self._controller, self._host, self._trust, port)
            except ConfigError as error:
                if not roster.port:
                    raise
                log.error("%s; routers look there, so it is tried again", error)
                await asyncio.sleep(_PORT_RETRY_S)
            else:
                roster.port = server.port
                await roster.save()
                return server

    async def get_address(self) -> str:
        return self._opening.result().address if self._opening and self._opening.done() else ""

    async def progress(self) -> dict[str, tuple[int, int]]:
        """Bytes of weights loaded, and in all, by worker id."""
        return {w.worker_id: (w.loaded_bytes, w.total_bytes) for w in self._controller.overview().workers}

    async def overview(self) -> Overview:
        """What there is, for people. Also tells that the owner lives."""
        self._owner.heard()
        return self._controller.overview()

    async def shutdown(self) -> None:
        """Stop all workers in order, then the server; the actor itself stays until it is killed."""
        await self._controller.shutdown()
        if self._opening is not None:
            await (await self._opening).stop()
        await self._store.clear()

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._settle)

    def _settle(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("the controller cannot go on", exc_info=error)
            os._exit(1)

    async def _watch_owner(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with self._owner:
                await asyncio.Event().wait()
        log.warning("nobody asked for %.0f s: the owner is gone, everything stops", self._owner_timeout_s)
        await self.shutdown()
        ray.kill(ray.get_runtime_context().current_actor)

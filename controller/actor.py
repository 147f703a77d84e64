"""The controller as a detached Ray actor, and workers as Ray actors: thin shells around `Controller` and the worker rooms."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Mapping
from dataclasses import astuple
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.util

from controller.autoscaler import Autoscaler
from controller.burial import ProcessId, end_for_certain
from controller.controller import Controller
from controller.launcher import ProcessRecord, WorkerDied, WorkerHandle
from controller.life import Timing
from controller.membership import MembershipServer
from controller.overview import Overview
from controller.reconcile import PREFILL, ROLES
from controller.store import RayStore
from tandem.config import AutoscaleConfig, WorkerConfig, load
from tandem.errors import ConfigError, TandemError
from tandem.trust import Trust

__all__ = ["NAME", "NAMESPACE", "ControllerActor", "RayLauncher", "resource"]

NAMESPACE = "tandem"
NAME = "controller"

T = TypeVar("T")
log = logging.getLogger(__name__)

_CREATION_S = 5.0
_OWNER_LOOK_S = 1.0
_STOP_S = 10.0
_PORT_RETRY_S = 0.5
_GONE = "it ended while the controller was away"
_CALLS_AT_ONCE = 16  # to one worker: a start, a wait for its end, pings, and pairings


def resource(role: str) -> str:
    """The Ray resource of which a worker of this role takes one unit."""
    return f"tandem_{role}"


class RayLauncher:
    """Each worker is one actor; it takes one unit of its role's resource and no CPU, which Ray only counts."""

    async def offered(self) -> Mapping[str, int]:
        resources = await asyncio.to_thread(ray.cluster_resources)
        return {role: int(resources.get(resource(role), 0)) for role in ROLES}

    async def launch(self, role: str, worker_id: str, config_json: str) -> WorkerHandle:
        try:
            actor_class = await asyncio.to_thread(_actor_class, role)
        except ImportError as error:
            raise WorkerDied(f"the worker's code cannot be imported: {error}") from error
        # Detached: it lives on when the controller's process dies, and is found again by its name.
        options: dict[str, object] = {"name": worker_id, "namespace": NAMESPACE, "lifetime": "detached"}
        options |= {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS_AT_ONCE}
        actor = actor_class.options(resources={resource(role): 1}, **options).remote(worker_id, config_json)
        return _RayWorker(actor)

    async def find(self, worker_id: str, process: ProcessRecord | None) -> WorkerHandle:
        identity = ProcessId(*process) if process else None
        try:
            return _RayWorker(await asyncio.to_thread(ray.get_actor, worker_id, namespace=NAMESPACE), identity)
        except ValueError:
            return _GoneWorker(identity)


def _node_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _actor_class(role: str) -> Any:
    if role == PREFILL:
        from prefill_worker.actor import PrefillWorkerActor

        return PrefillWorkerActor
    from decode_worker.actor import DecodeWorkerActor

    return DecodeWorkerActor


class _RayWorker:
    """See `WorkerHandle`."""

    def __init__(self, actor: Any, process: ProcessId | None = None) -> None:
        self._actor = actor
        self._process = process  # known as soon as Ray has made it

    @property
    def process_record(self) -> ProcessRecord | None:
        return astuple(self._process) if self._process else None

    async def start(self) -> bytes:
        await self._identify()
        text: bytes = await _call(self._actor.start.remote())
        return text

    async def progress(self) -> tuple[int, int]:
        progress: tuple[int, int] = await _call(self._actor.progress.remote())
        return progress

    async def load(self) -> bytes:
        load: bytes = await _call(self._actor.load.remote())
        return load

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        return await _call(self._actor.connect.remote(peers))

    async def disconnect(self, worker_id: str) -> None:
        await _call(self._actor.disconnect.remote(worker_id))

    async def wait_stopped(self) -> str:
        return await _call(self._actor.wait_stopped.remote())

    async def stop(self, drain_s: float | None = None) -> None:
        await _call(self._actor.stop.remote(drain_s))

    async def kill(self) -> None:
        """Ray 2.60 never frees the unit of an actor that is killed between the lease of its process and its creation, so a
        new one is left to come up first."""
        with contextlib.suppress(WorkerDied, TimeoutError):
            async with asyncio.timeout(_CREATION_S):
                await self._identify()
        await asyncio.to_thread(ray.kill, self._actor)
        if self._process is not None:
            await end_for_certain(self._process)

    async def _identify(self) -> None:
        if self._process is None:
            self._process = ProcessId(*await _call(self._actor.identify.remote()))


class _GoneWorker:
    """See `WorkerLauncher.find`: Ray knows no actor of its name any more; its process may live on where a node is cut off."""

    def __init__(self, process: ProcessId | None) -> None:
        self._process = process

    @property
    def process_record(self) -> ProcessRecord | None:
        return astuple(self._process) if self._process else None

    async def start(self) -> bytes:
        raise WorkerDied(_GONE)

    async def progress(self) -> tuple[int, int]:
        raise WorkerDied(_GONE)

    async def load(self) -> bytes:
        raise WorkerDied(_GONE)

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        raise WorkerDied(_GONE)

    async def disconnect(self, worker_id: str) -> None:
        raise WorkerDied(_GONE)

    async def wait_stopped(self) -> str:
        raise WorkerDied(_GONE)

    async def stop(self, drain_s: float | None = None) -> None:
        raise WorkerDied(_GONE)

    async def kill(self) -> None:
        if self._process is not None:
            await end_for_certain(self._process)


async def _call(reference: Awaitable[T]) -> T:
    """The answer of a remote call; errors of ours come out as they were raised.

    Raises:
        WorkerDied: the actor is gone, or the call failed with anything that is not a TandemError.
    """
    try:
        return await reference
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TandemError):
            raise error.cause from None
        raise WorkerDied(f"{type(error.cause).__name__}: {error.cause}") from None
    except ray.exceptions.RayError as error:
        raise WorkerDied(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    """Ray's texts go on for a page; the first line, or the one that names the cause, is for people."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if line.startswith(("Worker exit", "The actor died", "The actor is dead"))), "")
    return cause or (lines[0] if lines else type(error).__name__)


# When its process dies Ray starts it again with the same arguments, and it finds what the last life saved.
@ray.remote(num_cpus=0, max_restarts=-1)
class ControllerActor:
    """cluster_id: under it, wishes and workers are kept for its next life. wishes: see `Controller`. config_json: a
    WorkerConfig. autoscale_json: an AutoscaleConfig. host, port: where it listens; empty:
    this node's address; 0: the system chooses. owner_timeout_s: end everything when `overview` was not asked for so long; 0:
    never."""

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
        self._owner_timeout_s = owner_timeout_s
        self._asked_s = time.monotonic()
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
        self._asked_s = time.monotonic()
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
        while time.monotonic() - self._asked_s < self._owner_timeout_s:  # noqa: ASYNC110 - a deadline that moves
            await asyncio.sleep(_OWNER_LOOK_S)
        log.warning("nobody asked for %.0f s: the owner is gone, everything stops", self._owner_timeout_s)
        await self.shutdown()
        ray.kill(ray.get_runtime_context().current_actor)

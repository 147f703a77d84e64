"""The controller as a detached Ray actor, and workers as Ray actors: thin shells around `Controller` and the worker rooms."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import ray
import ray.exceptions
import ray.util

from controller.burial import ProcessId, end_for_certain
from controller.controller import Controller
from controller.launcher import WorkerDied, WorkerHandle
from controller.life import Timing
from controller.membership import MembershipServer
from controller.overview import Overview
from controller.reconcile import PREFILL, ROLES
from tandem.config import WorkerConfig, load
from tandem.errors import TandemError
from tandem.trust import Trust

__all__ = ["NAME", "NAMESPACE", "ControllerActor", "RayLauncher", "resource"]

NAMESPACE = "tandem"
NAME = "controller"

T = TypeVar("T")
log = logging.getLogger(__name__)

_CREATION_S = 5.0
_OWNER_LOOK_S = 1.0
_STOP_S = 10.0
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
        options = {"name": worker_id, "namespace": NAMESPACE, "num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        options["max_concurrency"] = _CALLS_AT_ONCE
        actor = actor_class.options(resources={resource(role): 1}, **options).remote(worker_id, config_json)
        return _RayWorker(actor)


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

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._process: ProcessId | None = None  # known as soon as Ray has made it

    async def start(self) -> bytes:
        await self._identify()
        text: bytes = await _call(self._actor.start.remote())
        return text

    async def progress(self) -> tuple[int, int]:
        progress: tuple[int, int] = await _call(self._actor.progress.remote())
        return progress

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        return await _call(self._actor.connect.remote(peers))

    async def disconnect(self, worker_id: str) -> None:
        await _call(self._actor.disconnect.remote(worker_id))

    async def wait_stopped(self) -> str:
        return await _call(self._actor.wait_stopped.remote())

    async def stop(self) -> None:
        await _call(self._actor.stop.remote())

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


@ray.remote(num_cpus=0, max_restarts=0)
class ControllerActor:
    """wishes: see `Controller`. config_json: a WorkerConfig. host: where it listens; empty: this node's address.
    port: likewise; 0: the system chooses. owner_timeout_s: end everything when `overview` was not asked for so long; 0:
    never."""

    def __init__(
        self, wishes: dict[str, int | None], config_json: str, host: str, owner_timeout_s: float, port: int = 0
    ) -> None:
        config = load(WorkerConfig, config_json, "worker configuration")
        self._controller = Controller(RayLauncher(), wishes, config_json, timing=Timing(stop_s=config.drain_s + _STOP_S))
        self._trust = Trust.load(config.trust)
        self._host, self._port = host or _node_address(), port
        self._owner_timeout_s = owner_timeout_s
        self._asked_s = time.monotonic()
        self._server: MembershipServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> str:
        """Begin to run the pools. Returns the address of the Membership service; again the same when called again."""
        if self._server is None:
            self._server = await MembershipServer.start(self._controller, self._host, self._trust, self._port)
            self._spawn(self._controller.run())
            if self._owner_timeout_s:
                self._spawn(self._watch_owner())
        return self._server.address

    async def get_address(self) -> str:
        return self._server.address if self._server else ""

    async def wait_ready(self, prefill: int, decode: int) -> None:
        """See `Controller.wait_ready`."""
        await self._controller.wait_ready(prefill, decode)

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
        if self._server is not None:
            await self._server.stop()

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

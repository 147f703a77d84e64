"""Workers as Ray actors: how they are launched and found again, and calls to them whose errors are the controller's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import ray
import ray.exceptions

from controller.burial import ProcessId, end_for_certain
from controller.launcher import Node, ProcessRecord, WorkerDied, WorkerHandle
from controller.reconcile import PREFILL, ROLES
from tandem.errors import TandemError, first_line

__all__ = ["NAMESPACE", "RayLauncher", "elsewhere", "resource"]

NAMESPACE = "tandem"

T = TypeVar("T")

_CREATION_S = 5.0
_GONE = "it ended while the controller was away"
_CALLS_AT_ONCE = 16  # to one worker: a start, a wait for its end, pings, and pairings


def resource(role: str) -> str:
    """The Ray resource of which a worker of this role takes one unit."""
    return f"tandem_{role}"


class RayLauncher:
    """Each worker is one actor; it takes one unit of its role's resource and no CPU, which Ray only counts."""

    async def nodes(self) -> Sequence[Node]:
        return [_node(told) for told in await asyncio.to_thread(ray.nodes) if told["Alive"]]

    async def launch(self, role: str, worker_id: str, config_json: str, avoid: Collection[str] = ()) -> WorkerHandle:
        try:
            actor_class = await asyncio.to_thread(_actor_class, role)
        except ImportError as error:
            raise WorkerDied(f"the worker's code cannot be imported: {error}") from error
        # Detached: it lives on when the controller's process dies, and is found again by its name.
        options: dict[str, object] = {"name": worker_id, "namespace": NAMESPACE, "lifetime": "detached"}
        options |= {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "max_concurrency": _CALLS_AT_ONCE}
        if avoid:
            options["label_selector"] = elsewhere(avoid)
        actor = actor_class.options(resources={resource(role): 1}, **options).remote(worker_id, config_json)
        return _RayWorker(actor)

    async def find(self, worker_id: str, process: ProcessRecord | None) -> WorkerHandle:
        identity = ProcessId(*process) if process else None
        try:
            return _RayWorker(await asyncio.to_thread(ray.get_actor, worker_id, namespace=NAMESPACE), identity)
        except ValueError:
            return _GoneWorker(identity)


def elsewhere(avoid: Collection[str]) -> dict[str, str]:
    """Ray's label selector for every node but these. Without spaces: Ray 2.60 accepts them, and takes each for a part of an id,
    which then matches no node."""
    return {"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}


def _node(told: Mapping[str, Any]) -> Node:
    units = {role: int(told["Resources"].get(resource(role), 0)) for role in ROLES}
    return Node(told["NodeID"], told["NodeManagerAddress"], told["NodeManagerHostname"], units)


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
        raise WorkerDied(_cause_line(error)) from None


def _cause_line(error: Exception) -> str:
    """Ray's texts go on for a page; the line that names the cause, or the first one, is for people."""
    lines = map(str.strip, str(error).splitlines())
    causes = (line for line in lines if line.startswith(("Worker exit", "The actor died", "The actor is dead")))
    return next(causes, first_line(error).strip())

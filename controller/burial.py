"""The end of a worker's process, made certain: only after it may peers reuse memory that the process could have written.

A frozen process does not hear Ray, and Ray takes an actor for dead as soon as it has asked it to die. So the process itself is
killed by signal, on its own node, and looked for until it is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from dataclasses import dataclass

import ray
import ray.exceptions
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tandem.worker_process import find_process

__all__ = ["ProcessId", "end_for_certain", "is_gone", "kill_and_wait"]

log = logging.getLogger(__name__)

_LOOK_S = 0.02
_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """node_id: Ray's. pid, start_ticks: see `tandem.worker_process.process_identity`."""

    node_id: str
    pid: int
    start_ticks: int


async def end_for_certain(process: ProcessId) -> None:
    """Returns when the process is gone, or its node is; until then, however long it takes."""
    here = _is_here(process)
    while not (await asyncio.to_thread(kill_and_wait, process, _WAIT_S) if here else await _end_elsewhere(process)):
        log.warning("process %d is killed and not gone yet", process.pid)


def _is_here(process: ProcessId) -> bool:
    return bool(process.node_id == ray.get_runtime_context().get_node_id())


def kill_and_wait(process: ProcessId, timeout_s: float) -> bool:
    """On the process's own node. Whether it is gone; what it had mapped is unmapped then."""
    deadline_s = time.monotonic() + timeout_s
    while not is_gone(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True


def is_gone(process: ProcessId) -> bool:
    """A zombie counts: it runs no instruction and maps no memory any more."""
    found = find_process(process.pid)
    return found is None or found[0] != process.start_ticks or found[1] == "Z"


async def _end_elsewhere(process: ProcessId) -> bool:
    """By a task that runs on that node. One that Ray has declared dead ends its workers before it serves again."""
    where = NodeAffinitySchedulingStrategy(node_id=process.node_id, soft=False)
    try:
        gone: bool = await _kill_task.options(scheduling_strategy=where).remote(process, _WAIT_S)
    except ray.exceptions.RayError:
        await asyncio.sleep(_LOOK_S)
        nodes = await asyncio.to_thread(ray.nodes)
        return not any(node["NodeID"] == process.node_id and node["Alive"] for node in nodes)
    return gone


@ray.remote(num_cpus=0, max_retries=0)
def _kill_task(process: ProcessId, timeout_s: float) -> bool:
    return kill_and_wait(process, timeout_s)

"""The Ray actor around a decode worker: nothing but start, stop and pairing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import ray

from tandem.config import WorkerConfig, on_node
from tandem.config_json import load
from tandem.worker_process import Progress, WorkerProcess, prepare_process, process_identity

if TYPE_CHECKING:
    from decode_worker.host import DecodeHost

__all__ = ["DecodeWorkerActor"]


# Its methods block, in threads (see the launcher): Ray makes such an actor in the main thread, which alone may handle signals.
@ray.remote
class DecodeWorkerActor:
    """Restarted never: a worker that ends is replaced by a new one with a new identity."""

    def __init__(self, worker_id: str, config_json: str) -> None:
        prepare_process(worker_id)
        node_address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        config = on_node(load(WorkerConfig, config_json, "worker configuration"), node_address)
        self._process = WorkerProcess(partial(_start_host, worker_id, config))

    def identify(self) -> tuple[str, int, int]:
        """Ray's id of this node, and `process_identity`."""
        return (ray.get_runtime_context().get_node_id(), *process_identity())

    def start(self) -> bytes:
        """Load the weights and serve. Returns a serialised WorkerDescription; again the same."""
        return self._process.start().worker.description.SerializeToString()

    def progress(self) -> tuple[int, int]:
        """Bytes of weights loaded, and in all."""
        return self._process.progress()

    def disconnect(self, worker_id: str) -> None:
        """The prefill worker is gone: what it still had reserved here is free."""
        self._process.host.worker.writer_dead(worker_id)

    def load(self) -> bytes:
        """A serialised WorkerLoad."""
        return self._process.host.worker.load().SerializeToString()

    def wait_stopped(self) -> str:
        """Return, with the reason, when the worker has ended by itself, by SIGTERM or by `stop`."""
        return self._process.wait_stopped()

    def stop(self, drain_s: float | None = None) -> None:
        """Drain for so long at most (None: as configured), then end."""
        self._process.stop(drain_s)


# Not a method: Ray takes an actor with a coroutine among its methods for an asynchronous one.
async def _start_host(worker_id: str, config: WorkerConfig, progress: Progress) -> DecodeHost:
    # Imported here: whoever starts this actor imports its module too, and has no use for torch and NIXL.
    from decode_worker.host import DecodeHost
    from transfer.nixl_agent import NixlAgent

    return await DecodeHost.start(worker_id, config, NixlAgent, progress)

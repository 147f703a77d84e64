"""The Ray actor around a prefill worker: nothing but start, stop and pairing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import ray

from tandem.config import WorkerConfig, load
from tandem.v1 import worker_pb2 as pb
from tandem.worker_process import prepare_process

if TYPE_CHECKING:
    from prefill_worker.host import PrefillHost

__all__ = ["PrefillWorkerActor"]

_LIVENESS_INTERVAL_S = 0.5


@ray.remote
class PrefillWorkerActor:
    """Restarted never: a worker that ends is replaced by a new one with a new identity."""

    def __init__(self, worker_id: str, config_json: str) -> None:
        prepare_process(worker_id)
        self._worker_id = worker_id
        self._config = load(WorkerConfig, config_json, "worker configuration")
        self._progress = (0, 0)
        self._host: PrefillHost | None = None
        self._stopped = asyncio.Event()

    async def start(self) -> bytes:
        """Load the weights and serve. Returns a serialised WorkerDescription."""
        # Here and not above: whoever starts this actor imports its module too, and has no use for torch and NIXL.
        from prefill_worker.host import PrefillHost
        from transfer.nixl_agent import NixlAgent

        self._host = await PrefillHost.start(self._worker_id, self._config, NixlAgent, self._on_progress)
        return self._host.worker.description.SerializeToString()

    async def progress(self) -> tuple[int, int]:
        """Bytes of weights loaded, and in all."""
        return self._progress

    async def connect(self, peers: list[bytes]) -> list[tuple[str, str]]:
        """Pair with these decode workers (serialised descriptions). Returns the refused ones and why."""
        assert self._host is not None, "start comes first"
        return await self._host.worker.connect([pb.WorkerDescription.FromString(peer) for peer in peers])

    async def disconnect(self, worker_id: str) -> None:
        """The decode worker is gone: drop its connection."""
        if self._host is not None:
            await self._host.worker.disconnect(worker_id)

    async def wait_stopped(self) -> str:
        """Return, with the reason, when the worker has ended by itself or by `stop`."""
        while not self._stopped.is_set():
            if self._host is not None and not self._host.worker.is_alive:
                return "a thread of the worker has ended; see its log"
            try:
                async with asyncio.timeout(_LIVENESS_INTERVAL_S):
                    await self._stopped.wait()
            except TimeoutError:
                continue
        return "stopped"

    async def stop(self) -> None:
        self._stopped.set()
        if self._host is not None:
            host, self._host = self._host, None
            await host.stop()

    def _on_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._progress = (done_bytes, total_bytes)

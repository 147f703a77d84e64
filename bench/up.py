"""A `tandem up` of real processes, for measurements and tests that do harm to it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import grpc.aio
import psutil

from tandem.model.random_checkpoint import random_checkpoint
from tandem.rpc import create_channel
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem.v1 import operations_pb2, operations_pb2_grpc

__all__ = ["UpCluster", "is_full", "is_whole", "up_cluster", "words_of"]

_READY_S = 300.0
_END_S = 90.0
_LOOK_S = 0.1
_POOLS = ("prefill", "decode")


class UpCluster:
    """stub, operations: of the running router. address, url: of its gRPC and HTTP. log: what `up` and the router wrote to
    stderr so far."""

    def __init__(self, process: subprocess.Popen[str], ready_line: str, log_file: Path) -> None:
        self.process = process
        self.address, self.url = _places(ready_line)
        self._log_file = log_file
        self._channel = create_channel(self.address)
        self.stub = pb_grpc.InferenceStub(self._channel)
        self.operations = operations_pb2_grpc.OperationsStub(self._channel)

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    async def status(self) -> operations_pb2.Status:
        """Raises grpc.aio.AioRpcError while no router answers."""
        status: operations_pb2.Status = await self.operations.GetStatus(
            operations_pb2.GetStatusRequest(), timeout=20.0, wait_for_ready=True
        )
        return status

    async def workers(self, role: str = "") -> list[operations_pb2.WorkerStatus]:
        return [worker for worker in (await self.status()).workers if worker.role == role or not role]

    async def until(self, condition: Callable[[operations_pb2.Status], bool], timeout_s: float) -> operations_pb2.Status:
        """The first status for which it holds. Raises TimeoutError, with the last status as its text."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                status = await self.status()
                if condition(status):
                    return status
            except grpc.aio.AioRpcError as error:
                status = operations_pb2.Status(model_name=f"no status: {error.code().name}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(str(status))
            await asyncio.sleep(_LOOK_S)

    async def until_ready(self, timeout_s: float = _READY_S) -> None:
        """Every wanted worker serves."""
        await self.until(is_full, timeout_s)

    async def until_whole(self, timeout_s: float = 60.0) -> operations_pb2.Status:
        """Every wanted worker serves, and none holds anything."""
        return await self.until(lambda status: is_full(status) and is_whole(status), timeout_s)

    async def cpu_s(self) -> float:
        """Processor time that workers and router have taken so far."""
        pids = [worker.pid for worker in await self.workers()] + [self.router_pid()]
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(each.user + each.system for each in times)

    def router_pid(self) -> int:
        """Of the router that runs now. Raises LookupError."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and _is_router_of(folder, self.process.pid):
                return int(folder.name)
        raise LookupError("no router runs")

    async def close(self) -> None:
        await self._channel.close()


def is_full(status: operations_pb2.Status) -> bool:
    return set(status.pools) >= set(_POOLS) and all(0 < pool.wanted == pool.ready for pool in status.pools.values())


def is_whole(status: operations_pb2.Status) -> bool:
    """No worker holds a block, a slot, a lease or a request, and none ever found any missing."""
    busy = [
        worker
        for worker in status.workers
        if worker.queue or worker.running or worker.kv_blocks.used or worker.state_slots.used or worker.pool_mismatches
    ]
    return not busy and not any(status.leases.values()) and not any(status.requests.values())


@asynccontextmanager
async def up_cluster(
    *options: str, prefill: int = 1, decode: int = 1, settings: dict[str, object] | None = None
) -> AsyncIterator[UpCluster]:
    """Start `tandem up` with these options and the settings of its --config file, wait until it is ready, end it after.

    Without a --model it serves the random checkpoint, whose answers never end by themselves.
    """
    if "--model" not in options:
        options = ("--model", str(await asyncio.to_thread(random_checkpoint)), *options)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--prefill", str(prefill), "--decode", str(decode), "--grpc-port", "0", "--http-port", "0", *options]
        if settings:
            (Path(folder) / "settings.json").write_text(json.dumps(settings))
            words += ["--config", str(Path(folder) / "settings.json")]
        log_file = Path(folder) / "log"
        process = _start(words, log_file)
        try:
            cluster = UpCluster(process, await asyncio.to_thread(_ready_line, process, log_file), log_file)
            try:
                yield cluster
            finally:
                await cluster.close()
        finally:
            await asyncio.to_thread(_end, process)


def _start(words: Sequence[str], log_file: Path) -> subprocess.Popen[str]:
    with log_file.open("w") as log:
        command = [sys.executable, "-m", "tandem.cli.main", "up", *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


def _ready_line(process: subprocess.Popen[str], log_file: Path) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("ready"):
        raise RuntimeError(f"the cluster did not start:\n{log_file.read_text(errors='replace')[-3000:]}")
    return line


def _places(ready_line: str) -> tuple[str, str]:
    """HOST:PORT of gRPC and the URL of HTTP."""
    address, url, *_ = (word.rstrip(",:") for word in ready_line.split() if ":" in word)
    return address, url


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _is_router_of(folder: Path, parent: int) -> bool:
    try:
        command = (folder / "cmdline").read_bytes().split(b"\0")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return b"router" in command and int(fields[1]) == parent and fields[0] != "Z"


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; none where it has ended, or has and was not waited for yet."""
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []

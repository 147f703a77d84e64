"""A router on fake workers, as a process of its own, so that its memory and its log can be looked at.

python -m tests.router.process '{"settings": {…}, "max_context_tokens": 512, "slots": 64}'
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx2
import psutil

from router.fake_workers import FakeCluster
from router.fleet import Fleet
from router.http.app import Gateway
from router.http.server import start_http
from router.model import ServedModel
from router.pipeline import Pipeline
from router.server import HealthReporter, InferenceService, OperationsService, build_server
from tandem.clock import MonotonicClock
from tandem.config import RouterConfig
from tandem.config_json import load
from tandem.metrics import exposition
from tandem.rpc import bind
from tests.router.tools import MODEL, SERVED

__all__ = ["RouterProcess", "router_process"]

ROOT = Path(__file__).resolve().parents[2]
_START_S, _END_S = 60.0, 20.0


@dataclass(frozen=True)
class RouterProcess:
    """grpc, http: its ports. log: what it wrote to stderr so far."""

    grpc: int
    http: int
    process: psutil.Process
    _log_file: Path

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.grpc}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    @property
    def memory_mib(self) -> float:
        return float(self.process.memory_info().rss) / 2**20

    @property
    def num_files(self) -> int:
        """Connections among them."""
        return int(self.process.num_fds())

    async def in_flight(self, client: httpx2.AsyncClient) -> Counter[str]:
        """Requests that the router holds, by phase."""
        reply = await client.get(f"{self.url}/status", timeout=30)
        return Counter({phase: int(number) for phase, number in reply.json().get("requests", {}).items() if int(number)})


@asynccontextmanager
async def router_process(folder: Path, **options: Any) -> AsyncIterator[RouterProcess]:
    """options: see the module. It ends by SIGTERM, in order."""
    log_file = folder / "router.log"
    process = _start(json.dumps(options), log_file)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), _START_S)
        assert line, log_file.read_text()
        yield RouterProcess(**json.loads(line), process=psutil.Process(process.pid), _log_file=log_file)
        process.terminate()
        assert await asyncio.to_thread(process.wait, _END_S) == 0, log_file.read_text()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _start(options: str, log_file: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.router.process", options]
    with log_file.open("w") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)


async def _serve(settings: dict[str, Any], max_context_tokens: int, slots: int) -> None:
    config = load(RouterConfig, json.dumps({"grpc_port": 0, "http_port": 0, **settings}))
    info = replace(MODEL, max_context_tokens=max_context_tokens)
    served = ServedModel(info, SERVED.tokenizer)
    cluster = FakeCluster(info, 2, 2, kv_blocks=slots * max_context_tokens // info.block_size_tokens, slots=slots)
    fleet = Fleet(cluster.table, lambda _: _no_handle(), lambda _: SERVED.tokenizer)
    fleet.model = served
    pipeline = Pipeline(config, cluster.table, lambda: served, MonotonicClock())
    reporter = HealthReporter(cluster.table)
    await reporter.start()
    services = InferenceService(pipeline, fleet), OperationsService(pipeline, fleet, cluster.table)
    server = build_server(*services, reporter, config.max_message_bytes)
    port = bind(server, config.host, config.grpc_port)
    gateway = Gateway(pipeline, fleet, cluster.table, config.max_message_bytes, exposition)
    bounds = config.client_timeout_s, config.max_connections
    http = await start_http(gateway.app(), config.host, config.http_port, config.tls, *bounds)
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    sys.stdout.write(json.dumps({"grpc": port, "http": http.port}) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await asyncio.gather(server.stop(0), http.stop(0))


def _no_handle() -> Any:
    raise AssertionError("no handle is made here")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = json.loads(sys.argv[1])
    asyncio.run(_serve(given.get("settings", {}), given.get("max_context_tokens", 512), given.get("slots", 64)))

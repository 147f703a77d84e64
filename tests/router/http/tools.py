"""The HTTP face on a bench of fake workers, and OpenAI's own client for it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import openai
import pytest

from router.fleet import Fleet
from router.http.app import Gateway
from router.http.server import start_http
from tandem.config import TlsConfig
from tandem.metrics import exposition
from tests.router.tools import SERVED, Bench

__all__ = ["Face", "face"]


@dataclass
class Face:
    bench: Bench
    fleet: Fleet
    port: int
    client: openai.AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        """The raw reply to any body, JSON or bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self.client._client.post(f"{self.url}{path}", **content, **options)

    async def get(self, path: str) -> Any:
        return await self.client._client.get(f"{self.url}{path}")


@asynccontextmanager
async def face(bench: Bench | None = None, max_body_bytes: int = 1 << 20, known: bool = True) -> AsyncIterator[Face]:
    bench = bench or Bench()
    table = bench.cluster.table
    fleet = Fleet(table, lambda info: pytest.fail("no handle is made here"), lambda path: SERVED.tokenizer)
    fleet.model = SERVED if known else None
    gateway = Gateway(bench.pipeline, fleet, table, max_body_bytes, exposition)
    server = await start_http(gateway.app(), "127.0.0.1", 0, TlsConfig())
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=10)
    try:
        async with client:
            yield Face(bench, fleet, server.port, client)
    finally:
        await server.stop(0.0)

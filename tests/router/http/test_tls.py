"""HTTP over TLS, with the router's own certificate; client certificates where an authority is named."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from router.http.server import start_http
from tandem.config import TlsConfig
from tandem.errors import ConfigError
from tests.certificates import Authority


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


APP = Starlette(routes=[Route("/", hello)])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "authority")


@asynccontextmanager
async def serving(tls: TlsConfig) -> AsyncIterator[int]:
    server = await start_http(APP, "127.0.0.1", 0, tls)
    try:
        yield server.port
    finally:
        await server.stop(0.0)


async def get(port: int, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    try:
        return await reader.read()
    finally:
        writer.close()


def trusting(tls: TlsConfig) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=tls.ca_file)


async def test_a_certificate_makes_the_port_speak_tls(authority: Authority) -> None:
    tls = authority.issue("router")
    async with serving(replace(tls, ca_file="")) as port:
        assert (await get(port, trusting(tls))).endswith(b"hello")
        assert b"hello" not in await get(port, None)


async def test_with_an_authority_only_its_clients_get_in(authority: Authority) -> None:
    tls, client = authority.issue("router"), authority.issue("client")
    async with serving(tls) as port:
        stranger, known = trusting(tls), trusting(tls)
        known.load_cert_chain(client.cert_file, client.key_file)
        assert (await get(port, known)).endswith(b"hello")
        with contextlib.suppress(ssl.SSLError, ConnectionError):  # how it shows is the system's choice
            assert b"hello" not in await get(port, stranger)


async def test_a_certificate_that_cannot_be_used_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used for HTTP"):
        await start_http(APP, "127.0.0.1", 0, TlsConfig(cert_file=str(tmp_path / "none"), key_file="x"))

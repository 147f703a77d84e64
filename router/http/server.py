"""uvicorn in the router's own process and event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from router.http.connection import BoundedConnection
from tandem.config import TlsConfig
from tandem.errors import ConfigError

__all__ = ["HttpServer", "start_http"]

_STOP_WAIT_S = 5.0
_DATE_S = 1.0
# So much of an answer may wait in the system for its client. By itself it takes megabytes for one that does not read.
_SEND_BUFFER_BYTES = 64 * 1024


class _Server(uvicorn.Server):
    """Signals are the process's own business, and an idle router sleeps: uvicorn's own looks ten times a second whether it is
    to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # which also makes the date that answers carry, good for a second
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._leaving.wait()


@dataclass(frozen=True)
class HttpServer:
    """Serving since `start_http`. port: where it listens."""

    port: int
    _server: _Server
    _serving: asyncio.Task[None]

    async def stop(self, grace_s: float) -> None:
        """No new requests; those that run have so long. Twice is once."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.leave()
        done, _ = await asyncio.wait([self._serving], timeout=grace_s + _STOP_WAIT_S)
        if not done:
            self._server.force_exit = True
            self._serving.cancel()
            await asyncio.wait([self._serving])


async def start_http(
    app: Starlette,
    host: str,
    port: int,
    tls: TlsConfig,
    patience_s: float = BoundedConnection.patience_s,
    most: int = BoundedConnection.most,
) -> HttpServer:
    """port 0: the system chooses. patience_s, most: see `BoundedConnection`.

    Raises:
        ConfigError: the port cannot be had, or a certificate cannot be used.
    """
    context = _tls_context(tls)
    listening = _listen(host, port)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
        http=type("Connection", (BoundedConnection,), {"patience_s": patience_s, "most": most}),
    )
    config.load()
    config.ssl = context
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]), name="http")
    while not server.started:
        if serving.done():
            serving.result()
            raise ConfigError(f"the HTTP server did not start at {host}:{port}")
        await asyncio.sleep(0.005)
    return HttpServer(listening.getsockname()[1], server, serving)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror or error}") from error
    listening.set_inheritable(False)
    return listening


def _tls_context(tls: TlsConfig) -> ssl.SSLContext | None:
    if not tls.cert_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(tls.cert_file, tls.key_file)
        if tls.ca_file:
            context.load_verify_locations(tls.ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"the certificate {tls.cert_file} cannot be used for HTTP: {error}") from error
    return context

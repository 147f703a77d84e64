"""A client that falls silent does not hold a connection for ever, and one that only takes its time is served."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from router.http.server import HttpServer, start_http
from tandem.config import TlsConfig

PATIENCE_S = 0.15


async def echo(request: Request) -> PlainTextResponse:
    try:
        return PlainTextResponse(await request.body())
    except ClientDisconnect:
        return PlainTextResponse("nobody reads this")


class Endless:
    """A stream that goes on for as long as it is read."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def serve(self, request: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            try:
                while True:
                    yield b"x" * 10_000
                    await asyncio.sleep(0)
            finally:
                self.ended.set()

        return StreamingResponse(parts())


async def serve(endless: Endless | None = None, most: int = 100) -> HttpServer:
    routes = [Route("/", echo, methods=["GET", "POST"]), Route("/endless", (endless or Endless()).serve)]
    return await start_http(Starlette(routes=routes), "127.0.0.1", 0, TlsConfig(), PATIENCE_S, most)


async def said_after(port: int, *sent: bytes) -> bytes:
    """All that comes until the server closes, to a client that then says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in sent:
        writer.write(part)
    async with asyncio.timeout(20 * PATIENCE_S):
        said = await reader.read()
    await closed(writer)
    return said


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


async def test_a_connection_that_says_nothing_is_closed() -> None:
    server = await serve()
    assert await said_after(server.port) == b""
    await server.stop(0)


async def test_half_a_head_and_half_a_body_are_refused_in_time_with_a_reason() -> None:
    server = await serve()
    for sent in (HEAD, HEAD + b"content-length: 10\r\n\r\nhal", HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nab"):
        head, _, body = (await said_after(server.port, sent)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "did not come" in json.loads(body)["error"]["message"]
    await server.stop(0)


async def test_a_second_request_has_the_same_time_and_no_word_is_said_to_one_that_never_begins() -> None:
    server = await serve()
    whole = HEAD + b"content-length: 2\r\n\r\nhi"
    assert (await said_after(server.port, whole)).count(b"HTTP/1.1 ") == 1
    said = await said_after(server.port, whole, whole, HEAD)
    assert said.count(b"HTTP/1.1 200") == 2
    assert said.count(b"HTTP/1.1 408") == 1
    await server.stop(0)


async def test_each_part_of_a_request_has_its_own_time() -> None:
    server = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    for _ in range(3):
        for part in (HEAD + b"content-length: 2\r\n\r\n", b"hi"):
            writer.write(part)
            await asyncio.sleep(0.7 * PATIENCE_S)
        assert b"200" in await reader.readuntil(b"hi")
    await closed(writer)
    await server.stop(0)


async def test_a_client_that_does_not_read_is_left() -> None:
    endless = Endless()
    server = await serve(endless)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(20 * PATIENCE_S):
            await endless.ended.wait()
    await server.stop(0)


async def test_a_client_that_does_not_read_and_has_closed_its_own_side_is_left_too() -> None:
    endless = Endless()
    server = await serve(endless)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(PATIENCE_S / 2)
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(20 * PATIENCE_S):
            await endless.ended.wait()
    await server.stop(0)


async def test_a_slow_reader_is_not_left() -> None:
    endless = Endless()
    server = await serve(endless)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1)
    writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
    for _ in range(12):
        await asyncio.sleep(PATIENCE_S / 4)
        assert await reader.readexactly(200_000)
    assert not endless.ended.is_set()
    writer.transport.abort()
    async with asyncio.timeout(20 * PATIENCE_S):
        await endless.ended.wait()
    await server.stop(0)


async def test_one_connection_too_many_is_closed_and_the_others_go_on() -> None:
    server = await serve(most=2)
    kept = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    with contextlib.suppress(ConnectionError):
        assert await said_after(server.port) == b""
    for reader, writer in kept:
        writer.write(HEAD + b"content-length: 2\r\n\r\nhi")
        assert b"200" in await reader.readuntil(b"hi")
        await closed(writer)
    await server.stop(0)

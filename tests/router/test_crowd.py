"""A thousand clients that do not read, or say half of what they came for: the router stays small and others feel nothing."""

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import httpx2
import pytest

from tandem.rpc import create_channel
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tests.router.process import RouterProcess, router_process
from tests.router.test_server import SMALL_WINDOWS

pytestmark = pytest.mark.slow

_EACH = 250
_PATIENCE_S = 16.0
_MOST_GROWTH_MIB = 600.0  # an unread answer with all its logprobs is about a MiB
_MOST_OTHERS_P95_S = 1.0
# Far more than what the system and a window of HTTP/2 take for a client that does not read.
_LONG = {"prompt": "x" * 120, "max_tokens": 10, "ignore_eos": True, "stream": True, "logprobs": 20, "echo": True}
_LONG_CALL = pb.GenerateRequest(text="x" * 400, max_new_tokens=10, ignore_eos=True, prompt_logprobs=20, echo=True)
_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"


def request(length: int | None = None) -> bytes:
    body = json.dumps(_LONG).encode()
    return _HEAD + b"content-length: %d\r\n\r\n" % (len(body) if length is None else length) + body


# What comes before the client falls silent: nothing, half a head, half a body, and all with the sending side closed.
HALVES = (b"", _HEAD, request(10_000), request())


async def connect(port: int) -> socket.socket:
    """With room for hardly anything that comes."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", port))
    return client


async def silent_clients(router: RouterProcess, close_later: contextlib.AsyncExitStack) -> list[socket.socket]:
    """Half of them have asked for a stream that they do not read; of the others each has said a half of something."""
    clients = []
    for number in range(2 * _EACH):
        client = close_later.enter_context(await connect(router.http))
        clients.append(client)
        sent = request() if number % 2 else HALVES[number // 2 % len(HALVES)]
        await asyncio.get_running_loop().sock_sendall(client, sent)
        if sent is HALVES[-1] and not number % 2:
            client.shutdown(socket.SHUT_WR)
    return clients


async def half_calls(router: RouterProcess, close_later: contextlib.AsyncExitStack) -> list[asyncio.Future[grpc.StatusCode]]:
    """Over gRPC: streams of which nothing is read, and calls whose message never comes."""
    statuses: list[asyncio.Future[grpc.StatusCode]] = []
    path = "/tandem.v1.Inference/Generate"
    for _ in range(_EACH // 10):
        channel = await close_later.enter_async_context(grpc.aio.insecure_channel(router.address, options=SMALL_WINDOWS))
        for _ in range(10):
            reading = channel.stream_stream(path)(iter([_LONG_CALL.SerializeToString()]))
            unsaid = channel.stream_stream(path)()
            statuses += [asyncio.ensure_future(call.code()) for call in (reading, unsaid)]
            close_later.callback(reading.cancel)
            close_later.callback(unsaid.cancel)
    return statuses


async def others(router: RouterProcess, client: httpx2.AsyncClient, stub: pb_grpc.InferenceStub) -> list[float]:
    """Seconds of short requests, one after the other, over both."""
    taken = []
    for _ in range(20):
        begin_s = time.monotonic()
        reply = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5})
        assert reply.status_code == 200
        half_s = time.monotonic()
        assert [part async for part in stub.Generate(pb.GenerateRequest(text="hello", max_new_tokens=5), timeout=30)]
        taken += [half_s - begin_s, time.monotonic() - half_s]
    return taken


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


async def until(condition: object, bound_s: float) -> None:
    """Another process' state has no event to wait for."""
    async with asyncio.timeout(bound_s):
        while not await condition():  # type: ignore[operator]  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[tuple[RouterProcess, httpx2.AsyncClient, pb_grpc.InferenceStub]]:
    settings = {"client_timeout_s": _PATIENCE_S}
    async with (
        router_process(folder, settings=settings, slots=512) as router,
        httpx2.AsyncClient(base_url=router.url, timeout=30) as client,
        create_channel(router.address) as channel,
    ):
        yield router, client, pb_grpc.InferenceStub(channel)


async def test_a_thousand_silent_clients_cost_little_and_nobody_else_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with bench(tmp_path) as (router, client, stub), contextlib.AsyncExitStack() as close_later:
        alone = await others(router, client, stub)
        begin_mib, begin_files = router.memory_mib, router.num_files
        clients = await silent_clients(router, close_later)
        statuses = await half_calls(router, close_later)
        assert len(clients) + len(statuses) == 4 * _EACH

        async def all_said() -> bool:
            """What others feel from now on is not the burst of the silent ones' coming."""
            return set(await router.in_flight(client)) == {"finished"}

        await until(all_said, 2 * _PATIENCE_S)
        unread = (await router.in_flight(client)).total()
        beside = await others(router, client, stub)
        most_mib = router.memory_mib

        async def nothing_held() -> bool:
            return not await router.in_flight(client)

        await until(nothing_held, 3 * _PATIENCE_S)
        async with asyncio.timeout(2 * _PATIENCE_S):
            codes = await asyncio.gather(*statuses[1::2])
        assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}, Counter(codes)

        async def connections_closed() -> bool:
            return router.num_files < begin_files + _EACH

        await until(connections_closed, 2 * _PATIENCE_S)
        with capsys.disabled():
            sys.stdout.write(
                f"\n{4 * _EACH} silent clients, {unread} answers unread: memory {begin_mib:.0f} → {most_mib:.0f} MiB, "
                f"others' p95 {p95(alone) * 1000:.0f} → {p95(beside) * 1000:.0f} ms\n"
            )
        assert unread > _EACH // 4
        assert most_mib - begin_mib < _MOST_GROWTH_MIB
        assert p95(beside) < _MOST_OTHERS_P95_S
        assert "Traceback" not in router.log

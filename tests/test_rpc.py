"""Internal servers answer nobody without the cluster's secret, whatever the kind of call; TLS is mutual where it is set up."""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import grpc.aio
import pytest

from tandem.guard import SECRET_HEADER
from tandem.rpc import (
    bind,
    create_blocking_channel,
    create_channel,
    create_internal_channel,
    create_internal_server,
    create_server,
)
from tandem.secret import Secret
from tandem.trust import Certificates, Trust
from tests.certificates import Authority

OURS = Trust(Secret("the secret of this cluster"))
THEIRS = Trust(Secret("the secret of that cluster"))
KINDS = ["unary_unary", "unary_stream", "stream_unary", "stream_stream"]


def echo_methods(calls: list[str]) -> grpc.GenericRpcHandler:
    """One method of each kind, which answers with what it got."""

    async def unary(request: bytes, context: object) -> bytes:
        calls.append("called")
        return request

    async def unary_stream(request: bytes, context: object) -> AsyncIterator[bytes]:
        calls.append("called")
        yield request

    async def stream_unary(requests: AsyncIterator[bytes], context: object) -> bytes:
        calls.append("called")
        return b"".join([request async for request in requests])

    async def stream_stream(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
        calls.append("called")
        async for request in requests:
            yield request

    handlers = (unary, unary_stream, stream_unary, stream_stream)
    methods = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(h) for kind, h in zip(KINDS, handlers, strict=True)}
    return grpc.method_handlers_generic_handler("Echo", methods)


@asynccontextmanager
async def echo_server(
    server: grpc.aio.Server, calls: list[str], certificates: Certificates | None = None
) -> AsyncIterator[str]:
    server.add_generic_rpc_handlers((echo_methods(calls),))
    port = bind(server, "127.0.0.1", 0, certificates)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str, metadata: object = None) -> bytes:
    """The answer to one call of this kind. Raises AioRpcError."""

    async def messages() -> AsyncIterator[bytes]:
        yield b"hello"

    async with asyncio.timeout(10):
        method = getattr(channel, kind if kind in KINDS else "unary_unary")(f"/Echo/{kind}")
        answer = method(messages() if kind.startswith("stream") else b"hello", metadata=metadata)
        if kind.endswith("_stream"):
            return b"".join([part async for part in answer])
        return await answer


async def test_clients_connect_anew_after_a_while_and_what_runs_goes_on_where_it_began() -> None:
    """Behind a Service the new connection may lead to another router."""
    peers: list[str] = []
    go_on = asyncio.Event()

    async def who(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        peers.append(context.peer())
        return request

    async def long(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        yield b"first"
        await go_on.wait()
        yield context.peer().encode()

    server = create_server(connection_age_s=0.2)
    methods = {"who": grpc.unary_unary_rpc_method_handler(who), "long": grpc.unary_stream_rpc_method_handler(long)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Age", methods),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with create_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10):
        stream = channel.unary_stream("/Age/long")(b"")
        assert await stream.read() == b"first"
        while len(set(peers)) < 3:  # two connections later …
            await channel.unary_unary("/Age/who")(b"")
        go_on.set()
        assert await stream.read() == peers[0].encode()  # … the stream is on the first one
        assert await stream.read() is grpc.aio.EOF
    await server.stop(None)


_COUNTING_CLIENT = """
import asyncio, sys
from tandem.rpc import create_channel

async def main():
    async with create_channel(sys.argv[1]) as channel:
        num_messages = 0
        async for message in channel.unary_stream("/Flood/flood")(b""):
            num_messages += 1
            if num_messages == 100:
                print("reads", flush=True)
        print(num_messages)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_client_that_stands_still_under_load_for_seconds_keeps_its_stream() -> None:
    """Six seconds: more than a peer has to answer a ping, long after its buffers are full."""
    over = asyncio.Event()
    num_sent = 0

    async def flood(request: bytes, context: object) -> AsyncIterator[bytes]:
        nonlocal num_sent
        while not over.is_set():
            num_sent += 1
            yield bytes(10_000)

    server = create_server()
    methods = {"flood": grpc.unary_stream_rpc_method_handler(flood)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Flood", methods),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    command = (sys.executable, "-c", _COUNTING_CLIENT, f"127.0.0.1:{port}")
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            assert client.stdout is not None
            assert await client.stdout.readline() == b"reads\n"
            client.send_signal(signal.SIGSTOP)
            await asyncio.sleep(6.5)
            client.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.2)
            over.set()
            assert int(await client.stdout.read()) == num_sent
    finally:
        with contextlib.suppress(ProcessLookupError):
            client.kill()
        await client.wait()
        await server.stop(None)


def blocking_call(address: str, kind: str, metadata: object) -> None:
    """Raises RpcError. Not grpc.aio's: there a message that is sent after a refusal came hides that behind an INTERNAL of the
    client's own."""
    with create_blocking_channel(address) as channel:
        method = getattr(channel, kind if kind in KINDS else "unary_unary")(f"/Echo/{kind}")
        answer = method(iter([b"hello"]) if kind.startswith("stream") else b"hello", metadata=metadata, timeout=10)
        if kind.endswith("_stream"):
            list(answer)


@asynccontextmanager
async def far_away(address: str, seconds: float) -> AsyncIterator[str]:
    """An address from which bytes take so long to get to `address`, and back."""
    host, port = address.split(":")
    ended: list[asyncio.Event] = []

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                await asyncio.sleep(seconds)
                target.write(data)
        target.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(over := asyncio.Event())
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))
        for end in (writer, far_writer):
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()
        over.set()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for over in ended:
            await over.wait()


async def test_a_server_far_away_has_time_to_greet() -> None:
    """One attempt to connect must outlast some round trips, also with calls that do not wait for a connection."""
    async with echo_server(create_server(), []) as address, far_away(address, 0.2) as near, create_channel(near) as channel:
        assert await call(channel, "unary_unary") == b"hello"


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_call_passes_with_the_secret(kind: str) -> None:
    calls: list[str] = []
    async with echo_server(create_internal_server(OURS), calls) as address, create_internal_channel(address, OURS) as channel:
        assert await call(channel, kind, metadata=(("x-more", "stays"),)) == b"hello"
    assert calls == ["called"]


@pytest.mark.parametrize("kind", [*KINDS, "unknown"])
@pytest.mark.parametrize("shown", ["none", "another", "two"])
async def test_no_kind_of_call_passes_without_it(kind: str, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    calls: list[str] = []
    secrets = {"none": [], "another": [THEIRS.secret], "two": [OURS.secret, THEIRS.secret]}[shown]
    metadata = tuple((SECRET_HEADER, secret.reveal().encode()) for secret in secrets)
    async with echo_server(create_internal_server(OURS), calls) as address:
        with pytest.raises(grpc.RpcError) as refused:
            await asyncio.to_thread(blocking_call, address, kind, metadata)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "start every process of a cluster with the same secret" in refused.value.details()
    assert calls == []
    assert "refused a call of ipv4:127.0.0.1" in caplog.text
    for secret in (OURS.secret, THEIRS.secret):
        assert secret.reveal() not in caplog.text + refused.value.details() + repr(refused.value)


async def test_a_stream_that_never_says_a_word_is_refused_at_once() -> None:
    async with echo_server(create_internal_server(OURS), []) as address, create_channel(address) as channel:
        stream = channel.stream_stream("/Echo/stream_stream")()
        async with asyncio.timeout(10):
            assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED


# ---- TLS ----


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("tls") / "theirs")


def trust_of(authority: Authority, name: str, **names: str) -> Trust:
    return Trust(OURS.secret, Certificates.load(authority.issue(name, **names)))


async def test_processes_of_one_authority_speak_mutual_tls(authority: Authority) -> None:
    worker, router = trust_of(authority, "worker"), trust_of(authority, "router")
    server = echo_server(create_internal_server(worker), [], worker.certificates)
    async with server as address, create_internal_channel(address, router) as channel:
        assert await call(channel, "stream_stream") == b"hello"


async def test_pods_may_share_a_name_instead_of_an_address(authority: Authority) -> None:
    worker = trust_of(authority, "pod", alt_name="DNS:tandem.internal")
    assert worker.certificates is not None
    named = replace(worker, certificates=replace(worker.certificates, server_name="tandem.internal"))
    async with echo_server(create_internal_server(worker), [], worker.certificates) as address:
        async with create_internal_channel(address, named) as channel:
            assert await call(channel, "unary_unary") == b"hello"
        assert await refusal(create_internal_channel(address, worker)) is grpc.StatusCode.UNAVAILABLE


async def test_without_a_certificate_of_the_authority_no_call_arrives(authority: Authority, stranger: Authority) -> None:
    worker = trust_of(authority, "worker")
    assert worker.certificates is not None
    calls: list[str] = []
    foreign = trust_of(stranger, "router")
    assert foreign.certificates is not None
    async with echo_server(create_internal_server(worker), calls, worker.certificates) as address:
        for certificates in (
            None,  # no TLS at all
            Certificates(ca=worker.certificates.ca),  # no certificate of its own
            replace(foreign.certificates, ca=worker.certificates.ca),  # one of another authority
            foreign.certificates,  # … which does not know the server's either
        ):
            channel = create_internal_channel(address, Trust(OURS.secret, certificates))
            assert await refusal(channel) is grpc.StatusCode.UNAVAILABLE
    assert calls == []


async def test_tls_does_not_replace_the_secret(authority: Authority) -> None:
    worker = trust_of(authority, "worker")
    async with echo_server(create_internal_server(worker), [], worker.certificates) as address:
        assert await refusal(create_channel(address, certificates=worker.certificates)) is grpc.StatusCode.UNAUTHENTICATED


async def test_the_port_for_clients_may_speak_tls_without_asking_for_certificates(authority: Authority) -> None:
    tls = authority.issue("public")
    public = Certificates.load(replace(tls, ca_file=""))
    async with echo_server(create_server(), [], public) as address:
        async with create_channel(address, certificates=Certificates.load(replace(tls, cert_file="", key_file=""))) as channel:
            assert await call(channel, "unary_stream") == b"hello"
        assert await refusal(create_channel(address)) is grpc.StatusCode.UNAVAILABLE
    async with echo_server(create_server(), [], Certificates.load(tls)) as address:
        client = create_channel(address, certificates=Certificates.load(replace(tls, cert_file="", key_file="")))
        assert await refusal(client) is grpc.StatusCode.UNAVAILABLE


async def refusal(channel: grpc.aio.Channel) -> grpc.StatusCode:
    async with channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel, "unary_unary")
    return refused.value.code()

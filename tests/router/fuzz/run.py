"""Random requests against a router process, through every door; what must not happen is a problem, told with its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
import httpx2
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tandem.rpc import create_channel
from tandem.v1 import inference_pb2, kserve_pb2, operations_pb2
from tests.router.fuzz.bodies import GOOD_CHAT, GOOD_COMPLETION, json_body, proto_body, some_bytes, some_text
from tests.router.process import RouterProcess, router_process

__all__ = ["Findings", "Plan", "fuzz"]

_METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for file in (inference_pb2, kserve_pb2, operations_pb2, health_pb2, reflection_pb2)
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
# They carry most of what can go wrong.
_FAVOURITES = tuple(method for method in _METHODS if method.name in ("Generate", "ModelInfer", "ModelStreamInfer"))
_PATHS = (
    *("/", "/page.js", "/v1/models", "/v1/models/bytes", "/v1/models/%ff/x"),
    *("/status", "/metrics", "/healthz", "/readyz", "/no"),
)
_POSTS = (("/v1/completions", GOOD_COMPLETION), ("/v1/chat/completions", GOOD_CHAT))
_FORBIDDEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
# What the client's library itself says when the call has ended before all its messages were written.
_CLIENTS_OWN = "Internal error from Core"
_CALL_S = 20.0
_WATCH_S = 0.05
_SETTLE_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """seconds: of sending. at_once: clients. The router may grow by `most_growth_mib` after its first fifth."""

    seconds: float
    seed: int
    at_once: int = 8
    most_growth_mib: float = 64.0


@dataclass(slots=True)
class Findings:
    """answers: how often each status came, by door. problems: what must not happen, with what was sent."""

    answers: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory_mib: tuple[float, float] = (0.0, 0.0)

    def note(self, door: str, status: object) -> None:
        self.answers[f"{door} {status}"] += 1

    def table(self) -> str:
        lines = [f"{number:7d}  {name}" for name, number in sorted(self.answers.items())]
        return "\n".join([*lines, "memory {:.0f} → {:.0f} MiB".format(*self.memory_mib)])


async def fuzz(plan: Plan, folder: Path) -> Findings:
    findings = Findings()
    settings = {"client_timeout_s": 2.0, "queue_wait_s": 5.0}
    async with router_process(folder, settings=settings, max_context_tokens=512, slots=64) as router:
        async with (
            create_channel(router.address) as channel,
            httpx2.AsyncClient(base_url=router.url, timeout=_CALL_S) as client,
        ):
            end_s = time.monotonic() + plan.seconds
            sending = [
                asyncio.create_task(_Client(random.Random(f"{plan.seed}-{i}"), channel, client, router, findings).run(end_s))
                for i in range(plan.at_once)
            ]
            await asyncio.sleep(plan.seconds / 5)
            begin_mib = router.memory_mib
            await asyncio.gather(*sending)
            findings.memory_mib = begin_mib, router.memory_mib
            await _look_for_leaks(router, client, findings)
        if router.memory_mib - begin_mib > plan.most_growth_mib:
            findings.problems.append(f"memory grew from {begin_mib:.0f} to {router.memory_mib:.0f} MiB")
    for line in router.log.splitlines():
        if "Traceback" in line or " ERROR " in line or " CRITICAL " in line:
            findings.problems.append(f"the log says: {line}")
    if findings.problems:
        findings.problems.append(router.log[-4000:])
    return findings


async def _look_for_leaks(router: RouterProcess, client: httpx2.AsyncClient, findings: Findings) -> None:
    until_s = time.monotonic() + _SETTLE_S
    while held := await router.in_flight(client):
        if time.monotonic() > until_s:
            findings.problems.append(f"requests are still held: {dict(held)}")
            return
        await asyncio.sleep(0.1)


@dataclass(slots=True)
class _Client:
    rng: random.Random
    channel: grpc.aio.Channel
    http: httpx2.AsyncClient
    router: RouterProcess
    findings: Findings

    async def run(self, end_s: float) -> None:
        ways: tuple[Callable[[], object], ...] = (self._post, self._post, self._post, self._get, self._raw, *[self._call] * 5)
        while time.monotonic() < end_s:
            await self.rng.choice(ways)()  # type: ignore[misc]

    async def _post(self) -> None:
        path, good = self.rng.choice(_POSTS)
        body = json_body(self.rng, good) if self.rng.random() < 0.95 else some_bytes(self.rng)
        leaves_early = self.rng.random() < 0.1
        headers = self._headers()
        status: object = "left"
        try:
            async with self.http.stream("POST", path, content=body, headers=headers) as reply:
                if not leaves_early:
                    status = reply.status_code
                    text = await reply.aread()
                    if b'"server_error"' in text:
                        status = 500
        except httpx2.HTTPError as error:
            status = type(error).__name__
        self._judge_http(f"POST {path}", status, body)

    async def _get(self) -> None:
        path, method = self.rng.choice(_PATHS), self.rng.choice(("GET", "GET", "HEAD", "POST", "PUT", "OPTIONS", "X"))
        try:
            status: object = (await self.http.request(method, path, headers=self._headers())).status_code
        except httpx2.HTTPError as error:
            status = type(error).__name__
        self._judge_http(f"{method} {path}", status, b"")

    def _judge_http(self, door: str, status: object, body: bytes) -> None:
        self.findings.note(door, status)
        if isinstance(status, str) and status != "left":
            self.findings.problems.append(f"{door}: no answer ({status}) to {body!r}")
        elif isinstance(status, int) and status >= 500 and status not in (503, 504):
            self.findings.problems.append(f"{door}: {status} to {body!r}")

    async def _raw(self) -> None:
        """Bytes that may be no HTTP at all, on a connection of its own, which is then left in some way."""
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        body = json_body(self.rng, GOOD_COMPLETION)
        sent = self.rng.choice(
            (
                some_bytes(self.rng),
                head + some_bytes(self.rng) + b"\r\n\r\n",
                head + b"content-length: %d\r\n\r\n" % self.rng.choice((0, 1, len(body), 10**9)) + body,
                head + b"transfer-encoding: chunked\r\n\r\n" + some_bytes(self.rng),
                (head + b"content-length: %d\r\n\r\n" % len(body) + body) * 3,
            )
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.http)
        with contextlib.suppress(OSError):
            writer.write(sent)
            if self.rng.random() < 0.5:
                writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.choice((0.0, 0.05, 0.2))):
                    line = await reader.readline()
                    self.findings.note("raw HTTP", line.split(b" ")[1].decode() if line.count(b" ") > 1 else "closed")
                    if b" 500 " in line:
                        self.findings.problems.append(f"raw HTTP: {line!r} to {sent!r}")
        if self.rng.random() < 0.3:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    async def _call(self) -> None:
        method = self.rng.choice(_FAVOURITES if self.rng.random() < 0.8 else _METHODS)
        path = f"/{method.containing_service.full_name}/{method.name}"
        bodies = [proto_body(self.rng, _input(method)) for _ in range(self.rng.randrange(4))]
        if not method.client_streaming:
            bodies = bodies[:1] if self.rng.random() < 0.95 else bodies
        metadata = tuple((key, value.decode("latin-1")) for key, value in self._headers() if value.isascii())
        wait_s = _WATCH_S if method.name == "Watch" else _CALL_S
        call = self.channel.stream_stream(path)(iter(bodies), timeout=wait_s, metadata=metadata)
        leaves_early = self.rng.random() < 0.1
        try:
            async for response in call:
                if b"internal error" in response:
                    self.findings.problems.append(f"{path}: {response!r} to {bodies!r}")
                if leaves_early:
                    call.cancel()
            code = await call.code()
        except grpc.aio.AioRpcError as error:
            code = error.code()
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
        details = await call.details()
        if len(bodies) > 1 and details == _CLIENTS_OWN:
            code = grpc.StatusCode.CANCELLED
        self.findings.note(method.name, code.name)
        if code in _FORBIDDEN:
            self.findings.problems.append(f"{path}: {code.name} ({details}) to {bodies!r}")

    def _headers(self) -> list[tuple[str, bytes]]:
        if self.rng.random() < 0.8:
            return []
        text = some_text(self.rng).encode() if self.rng.random() < 0.5 else some_bytes(self.rng, 150)
        return [("x-request-id", bytes(byte for byte in text if byte >= 0x20 and byte != 0x7F).strip())]


def _input(method: MethodDescriptor) -> Descriptor:
    return method.input_type

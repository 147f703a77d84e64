"""A prefill and a decode worker in processes of their own, without Ray or router: what a hand-off costs, and nothing else.

The caller plays the router: it holds one session with each worker and sees their events.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from tandem.config import TrustConfig, WorkerConfig
from tandem.config_json import dump, load
from tandem.request import Request
from tandem.rpc import create_internal_channel
from tandem.secret import Secret
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from tandem.wire import request_to_wire

__all__ = ["Outcome", "WorkerPair", "worker_pair"]

_ROUTER_ID = "bench"


@dataclass(slots=True)
class Outcome:
    """What both workers said of one request. started_s, first_token_s, token_s: when the word came that it had begun, of the
    first token, and of each later one, on the monotonic clock."""

    first_token: pb.FirstToken | None = None
    started_s: float = 0.0
    first_token_s: float = 0.0
    token_s: list[float] = field(default_factory=list)
    handoff: pb.HandoffSent | None = None
    ready: pb.SequenceReady | None = None
    tokens: tuple[int, ...] = ()
    ended: bool = False
    failed: pb.AttemptFailed | None = None
    is_local: bool = False


class WorkerPair:
    def __init__(self, prefill: pb.WorkerDescription, decode: pb.WorkerDescription, trust: Trust) -> None:
        self._trust = trust
        self.prefill = prefill
        self.decode = decode
        self._commands: asyncio.Queue[pb.PrefillCommand] = asyncio.Queue()
        self._decode_commands: asyncio.Queue[pb.DecodeCommand] = asyncio.Queue()
        self._outcomes: dict[str, Outcome] = {}
        self._finished: dict[str, asyncio.Event] = {}
        self._opened = asyncio.Semaphore(0)
        self._heard = asyncio.Event()

    async def generate(self, request: Request) -> Outcome:
        return await self.start(request)[1]

    def start(self, request: Request, *, is_local: bool = False) -> tuple[Outcome, asyncio.Task[Outcome]]:
        """The outcome fills while the request is served; the task ends with it. is_local: the decode worker computes the
        prompt."""
        outcome = self._outcomes[request.request_id] = Outcome(is_local=is_local)
        finished = self._finished[request.request_id] = asyncio.Event()
        wire = request_to_wire(request, 1, _ROUTER_ID)
        if is_local:
            self._decode_commands.put_nowait(pb.DecodeCommand(prefill=wire))
        else:
            task = pb.PrefillTask(request=wire, decode_worker_id=self.decode.worker_id)
            self._commands.put_nowait(pb.PrefillCommand(task=task))

        async def until_finished() -> Outcome:
            await finished.wait()
            return outcome

        return outcome, asyncio.create_task(until_finished())

    async def until(self, condition: Callable[[], bool]) -> None:
        """Looked at after each message of a worker."""
        while not condition():
            self._heard.clear()
            await self._heard.wait()

    async def opened(self) -> None:
        for _ in range(2):
            await self._opened.acquire()

    async def watch_prefill(self) -> None:
        async with create_internal_channel(self.prefill.address, self._trust) as channel:
            async for events in pb_grpc.PrefillWorkerStub(channel).Session(self._prefill_commands()):
                self._opened.release()
                self._hear_of_prefill(events)
                for event in events.handoffs:
                    self._outcomes[event.request_id].handoff = event
                    self._settle(event.request_id)
                for event in events.failed:
                    self._fail(event)
                self._heard.set()

    async def watch_decode(self) -> None:
        async with create_internal_channel(self.decode.address, self._trust) as channel:
            async for events in pb_grpc.DecodeWorkerStub(channel).Session(self._commands_to_decode()):
                self._opened.release()
                self._hear_of_prefill(events)
                for event in events.ready:
                    self._outcomes[event.request_id].ready = event
                for event in events.tokens:
                    outcome = self._outcomes[event.request_id]
                    outcome.tokens += tuple(event.tokens)
                    outcome.token_s += [time.monotonic()] * len(event.tokens)
                    if event.finish_reason:
                        outcome.ended = True
                        self._settle(event.request_id)
                for event in events.failed:
                    self._fail(event)
                self._heard.set()

    def _hear_of_prefill(self, events: pb.PrefillEvents | pb.DecodeEvents) -> None:
        for event in events.started:
            self._outcomes[event.request_id].started_s = time.monotonic()
        for first in events.first_tokens:
            self._outcomes[first.request_id].first_token = first
            self._outcomes[first.request_id].first_token_s = time.monotonic()
            self._settle(first.request_id)

    async def _commands_to_decode(self) -> AsyncIterator[pb.DecodeCommand]:
        yield pb.DecodeCommand(hello=_ROUTER_ID)
        while True:
            yield await self._decode_commands.get()

    async def _prefill_commands(self) -> AsyncIterator[pb.PrefillCommand]:
        yield pb.PrefillCommand(hello=_ROUTER_ID)
        while True:
            yield await self._commands.get()

    def _settle(self, request_id: str) -> None:
        outcome = self._outcomes[request_id]
        if outcome.first_token and (outcome.handoff or outcome.is_local) and outcome.ended:
            self._finished[request_id].set()

    def _fail(self, event: pb.AttemptFailed) -> None:
        self._outcomes[event.request_id].failed = event
        self._finished[event.request_id].set()


@asynccontextmanager
async def worker_pair(
    config: WorkerConfig, prefill_overrides: dict[str, Any] | None = None, cores: tuple[int, int] | None = None
) -> AsyncIterator[WorkerPair]:
    """Start both processes, pair them, open the sessions; stop all at the end.

    cores: the prefill worker keeps to the first, the decode worker to the second.
    """
    config = replace(config, trust=TrustConfig(Secret.make()))
    prefill_end, prefill = _spawn("prefill", replace(config, **(prefill_overrides or {})), cores[0] if cores else None)
    decode_end, decode = _spawn("decode", config, cores[1] if cores else None)
    try:
        prefill_description = pb.WorkerDescription.FromString(await asyncio.to_thread(prefill_end.recv_bytes))
        decode_description = pb.WorkerDescription.FromString(await asyncio.to_thread(decode_end.recv_bytes))
        prefill_end.send_bytes(decode_description.SerializeToString())
        refused = await asyncio.to_thread(prefill_end.recv_bytes)
        if refused:
            raise RuntimeError(refused.decode())
        pair = WorkerPair(prefill_description, decode_description, Trust.load(config.trust))
        watchers = [asyncio.create_task(pair.watch_prefill()), asyncio.create_task(pair.watch_decode())]
        await pair.opened()
        yield pair
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
    finally:
        for end, process in ((prefill_end, prefill), (decode_end, decode)):
            end.close()
            process.join(timeout=10)
            process.kill()


def _spawn(role: str, config: WorkerConfig, core: int | None) -> tuple[Connection, multiprocessing.process.BaseProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(role, dump(config, with_secrets=True), core, theirs), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _serve(role: str, config_json: str, core: int | None, parent: Connection) -> None:
    if core is not None:  # before anything starts a thread
        os.sched_setaffinity(0, {core})
    from tandem.worker_process import prepare_process

    prepare_process(f"{role}-{os.getpid()}")
    asyncio.run(_serve_async(role, load(WorkerConfig, config_json), parent))


async def _serve_async(role: str, config: WorkerConfig, parent: Connection) -> None:
    from decode_worker.host import DecodeHost
    from prefill_worker.host import PrefillHost
    from transfer.nixl_agent import NixlAgent

    worker_id = f"{role}-{os.getpid()}"
    if role == "decode":
        decode = await DecodeHost.start(worker_id, config, NixlAgent)
        parent.send_bytes(decode.worker.description.SerializeToString())
        await asyncio.to_thread(_until_closed, parent)
        await decode.stop()
        return
    prefill = await PrefillHost.start(worker_id, config, NixlAgent)
    parent.send_bytes(prefill.worker.description.SerializeToString())
    peer = pb.WorkerDescription.FromString(await asyncio.to_thread(parent.recv_bytes))
    refused = await prefill.worker.connect([peer])
    parent.send_bytes("; ".join(reason for _, reason in refused).encode())
    await asyncio.to_thread(_until_closed, parent)
    await prefill.stop()


def _until_closed(parent: Connection) -> None:
    try:
        parent.recv_bytes()
    except EOFError:
        return

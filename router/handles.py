"""Workers over gRPC: one long session per worker, commands out, events of many requests in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator

import grpc
import grpc.aio

from router.events import AttemptEvent, AttemptKey, Failed, FirstToken, PrefillStarted, Ready, Standing, Tokens
from router.prefixes import PrefixEntry
from router.worker import PREFILL, Sink, Subscriptions, WorkerInfo, WorkerLoad
from tandem.measures import Measures
from tandem.patience import Patience
from tandem.request import FinishReason, Request
from tandem.rpc import create_internal_channel
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc
from tandem.wire import logprobs_from_wire, request_to_wire, series_from_wire

__all__ = ["GrpcWorkerHandle", "events_of", "load_of"]

log = logging.getLogger(__name__)

# Workers speak at least once a second, idle or not.
SILENCE_S = 3.0
_BACKOFF_S = 0.1
_BACKOFF_MAX_S = 2.0

Command = pb.PrefillCommand | pb.DecodeCommand
Events = pb.PrefillEvents | pb.DecodeEvents


class GrpcWorkerHandle:
    """Connects, and after a loss again, from construction until `close`. Made on the running event loop.

    A session that breaks, or is silent for `silence_s`, fails every attempt at the worker; the worker itself drops the attempts
    of a session that ended. on_change: called when the load changes, or the connection. measures: what the worker measures is
    added there.
    """

    def __init__(
        self,
        info: WorkerInfo,
        router_id: str,
        trust: Trust,
        on_change: Callable[[], None],
        silence_s: float = SILENCE_S,
        measures: Measures | None = None,
    ) -> None:
        self.info = info
        self.load: WorkerLoad | None = None
        self._router_id = router_id
        self._on_change = on_change
        self._silence_s = silence_s
        self._measures = measures or Measures()
        self._make_command = pb.PrefillCommand if info.role == PREFILL else pb.DecodeCommand
        self._subscriptions = Subscriptions(info.id)
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._channel = create_internal_channel(info.address, trust)
        self._task = asyncio.create_task(self._keep_connected(), name=f"session with {info.id}")

    def subscribe(self, key: AttemptKey, sink: Sink) -> None:
        self._subscriptions.add(key, sink)

    def unsubscribe(self, key: AttemptKey) -> None:
        self._subscriptions.remove(key)

    def submit(self, request: Request, attempt: int, decode_worker_id: str) -> None:
        wire = request_to_wire(request, attempt, self._router_id)
        if self.info.role == PREFILL:
            task = pb.PrefillTask(request=wire, decode_worker_id=decode_worker_id)
            self._commands.put_nowait(pb.PrefillCommand(task=task))
        else:
            self._commands.put_nowait(pb.DecodeCommand(prefill=wire))

    def absorb(self, request: Request) -> None:
        self._commands.put_nowait(pb.PrefillCommand(absorb=request_to_wire(request, 1, self._router_id)))

    def ask(self, key: AttemptKey) -> None:
        request_id, attempt = key
        self._commands.put_nowait(self._make_command(ask=pb.Ask(request_id=request_id, attempt=attempt)))

    def cancel(self, key: AttemptKey) -> None:
        request_id, attempt = key
        self._commands.put_nowait(self._make_command(cancel=pb.Cancel(request_id=request_id, attempt=attempt)))

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._lose("the worker left the cluster")
        await self._channel.close()

    async def _keep_connected(self) -> None:
        backoff_s = _BACKOFF_S
        while True:
            try:
                reason = await self._session()
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    log.error("worker %s refuses this router: %s", self.info.id, reason)
                    backoff_s = _BACKOFF_MAX_S
            except TimeoutError:
                reason = f"silent for {self._silence_s:g} s"
            except Exception as error:
                log.exception("the session with worker %s ended by a bug", self.info.id)
                reason = f"internal error: {error}"
            if self.load is not None:
                if self.load.leaving:
                    log.info("worker %s has left: %s", self.info.id, reason)
                else:
                    log.warning("worker %s is lost: %s", self.info.id, reason)
                backoff_s = _BACKOFF_S
            self._lose(reason)
            await asyncio.sleep(backoff_s)
            backoff_s = min(_BACKOFF_MAX_S, backoff_s * 2)

    async def _session(self) -> str:
        """One session, from hello to its end; returns why it ended when the worker ended it in order.

        Raises:
            TimeoutError: nothing came for too long. AioRpcError: the stream broke.
        """
        self._commands = asyncio.Queue()
        self._commands.put_nowait(self._make_command(hello=self._router_id))
        stub = pb_grpc.PrefillWorkerStub if self.info.role == PREFILL else pb_grpc.DecodeWorkerStub
        call = stub(self._channel).Session()
        writing = asyncio.create_task(self._write(call))
        try:
            async with Patience(self._silence_s) as patience:
                while (message := await call.read()) is not grpc.aio.EOF:
                    patience.heard()
                    if self.load is None:
                        self._subscriptions.restore()
                        log.info("worker %s (%s, %s) is connected", self.info.id, self.info.role, self.info.address)
                    self._dispatch(message)
        finally:
            call.cancel()
            writing.cancel()
            await asyncio.wait([writing])
        return "the worker ended the session"

    async def _write(self, call: grpc.aio.StreamStreamCall[Command, Events]) -> None:
        # When the stream breaks the reader says why; here it is enough to stop.
        with contextlib.suppress(grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            commands = self._commands
            while True:
                await call.write(await commands.get())

    def _dispatch(self, message: Events) -> None:
        for key, event in events_of(message, self.info.id):
            self._subscriptions.deliver(key, event)
        if message.HasField("load"):
            self.load = load_of(message.load, self.load)
            self._measures.merge(map(series_from_wire, message.load.measured))
            self._on_change()
        elif self.load is None:
            self.load = WorkerLoad()
            self._on_change()

    def _lose(self, reason: str) -> None:
        was_up, self.load = self.load is not None, None
        self._subscriptions.lose(reason)
        if was_up:
            self._on_change()


def events_of(message: Events, worker_id: str) -> Iterator[tuple[AttemptKey, AttemptEvent]]:
    """What a worker's message says about which attempt, in an order that is safe: beginnings, tokens, failures."""
    for started in message.started:
        yield (started.request_id, started.attempt), PrefillStarted()
    for first in message.first_tokens:
        yield (first.request_id, first.attempt), _first_token(first)
    if isinstance(message, pb.DecodeEvents):
        for ready in message.ready:
            yield (ready.request_id, ready.attempt), Ready(ready.handoff_exposed_seconds)
        for some in message.tokens:
            told = tuple(map(logprobs_from_wire, some.logprobs))
            yield (some.request_id, some.attempt), Tokens(some.index, tuple(some.tokens), _reason(some.finish_reason), told)
    for failed in message.failed:
        yield (failed.request_id, failed.attempt), Failed(worker_id, failed.kind, failed.reason, failed.retryable)
    for standing in message.standings:  # last: what a task did before it was asked for comes first
        yield (standing.request_id, standing.attempt), Standing(standing.known)


def _first_token(first: pb.FirstToken) -> FirstToken:
    return FirstToken(
        index=first.index,
        token=first.token,
        finish_reason=_reason(first.finish_reason),
        prefill_s=first.prefill_seconds,
        logprobs=logprobs_from_wire(first.logprobs) if first.HasField("logprobs") else None,
        prompt_logprobs=tuple(map(logprobs_from_wire, first.prompt_logprobs)),
        cached_tokens=first.cached_tokens,
    )


def load_of(load: pb.WorkerLoad, before: WorkerLoad | None = None) -> WorkerLoad:
    """before: what was known; prefixes are told when they change."""
    known = before.prefixes if before else ()
    return WorkerLoad(
        prefixes=_prefixes(load.prefixes) if load.HasField("prefixes") else known,
        queue=load.queue,
        queue_tokens=load.queue_tokens,
        running=load.running,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_total=load.kv_blocks_total,
        state_slots_used=load.state_slots_used,
        state_slots_total=load.state_slots_total,
        leases=dict(load.leases),
        lease_ages=dict(load.lease_ages),
        pool_mismatches=load.pool_mismatches,
        step_s=load.step_seconds,
        transport=load.transport,
        leaving=load.leaving,
        wasted_chunks=load.wasted_chunks,
        worst_wasted_chunks=load.worst_wasted_chunks,
        kv_blocks_counted=load.kv_blocks_counted,
        overcommit=max(1.0, load.overcommit),
        batch_share=load.batch_share if load.HasField("batch_share") else 1.0,
        evictions=dict(load.evictions),
        token_s=load.token_seconds,
        reserve_s=load.reserve_seconds,
        step_tokens=load.step_tokens,
        local_prefill_tokens=load.local_prefill_tokens,
        local_prefill_share=load.local_prefill_share or 1.0,
    )


def _prefixes(index: pb.PrefixIndex) -> tuple[PrefixEntry, ...]:
    rows = zip(index.names, index.num_tokens, index.parents, strict=False)
    return tuple(PrefixEntry(name, num_tokens, parent or None) for name, num_tokens, parent in rows)


def _reason(value: str) -> FinishReason | None:
    """An end that this release does not know is still an end."""
    if not value:
        return None
    try:
        return FinishReason(value)
    except ValueError:
        log.error("unknown finish reason %r; taken as length", value)
        return FinishReason.LENGTH

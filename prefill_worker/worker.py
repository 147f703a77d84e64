"""One prefill worker, whole, without the server around it: step loop, sender, peers, sessions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from prefill_worker.inbox import AbsorbAnswer, AskTask, CancelTask, Drain, HandOver, RouterGone, Stop
from prefill_worker.loop import PrefillLoop
from prefill_worker.pairing import Ourselves
from prefill_worker.peers import DecodePeers
from prefill_worker.prompt import LocalMemory, PrefillTask
from tandem.clock import MonotonicClock
from tandem.config import WorkerConfig
from tandem.description import describe
from tandem.engine import Engine
from tandem.errors import InvalidRequest, PeerRefused
from tandem.mailbox import SessionHub
from tandem.measures import Measures
from tandem.metrics import MEASURED, POOLS
from tandem.session import serve_session
from tandem.step_thread import step_thread
from tandem.tracing import NO_TRACER, Tracer
from tandem.trust import Trust
from tandem.v1 import worker_pb2 as pb
from tandem.waiting import QUIET_S, wait_until
from tandem.wire import failure_to_wire, request_from_wire
from transfer.agent import TransferAgent
from transfer.handoff import Handoff, LeaseGrant, WriterIdentity
from transfer.layout import CacheLayout, group_tensors
from transfer.sender import Sender

__all__ = ["PrefillWorker"]

logger = logging.getLogger(__name__)


class PrefillWorker:
    """Made on the event loop that will serve its sessions. The step loop and the sender have a thread each."""

    def __init__(
        self,
        worker_id: str,
        config: WorkerConfig,
        engine: Engine,
        agent: TransferAgent,
        trust: Trust,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.worker_id = worker_id
        self.description = pb.WorkerDescription()
        self._hide_metrics: Callable[[], object] = lambda: None
        self.engine = engine
        self.agent = agent
        self._clock = MonotonicClock()
        self._drain_s = config.drain_s
        self._leaving = False
        layout = CacheLayout.of(engine.memory)
        agent.register(group_tensors(engine.memory), layout)
        self._hub: SessionHub[pb.PrefillEvents] = SessionHub(pb.PrefillEvents)
        identity = WriterIdentity(writer_id=worker_id, fingerprint=engine.loaded.fingerprint)
        self._layout = layout
        self._trust = trust
        self._sender = Sender(
            *(agent, engine.memory, layout, identity, config.transfer, self._clock),
            on_broken=lambda peer_id, reason: self._peers.broken(peer_id, reason),
        )
        self._peers = DecodePeers(
            sender=self._sender,
            loop=asyncio.get_running_loop(),
            deliver=lambda ended: self._loop.inbox.put(ended),
            patience_s=config.prefill.reserve_patience_s,
        )
        self._loop = PrefillLoop(engine, config.prefill, self, self, self._hub, self._clock, tracer)
        self._thread = step_thread(self._loop.run, "prefill-steps")

    def start(self, address: str, metrics_address: str = "") -> None:
        """Begin to serve. address: of the internal gRPC server. metrics_address: of its own metrics, if there are any."""
        self.description = describe(self.worker_id, "prefill", address, self.agent.transport, self.engine)
        self.description.metrics_address = metrics_address
        self._sender.start()
        self._thread.start()
        hide_pools, hide_measured = POOLS.add(lambda: [("prefill", self.load())]), MEASURED.add(self.measures)
        self._hide_metrics = lambda: (hide_pools(), hide_measured())

    async def drain(self, drain_s: float | None = None) -> None:
        """Take nothing more; return when every prompt has been handed off. After `drain_s` (None: as configured) what is
        left is handed over: its routers place it again."""
        self._leaving = True
        self._hub.wake()
        self._loop.inbox.put(Drain())
        if not await wait_until(self._holds_nothing, self._drain_s if drain_s is None else drain_s):
            logger.warning("prompts are handed over: %s", self._loop.load())
            self._loop.inbox.put(HandOver())
            await wait_until(self._holds_nothing, QUIET_S)

    def _holds_nothing(self) -> bool:
        load = self._loop.load()
        return not (load.queue or load.running or load.kv_blocks_used)

    async def stop(self) -> None:
        self._hide_metrics()
        self._loop.inbox.put(Stop())
        await asyncio.to_thread(self._thread.join, 10)
        await self._peers.close()
        self._sender.stop()
        self.agent.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._sender.alive

    @property
    def measures(self) -> Measures:
        return self._loop.measures

    def load(self) -> pb.WorkerLoad:
        load = self._loop.load()
        load.transport = self.agent.transport
        load.leaving = self._leaving
        return load

    def pool_mismatches(self) -> list[str]:
        """Blocks and slots that an idle worker still holds; empty when all is well."""
        return self._loop.pool_mismatches()

    # ---- decode workers ----

    async def connect(self, peers: Sequence[pb.WorkerDescription]) -> list[tuple[str, str]]:
        """Pair with each. Returns the refused ones with their reasons. One that does not answer is not refused: its
        connection goes on being made."""
        ourselves = Ourselves(self.description, self.agent.metadata, self._layout, self._sender, self._trust)
        outcomes = await asyncio.gather(*(self._peers.pair(ourselves, peer) for peer in peers), return_exceptions=True)
        refused = []
        for peer, outcome in zip(peers, outcomes, strict=True):
            if isinstance(outcome, PeerRefused):
                refused.append((peer.worker_id, str(outcome)))
            elif outcome is not None:
                raise outcome
        return refused

    async def disconnect(self, worker_id: str) -> None:
        """The decode worker's process is gone."""
        await self._peers.unpair(worker_id, dead=True)

    def unreachable_peers(self) -> dict[str, str]:
        """Decode workers to which no hand-off may begin now, with the reason; their connections are being made."""
        return self._peers.troubles()

    # ---- what the step loop asks for (ReservationClient, HandoffSource) ----

    def reserve(self, task: PrefillTask) -> None:
        self._peers.reserve(task, self.worker_id)

    def release(self, grant: LeaseGrant, reason: str, *, record_sent: bool = False) -> None:
        self._peers.release(grant, self.worker_id, reason, record_sent)

    def begin(self, task: PrefillTask, grant: LeaseGrant, memory: LocalMemory) -> Handoff:
        return self._sender.begin(
            grant,
            request_id=task.request.request_id,
            attempt=task.attempt,
            local_block_ids=memory.block_ids,
            local_slot=memory.slot,
        )

    # ---- routers ----

    def session(self, commands: AsyncIterator[pb.PrefillCommand]) -> AsyncIterator[pb.PrefillEvents]:
        return serve_session(self._hub, commands, self._command, self._router_gone, self.load, self.measures)

    def _command(self, router_id: str, command: pb.PrefillCommand) -> None:
        if command.HasField("task"):
            self._place(router_id, command.task)
        elif command.HasField("cancel"):
            key = (command.cancel.request_id, command.cancel.attempt)
            self._loop.waste.gone(key)
            self._loop.inbox.put(CancelTask(key))
            self._peers.withdraw(lambda task: task.key == key)

        elif command.HasField("absorb"):
            self._absorb(router_id, command.absorb)
        elif command.HasField("ask"):
            self._loop.inbox.put(AskTask((command.ask.request_id, command.ask.attempt), router_id))

    def _place(self, router_id: str, wire: pb.PrefillTask) -> None:
        model = self.description.model
        try:
            request = request_from_wire(wire.request, model.vocab_size, model.max_context_tokens)
        except InvalidRequest as error:
            failed = failure_to_wire(wire.request.request_id, wire.request.attempt, error)
            self._hub.post(router_id, pb.PrefillEvents(failed=[failed]))
            return
        self._loop.inbox.put(
            PrefillTask(
                request=request,
                attempt=wire.request.attempt,
                router_id=router_id,
                decode_worker_id=wire.decode_worker_id,
                received_s=self._clock.now(),
            )
        )

    def _absorb(self, router_id: str, wire: pb.WireRequest) -> None:
        model = self.description.model
        try:
            request = request_from_wire(wire, model.vocab_size, model.max_context_tokens)
        except InvalidRequest as error:
            logger.info("an answer is not absorbed: %s", error)
        else:
            self._loop.inbox.put(AbsorbAnswer(PrefillTask(request, wire.attempt, router_id, "", self._clock.now())))

    def _router_gone(self, router_id: str) -> None:
        self._loop.inbox.put(RouterGone(router_id))
        self._peers.withdraw(lambda task: task.router_id == router_id)

"""One decode worker, whole, without the server around it: leases, receiver, step loop, sessions."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable

from decode_worker.inbox import AskSequence, CancelSequence, ComputePrompt, HandOver, RouterGone, Stop
from decode_worker.local_prefill import require_place
from decode_worker.loop import DecodeLoop
from decode_worker.report import Reporter
from decode_worker.sequence import VerifiedSequence
from tandem.clock import MonotonicClock
from tandem.config import WorkerConfig
from tandem.description import check_same_model, describe
from tandem.engine import Engine
from tandem.errors import HandoffError, HandoffRefused, Leaving, TandemError
from tandem.mailbox import SessionHub
from tandem.measures import Measures
from tandem.metrics import MEASURED, POOLS
from tandem.session import serve_session
from tandem.step_thread import step_thread
from tandem.tracing import NO_TRACER, Tracer
from tandem.v1 import worker_pb2 as pb
from tandem.waiting import QUIET_S, wait_until
from tandem.wire import request_from_wire
from transfer.agent import TransferAgent
from transfer.layout import CacheLayout, group_tensors
from transfer.lease import Lease, LeaseTable
from transfer.lease_memory import AdmissionPolicy
from transfer.receiver import ReaderIdentity, Receiver
from transfer.record import HandoffRecord

__all__ = ["DecodeWorker"]

logger = logging.getLogger(__name__)


class DecodeWorker:
    """Public methods but `session` may be called from any thread; none of them waits for a step."""

    def __init__(
        self, worker_id: str, config: WorkerConfig, engine: Engine, agent: TransferAgent, tracer: Tracer = NO_TRACER
    ) -> None:
        self.worker_id = worker_id
        self.description = pb.WorkerDescription()
        self._hide_metrics: Callable[[], object] = lambda: None
        self.engine = engine
        self.agent = agent
        self._ttl_s = config.decode.lease_ttl_s
        self._drain_s = config.drain_s
        self._most_local_tokens = config.decode.local_prefill_tokens
        self._leaving = False
        self._layout = CacheLayout.of(engine.memory)
        agent.register(group_tensors(engine.memory), self._layout)
        self._hub: SessionHub[pb.DecodeEvents] = SessionHub(pb.DecodeEvents)
        self._report = Reporter(self._hub)
        clock = MonotonicClock()
        # Where answers are to be the same to the last bit, nothing of a tile that prefill could not fill is shared.
        whole_tokens = 1 if config.prefill.checkpoint_ends else engine.tile_tokens
        self._leases = LeaseTable(
            blocks=engine.blocks,
            slots=engine.slots,
            specs=engine.memory.specs,
            clock=clock,
            ttl_s=config.decode.lease_ttl_s,
            epoch=secrets.randbits(63),
            policy=AdmissionPolicy(
                config.decode.overcommit, config.decode.batch_share, config.decode.keep_prefixes, whole_tokens
            ),
            fingerprint=engine.loaded.fingerprint,
        )
        self._loop = DecodeLoop(engine, config.decode, self._leases, self._hub, clock, tracer)
        self._receiver = Receiver(
            agent=agent,
            memory=engine.memory,
            layout=self._layout,
            leases=self._leases,
            identity=ReaderIdentity(engine.loaded.fingerprint, engine.loaded.config.vocab_size),
            config=config.transfer,
            clock=clock,
            on_verified=self._on_verified,
            on_refused=self._on_refused,
        )
        self._thread = step_thread(self._loop.run, "decode-steps")

    def start(self, address: str, metrics_address: str = "") -> None:
        """Begin to serve. address: of the internal gRPC server. metrics_address: of its own metrics, if there are any."""
        self.description = describe(self.worker_id, "decode", address, self.agent.transport, self.engine)
        self.description.metrics_address = metrics_address
        self._receiver.start()
        self._thread.start()
        hide_pools, hide_measured = POOLS.add(lambda: [("decode", self.load())]), MEASURED.add(self.measures)
        self._hide_metrics = lambda: (hide_pools(), hide_measured())

    async def drain(self, drain_s: float | None = None) -> None:
        """Reserve nothing more; return when every lease has ended. After `drain_s` (None: as configured) what is left is
        handed over: its routers place it again, with the tokens that they have. On the event loop."""
        self._leaving = True
        self._hub.wake()
        if not await wait_until(lambda: not self._leases.all_live(), self._drain_s if drain_s is None else drain_s):
            logger.warning("%d leases are handed over", len(self._leases.all_live()))
            self._loop.inbox.put(HandOver())
            await wait_until(lambda: not self._leases.all_live(), QUIET_S)

    def stop(self) -> None:
        self._hide_metrics()
        self._loop.inbox.put(Stop())
        self._thread.join(timeout=10)
        self._receiver.stop()
        self.agent.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._receiver.alive

    @property
    def measures(self) -> Measures:
        return self._loop.measures

    def load(self) -> pb.WorkerLoad:
        load = self._loop.load()
        load.transport = self.agent.transport
        load.leaving = self._leaving
        return load

    def pool_mismatches(self) -> list[str]:
        """Blocks and slots that are neither free nor held by exactly one live lease; empty when all is well."""
        return self._leases.check()

    def refusals(self) -> dict[str, int]:
        """How often each field of a hand-off record was the reason for a refusal."""
        return dict(self._receiver.refused)

    # ---- prefill workers ----

    def pair(self, request: pb.PairRequest) -> pb.PairReply:
        """Raises: PeerRefused."""
        check_same_model(self.description.model, request.writer.model)
        self._layout.require_digest(request.layout_digest)
        regions = [
            pb.RegionGroupMessage(
                name=g.name, kind=g.kind, layer=g.layer, address=g.address, item_bytes=g.item_bytes, num_items=g.num_items
            )
            for g in self._layout.groups
        ]
        self._receiver.expect_peer()
        return pb.PairReply(
            reader=self.description, agent_metadata=self.agent.metadata, agent_name=self.agent.name, regions=regions
        )

    def reserve(self, request: pb.ReserveRequest) -> pb.ReserveReply:
        """Raises: NoRoom, InvalidRequest, Leaving, HandoffError (the router has no session here)."""
        self._require_staying()
        wire = request.request
        if not self._hub.is_open(wire.router_id):
            raise HandoffError(f"router {wire.router_id!r} has no session with decode worker {self.worker_id}")
        lease = self._reserve(wire, request.writer_id, may_share=request.skips_held_blocks)
        self._receiver.wake()
        return pb.ReserveReply(
            lease_id=lease.id,
            epoch=lease.epoch,
            block_ids=lease.block_ids,
            slot=lease.slot,
            expires_in_s=self._ttl_s,
            nonce=lease.nonce,
            num_held_blocks=lease.num_held,
        )

    def _reserve(self, wire: pb.WireRequest, writer_id: str, *, may_share: bool = False, is_local: bool = False) -> Lease:
        model = self.description.model
        return self._leases.reserve(
            request=request_from_wire(wire, model.vocab_size, model.max_context_tokens),
            attempt=wire.attempt,
            router_id=wire.router_id,
            writer_id=writer_id,
            may_share=may_share,
            is_local=is_local,
        )

    def _require_staying(self) -> None:
        if self._leaving:
            raise Leaving(f"decode worker {self.worker_id} is about to end")

    def writer_quiet(self, request: pb.ReleaseRequest) -> None:
        """Raises: LeaseLost."""
        if request.HasField("abandoned"):
            self._leases.abandon(request.abandoned.request_id, request.abandoned.attempt, request.writer_id)
            return
        logger.debug("writer %s is quiet on lease %s: %s", request.writer_id, request.lease_id, request.reason)
        self._leases.writer_quiet(request.lease_id, request.epoch, request.writer_id, record_sent=request.record_sent)

    def writer_dead(self, writer_id: str) -> None:
        """The prefill worker is gone and its connection is torn down: nothing writes any more."""
        for lease in self._leases.writer_dead(writer_id):
            self._report.failed(lease, HandoffError(f"prefill worker {writer_id} was lost before the hand-off was complete"))

    # ---- routers ----

    def session(self, commands: AsyncIterator[pb.DecodeCommand]) -> AsyncIterator[pb.DecodeEvents]:
        return serve_session(self._hub, commands, self._command, self._router_gone, self.load, self.measures)

    def _command(self, router_id: str, command: pb.DecodeCommand) -> None:
        if command.HasField("cancel"):
            self._loop.inbox.put(CancelSequence((command.cancel.request_id, command.cancel.attempt)))
        elif command.HasField("prefill"):
            self._place(router_id, command.prefill)
        elif command.HasField("ask"):
            self._loop.inbox.put(AskSequence((command.ask.request_id, command.ask.attempt), router_id))

    def _place(self, router_id: str, wire: pb.WireRequest) -> None:
        """A prompt that is to be computed here. Its memory is reserved now, or it is refused."""
        if self._leases.find(wire.request_id, wire.attempt) is not None:
            logger.warning("request %s attempt %d was placed here twice; the second is ignored", wire.request_id, wire.attempt)
            return
        wire.router_id = router_id
        try:
            self._require_staying()
            require_place(len(wire.prompt) + len(wire.generated), self._loop.local.num_waiting_tokens, self._most_local_tokens)
            lease = self._reserve(wire, self.worker_id, is_local=True)
        except TandemError as error:
            self._report.refused(router_id, wire.request_id, wire.attempt, error)
        else:
            self._loop.inbox.put(ComputePrompt(lease))

    def _router_gone(self, router_id: str) -> None:
        self._loop.inbox.put(RouterGone(tuple(self._leases.of_router(router_id))))

    # ---- receiver's thread ----

    def _on_verified(self, lease: Lease, record: HandoffRecord, exposed_s: float) -> None:
        self._loop.inbox.put(VerifiedSequence(lease, record.num_positions, record.first_token))
        self._report.ready(lease, exposed_s)

    def _on_refused(self, lease: Lease | None, error: HandoffRefused) -> None:
        logger.warning("%s", error)
        self.measures.add("handoffs_refused", 1, error.field)
        if lease is not None:
            self._report.failed(lease, error)

"""What a decode worker tells the routers, as messages of the internal proto."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decode_worker.sequence import RunningSequence
from tandem.errors import TandemError
from tandem.mailbox import SessionHub
from tandem.request import Drawn, FinishReason, TokenLogprobs
from tandem.v1 import worker_pb2 as pb
from tandem.wire import failure_to_wire, first_token_to_wire, logprobs_to_wire
from transfer.lease import Lease

__all__ = ["Reporter"]


@dataclass(frozen=True)
class Reporter:
    hub: SessionHub[pb.DecodeEvents]

    def ready(self, lease: Lease, handoff_exposed_s: float) -> None:
        event = pb.SequenceReady(
            request_id=lease.request.request_id, attempt=lease.attempt, handoff_exposed_seconds=handoff_exposed_s
        )
        self.hub.post(lease.router_id, pb.DecodeEvents(ready=[event]))

    def failed(self, lease: Lease, error: TandemError) -> None:
        self.refused(lease.router_id, lease.request.request_id, lease.attempt, error)

    def refused(self, router_id: str, request_id: str, attempt: int, error: TandemError) -> None:
        """Nothing was reserved for it."""
        self.hub.post(router_id, pb.DecodeEvents(failed=[failure_to_wire(request_id, attempt, error)]))

    def prefill_started(self, lease: Lease) -> None:
        event = pb.PrefillStarted(request_id=lease.request.request_id, attempt=lease.attempt)
        self.hub.post(lease.router_id, pb.DecodeEvents(started=[event]))

    def first_token(self, lease: Lease, drawn: Drawn, seconds: float, prompt_logprobs: Sequence[TokenLogprobs]) -> None:
        event = first_token_to_wire(lease.request, lease.attempt, drawn, seconds, 0, prompt_logprobs)
        self.hub.post(lease.router_id, pb.DecodeEvents(first_tokens=[event]))

    def standing(self, router_id: str, request_id: str, attempt: int, *, known: bool) -> None:
        event = pb.TaskStanding(request_id=request_id, attempt=attempt, known=known)
        self.hub.post(router_id, pb.DecodeEvents(standings=[event]))

    def step(self, sequences: Sequence[RunningSequence], finished: Mapping[str, FinishReason]) -> None:
        """The newest token of every sequence of a step: one message for each router. finished: by lease id."""
        by_router: defaultdict[str, list[pb.SequenceTokens]] = defaultdict(list)
        for sequence in sequences:
            lease = sequence.lease
            reason = finished.get(lease.id)
            event = pb.SequenceTokens(
                request_id=lease.request.request_id,
                attempt=lease.attempt,
                index=sequence.num_generated - 1,
                tokens=[sequence.last_token],
                finish_reason=reason.value if reason else "",
                logprobs=[logprobs_to_wire(sequence.last_logprobs)] if sequence.last_logprobs else (),
            )
            by_router[lease.router_id].append(event)
        for router_id, events in by_router.items():
            self.hub.post(router_id, pb.DecodeEvents(tokens=events))

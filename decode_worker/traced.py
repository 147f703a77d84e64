"""The span of a request that its decode worker makes. See `tandem.tracing`."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.local_prefill import ComputedPrompt
from decode_worker.sequence import RunningSequence
from tandem.request import FinishReason
from tandem.tracing import NO_TRACER, Tracer
from transfer.lease_state import Lease, LeaseState

__all__ = ["DecodeTraces"]


@dataclass(frozen=True, slots=True)
class DecodeTraces:
    to: Tracer = NO_TRACER

    def computed(self, prompt: ComputedPrompt) -> None:
        """Its prompt was computed here."""
        lease = prompt.lease
        if not lease.request.trace:
            return
        reserved_s = lease.history[0].at_s
        attributes: dict[str, str | int | float | bool] = {
            "tandem.request_id": lease.request.request_id,
            "tandem.attempt": lease.attempt,
            "gen_ai.usage.input_tokens": len(lease.request.tokens),
            "tandem.cached_tokens": 0,
            "tandem.queue_s": prompt.started_s - reserved_s,
        }
        self.to.record("tandem.prefill", lease.request.trace, reserved_s, attributes)

    def finished(self, sequence: RunningSequence, reason: FinishReason) -> None:
        """Its last token is drawn."""
        num_tokens = sequence.num_generated - len(sequence.lease.request.generated) - 1  # the first is prefill's
        self._over(sequence.lease, {"tandem.finish_reason": reason.value, "gen_ai.usage.output_tokens": num_tokens})

    def ended(self, lease: Lease) -> None:
        """Before its time: the client has what it wanted, or left, or the answer goes on elsewhere."""
        self._over(lease, {})

    def _over(self, lease: Lease, attributes: dict[str, str | int]) -> None:
        moments = {step.state: step.at_s for step in lease.history}
        verified_s = moments.get(LeaseState.VERIFIED)
        if not lease.request.trace or verified_s is None:
            return
        own: dict[str, str | int | float | bool] = {
            "tandem.request_id": lease.request.request_id,
            "tandem.attempt": lease.attempt,
            "tandem.prefill_worker": lease.writer_id,
            "tandem.reserved_s": verified_s - moments[LeaseState.RESERVED],
        }
        self.to.record("tandem.decode", lease.request.trace, verified_s, own | attributes)

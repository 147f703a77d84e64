"""The spans of a request that its prefill worker makes. See `tandem.tracing`."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.prompt import PrefillTask, RunningPrompt
from tandem.tracing import NO_TRACER, Tracer
from transfer.handoff import HandoffResult

__all__ = ["PrefillTraces"]


@dataclass(frozen=True, slots=True)
class PrefillTraces:
    to: Tracer = NO_TRACER

    def first_token(self, prompt: RunningPrompt) -> None:
        """Prefill is over; what is to be sent may still be on its way."""
        task = prompt.task
        if not task.request.trace:
            return
        attributes = {
            "gen_ai.usage.input_tokens": task.num_tokens,
            "tandem.cached_tokens": prompt.memory.num_cached,
            "tandem.queue_s": prompt.started_s - task.received_s,
        }
        self.to.record("tandem.prefill", task.request.trace, task.received_s, _of(task) | attributes)

    def handed_off(self, task: PrefillTask, result: HandoffResult, peer_id: str) -> None:
        """The record is on its way to `peer_id`."""
        if not task.request.trace:
            return
        attributes: dict[str, str | int | float | bool] = {
            "tandem.decode_worker": peer_id,
            "tandem.kv_bytes": result.kv_bytes,
            "tandem.state_bytes": result.state_bytes,
            "tandem.kv_s": result.kv_seconds,
            "tandem.state_s": result.state_seconds,
        }
        self.to.record("tandem.transfer", task.request.trace, result.began_s, _of(task) | attributes)


def _of(task: PrefillTask) -> dict[str, str | int | float | bool]:
    return {"tandem.request_id": task.request.request_id, "tandem.attempt": task.attempt}

"""What a prefill worker tells the routers, as messages of the internal proto."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.prompt import PrefillTask, RunningPrompt
from tandem.errors import TandemError
from tandem.mailbox import SessionHub
from tandem.request import Drawn, FinishReason
from tandem.v1 import worker_pb2 as pb
from tandem.wire import failure_to_wire, logprobs_to_wire
from transfer.handoff import HandoffResult

__all__ = ["Reporter"]


@dataclass(frozen=True)
class Reporter:
    """Loads are not posted with events: the session adds a fresh one to every message that it sends."""

    hub: SessionHub[pb.PrefillEvents]

    def started(self, task: PrefillTask) -> None:
        event = pb.PrefillStarted(request_id=task.request.request_id, attempt=task.attempt)
        self.hub.post(task.router_id, pb.PrefillEvents(started=[event]))

    def first_token(self, prompt: RunningPrompt, drawn: Drawn, finish: FinishReason | None, now_s: float) -> None:
        task = prompt.task
        event = pb.FirstToken(
            request_id=task.request.request_id,
            attempt=task.attempt,
            index=len(task.request.generated),
            token=drawn.token,
            finish_reason=finish.value if finish else "",
            prefill_seconds=now_s - prompt.started_s,
            cached_tokens=prompt.memory.num_cached,
            logprobs=logprobs_to_wire(drawn.logprobs) if drawn.logprobs else None,
            prompt_logprobs=[logprobs_to_wire(entry) for entry in prompt.prompt_logprobs],
        )
        self.hub.post(task.router_id, pb.PrefillEvents(first_tokens=[event]))

    def handed_off(self, task: PrefillTask, result: HandoffResult) -> None:
        event = pb.HandoffSent(
            request_id=task.request.request_id,
            attempt=task.attempt,
            kv_bytes=result.kv_bytes,
            state_bytes=result.state_bytes,
            kv_seconds=result.kv_seconds,
            state_seconds=result.state_seconds,
        )
        self.hub.post(task.router_id, pb.PrefillEvents(handoffs=[event]))

    def standing(self, router_id: str, request_id: str, attempt: int, *, known: bool) -> None:
        event = pb.TaskStanding(request_id=request_id, attempt=attempt, known=known)
        self.hub.post(router_id, pb.PrefillEvents(standings=[event]))

    def failed(self, task: PrefillTask, error: TandemError) -> None:
        event = failure_to_wire(task.request.request_id, task.attempt, error)
        self.hub.post(task.router_id, pb.PrefillEvents(failed=[event]))

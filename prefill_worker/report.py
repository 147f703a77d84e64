"""What a prefill worker tells the routers, as messages of the internal proto."""

from __future__ import annotations

from dataclasses import dataclass

from prefill_worker.prompt import PrefillTask, RunningPrompt
from tandem.errors import TandemError
from tandem.mailbox import SessionHub
from tandem.request import Drawn
from tandem.v1 import worker_pb2 as pb
from tandem.wire import failure_to_wire, first_token_to_wire
from transfer.handoff import HandoffResult

__all__ = ["Reporter"]


@dataclass(frozen=True)
class Reporter:
    """Loads are not posted with events: the session adds a fresh one to every message that it sends."""

    hub: SessionHub[pb.PrefillEvents]

    def started(self, task: PrefillTask) -> None:
        event = pb.PrefillStarted(request_id=task.request.request_id, attempt=task.attempt)
        self.hub.post(task.router_id, pb.PrefillEvents(started=[event]))

    def first_token(self, prompt: RunningPrompt, drawn: Drawn, now_s: float) -> None:
        task, seconds, cached = prompt.task, now_s - prompt.started_s, prompt.memory.num_cached
        event = first_token_to_wire(task.request, task.attempt, drawn, seconds, cached, prompt.prompt_logprobs)
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

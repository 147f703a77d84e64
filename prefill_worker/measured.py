"""What a prefill worker measures of its steps, its prefix cache and its hand-offs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prefill_worker.prompt import PrefillTask
from tandem.buckets import concurrency_bucket, prompt_bucket
from tandem.measures import ALL, Measures
from transfer.handoff import HandoffResult

__all__ = ["PrefillMeasures"]


@dataclass(frozen=True, slots=True)
class PrefillMeasures:
    to: Measures

    def step(self, seconds: float, chunks: Sequence[tuple[PrefillTask, int]]) -> None:
        """chunks: whose, and how many tokens of it."""
        self.to.observe("prefill_step_seconds", seconds, ALL, concurrency_bucket(len(chunks)), ALL)
        for task, num_tokens in chunks:
            self.to.add("prefill_tokens", num_tokens, task.request.service_class.value)

    def found(self, task: PrefillTask, num_tokens: int) -> None:
        """So many leading tokens need not be computed."""
        if num_tokens:
            self.to.add("prefix_cache_hit_tokens", num_tokens, task.request.service_class.value)

    def handed_off(self, task: PrefillTask, result: HandoffResult, num_handoffs: int) -> None:
        """num_handoffs: that were under way with this one."""
        labels = (prompt_bucket(task.num_tokens), concurrency_bucket(num_handoffs), task.request.service_class.value)
        for kind, num_bytes, seconds in (
            ("kv", result.kv_bytes, result.kv_seconds),
            ("state", result.state_bytes, result.state_seconds),
        ):
            self.to.add("transfer_bytes", num_bytes, kind)
            self.to.observe("transfer_seconds", seconds, kind, *labels)
        if result.held_bytes:
            self.to.add("transfer_held_bytes", result.held_bytes)

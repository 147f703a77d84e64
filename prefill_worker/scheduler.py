"""Which prompts the next step computes, and how much of each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ChunkPlan", "may_start_another", "plan_chunks"]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """`num_tokens` of the prompt at position `index` of the running list; `is_last` completes it."""

    index: int
    num_tokens: int
    is_last: bool


def plan_chunks(remaining_tokens: Sequence[int], chunk_tokens: int, until_stop: Sequence[int] | None = None) -> list[ChunkPlan]:
    """Fill one step of at most `chunk_tokens` in order of arrival: what the first prompt leaves, the next one gets.

    until_stop: per prompt, tokens up to the next position at which a chunk must end, since its state is to be kept there.
    """
    plans: list[ChunkPlan] = []
    budget = chunk_tokens
    for index, (remaining, stop) in enumerate(zip(remaining_tokens, until_stop or remaining_tokens, strict=True)):
        if budget == 0:
            break
        num_tokens = min(remaining, stop, budget)
        plans.append(ChunkPlan(index=index, num_tokens=num_tokens, is_last=num_tokens == remaining))
        budget -= num_tokens
    return plans


def may_start_another(started_tokens: int, chunk_tokens: int) -> bool:
    """Whether one more waiting prompt should ask for its reservation now.

    Enough to fill the next two steps is started ahead, so that no step waits for the decode worker's answer; more would
    hold memory on both sides for prompts that only queue.
    """
    return started_tokens < 2 * chunk_tokens

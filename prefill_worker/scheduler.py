"""Which prompts the next step computes, how much of each, and which may begin. Pure.

Within a class of service the shortest remaining work goes first, less a credit for waiting: a part of all tokens that the
worker has computed since the prompt came. A prompt of L tokens is thus passed by nothing that comes after the worker has
computed L / `ageing` tokens since, however many short prompts there are.

Between the classes, `batch` gets what `interactive` leaves, and `batch_share` of the tokens at least while both have work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.request import ServiceClass

__all__ = [
    "ChunkPlan",
    "PrefillPolicy",
    "StepPlan",
    "Work",
    "may_begin",
    "num_tokens_within_step",
    "plan_step",
    "plan_within_step",
]


@dataclass(frozen=True, slots=True)
class Work:
    """One prompt. num_to_stop: tokens up to the next position where a chunk must end, since its state is to be kept there.
    waited_tokens: what the worker has computed, for anybody, since the prompt came."""

    num_computed: int
    num_remaining: int
    num_to_stop: int
    waited_tokens: int = 0
    service_class: ServiceClass = ServiceClass.INTERACTIVE


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """`num_tokens` of the prompt at position `index` of the list; `is_last` completes it."""

    index: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """batch_credit: tokens that `batch` is owed, for the next step."""

    chunks: tuple[ChunkPlan, ...]
    batch_credit: float


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """chunk_tokens: most tokens of a step. tile_tokens: chunks end at multiples of it where they may, so that the numbers of a
    prompt do not depend on the prompts beside it. ageing, batch_share: see the module. last_tokens: where the budget cuts a
    prompt, its last chunk is left so many at least."""

    chunk_tokens: int
    tile_tokens: int = 1
    ageing: float = 0.5
    batch_share: float = 0.1
    last_tokens: int = 0

    def urgency(self, work: Work) -> float:
        """The lowest goes first."""
        return work.num_remaining - self.ageing * work.waited_tokens


def plan_step(works: Sequence[Work], policy: PrefillPolicy, batch_credit: float = 0.0) -> StepPlan:
    """At most `policy.chunk_tokens`; empty only when there is no work."""
    order = _ranked(works, policy)
    interactive = [index for index in order if works[index].service_class is ServiceClass.INTERACTIVE]
    batch = [index for index in order if works[index].service_class is not ServiceClass.INTERACTIVE]
    if not batch or not interactive:
        return StepPlan(tuple(_fill(order, works, policy.chunk_tokens, policy)), 0.0)
    # Owed tokens are saved up to a tile, so that these chunks too end where they should.
    credit = min(batch_credit + policy.batch_share * policy.chunk_tokens, policy.chunk_tokens)
    owed = 0
    if credit >= min(policy.tile_tokens, policy.chunk_tokens):
        owed = _total(_fill(batch, works, int(credit), policy))
    first = _fill(interactive, works, policy.chunk_tokens - owed, policy, may_be_empty=owed > 0)
    rest = _fill(batch, works, policy.chunk_tokens - _total(first), policy, may_be_empty=bool(first))
    return StepPlan((*first, *rest), credit - min(owed, _total(rest)))


def num_tokens_within_step(step_tokens: int, policy: PrefillPolicy) -> float:
    """Interactive tokens that may be computed within a step of `step_tokens` batch tokens: the step is then the
    share that batch is owed."""
    return step_tokens * (1.0 / policy.batch_share - 1.0) if policy.batch_share else math.inf


def plan_within_step(works: Sequence[Work], policy: PrefillPolicy, num_left: float) -> tuple[ChunkPlan, ...]:
    """Chunks of interactive prompts alone, `num_left` tokens at most."""
    interactive = [index for index in _ranked(works, policy) if works[index].service_class is ServiceClass.INTERACTIVE]
    return tuple(_fill(interactive, works, int(min(policy.chunk_tokens, num_left)), policy, may_be_empty=True))


def may_begin(candidate: Work, begun: Iterable[Work], policy: PrefillPolicy) -> bool:
    """Whether a waiting prompt should take memory and ask for its reservation now.

    Enough to fill the next two steps is begun ahead, so that no step waits for a decode worker's answer; more would hold memory
    on both sides for prompts that only queue. Only what goes before the candidate counts: a short prompt begins beside a long
    one. One `batch` prompt may always be begun, since a share is owed to it.
    """
    begun = list(begun)
    is_batch = candidate.service_class is not ServiceClass.INTERACTIVE
    if is_batch and not any(work.service_class is candidate.service_class for work in begun):
        return True
    ahead = sum(
        work.num_remaining
        for work in begun
        if (is_batch and work.service_class is ServiceClass.INTERACTIVE)
        or (work.service_class is candidate.service_class and policy.urgency(work) <= policy.urgency(candidate))
    )
    return ahead < 2 * policy.chunk_tokens


def _ranked(works: Sequence[Work], policy: PrefillPolicy) -> list[int]:
    """Positions in `works`, the most urgent first."""
    return sorted(range(len(works)), key=lambda index: (policy.urgency(works[index]), index))


def _fill(
    order: Sequence[int], works: Sequence[Work], budget: int, policy: PrefillPolicy, *, may_be_empty: bool = False
) -> list[ChunkPlan]:
    """In this order, what the first one leaves the next one gets."""
    chunks: list[ChunkPlan] = []
    for index in order:
        if budget <= 0:
            break
        work = works[index]
        wanted = min(work.num_remaining, work.num_to_stop)
        num_tokens = min(wanted, budget)
        if num_tokens < wanted:  # cut by the budget: at a tile's end, unless that would leave the step without work
            aligned = _cut(work, num_tokens, policy)
            num_tokens = aligned if aligned > 0 or chunks or may_be_empty else num_tokens
        if num_tokens > 0:
            chunks.append(ChunkPlan(index, num_tokens, is_last=num_tokens == work.num_remaining))
            budget -= num_tokens
    return chunks


def _cut(work: Work, num_tokens: int, policy: PrefillPolicy) -> int:
    """Up to the last tile's end within `num_tokens` that leaves enough for the last chunk, or within them at all. 0: there is
    none."""
    most = num_tokens
    if work.num_to_stop == work.num_remaining:
        most = min(most, work.num_remaining - policy.last_tokens)
    for count in (most, num_tokens):
        aligned = (work.num_computed + count) // policy.tile_tokens * policy.tile_tokens - work.num_computed
        if aligned > 0:
            return aligned
    return 0


def _total(chunks: Iterable[ChunkPlan]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)

"""The types a sequence passes through inside a decode worker.

::

    Lease (reserved, receiving) ──record verified──▶ VerifiedSequence ──joins a step──▶ RunningSequence ──▶ lease released
                                                                                       │         ▲
                                                                                  evicted ──▶ waits in host memory
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.grammar import Grammars
from tandem.request import Drawn, FinishReason, TokenLogprobs
from tandem.sampling import SequenceSampler
from transfer.lease import Lease

__all__ = ["Key", "RunningSequence", "VerifiedSequence"]

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class VerifiedSequence:
    """Its state lies in the lease's memory and was checked. num_positions: positions that the caches stand for."""

    lease: Lease
    num_positions: int
    first_token: int

    @property
    def key(self) -> Key:
        return (self.lease.request.request_id, self.lease.attempt)

    @property
    def router_id(self) -> str:
        return self.lease.router_id


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A member of the batch, or evicted from it. lease: its newest snapshot. context_tokens: positions in the caches;
    last_token: drawn, not yet in them. num_generated: tokens of the answer so far, earlier attempts' included.
    last_logprobs: of last_token, when asked for."""

    lease: Lease
    context_tokens: int
    last_token: int
    num_generated: int
    sampler: SequenceSampler
    last_logprobs: TokenLogprobs | None = None

    @classmethod
    def join(cls, verified: VerifiedSequence, grammars: Grammars) -> RunningSequence:
        """Raises InvalidRequest: the request's grammar cannot be compiled."""
        sampler = SequenceSampler(verified.lease.request, grammars.start(verified.lease.request))
        sampler.append(verified.first_token)
        return cls(
            lease=verified.lease,
            context_tokens=verified.num_positions,
            last_token=verified.first_token,
            num_generated=len(verified.lease.request.generated) + 1,
            sampler=sampler,
        )

    @property
    def key(self) -> Key:
        return (self.lease.request.request_id, self.lease.attempt)

    def advance(self, drawn: Drawn) -> FinishReason | None:
        """One step done: `last_token` is in the caches now, and this one was drawn after it."""
        self.context_tokens += 1
        self.last_token = drawn.token
        self.last_logprobs = drawn.logprobs
        self.num_generated += 1
        self.sampler.append(drawn.token)
        return self.lease.request.stop.finish_reason(self.num_generated, drawn.token)

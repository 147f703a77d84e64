"""The vocabulary of a request, shared by every process.

A request changes type as it crosses a boundary::

    proto GenerateRequest ──validate──▶ Request ──place──▶ (router) Attempt ──▶ PrefillTask ──reserve──▶ ReservedPrompt
                                                                                                   │ hand-off
                                                              RunningSequence ◀──verify── Lease ◀──┘
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tandem.trace_context import NO_TRACE, TraceContext

__all__ = [
    "MAX_ALTERNATIVES",
    "Drawn",
    "FinishReason",
    "OutputOptions",
    "Phase",
    "Request",
    "SamplingParams",
    "ServiceClass",
    "StopRules",
    "Timings",
    "TokenLogprobs",
]


# Likeliest tokens that can be told beside one.
MAX_ALTERNATIVES = 20


class Phase(enum.Enum):
    """Where a request stands, as the router sees it.

    ::

        RECEIVED → QUEUED → PREFILLING ─┬→ DECODING → FINISHED
                     ▲   (KV streams by │      │
                     │    chunk)        └──────┤ (worker lost or hand-off refused)
                     └─────────────────────────┘
        any → CANCELLED | FAILED
    """

    RECEIVED = "received"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


class ServiceClass(enum.Enum):
    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Randomness is a function of (seed, position): no generator state exists.

    In order: repetition, presence and frequency penalties, logit_bias, temperature, top_k, top_p, min_p.

    temperature: 0 is greedy; else logits are divided by it. Range 0 … 100.
    top_p: keep the smallest set of tokens whose probability reaches it. Range (0, 1]; 1 keeps all.
    top_k: keep the k likeliest tokens; 0 keeps all.
    seed: 64 bits; the router draws one when the client gives none, so that a retried request repeats itself.
    min_p: drop tokens less likely than this share of the likeliest one. Range 0 … 1; 0 keeps all.
    presence_penalty: taken from the logit of every token that the answer has. Range -2 … 2.
    frequency_penalty: the same, times how often the answer has it. Range -2 … 2.
    repetition_penalty: logits of tokens that prompt or answer have are divided by it when positive, else multiplied
    (Keskar et al., "CTRL", 2019, as transformers has it). Range 0.01 … 10; 1 changes nothing.
    logit_bias: (token id, added to its logit), each id once. Range -100 … 100.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalty(self) -> bool:
        """The next token depends on which tokens came before, beyond the model's own view of them."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What is told beside the tokens. None: nothing is; else how many of the likeliest alternatives, 0 … 20.

    logprobs: of every token of the answer. prompt_logprobs: of every token of the prompt but the first, which nothing
    precedes. Both are the model's own, before penalties, bias, temperature and cuts.
    """

    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms. logprob: of the token itself. top: (token id, logprob) of the likeliest, in falling order."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token that was sampled. logprobs: None unless the client asked."""

    token: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a worker ends a sequence. Stop strings are the router's, since only it has text.

    max_new_tokens: at least 1, counted over the whole answer, the first token included.
    stop_token_ids: the model's end tokens and the client's own, merged by the router; empty means only length ends it.
    min_new_tokens: before so many tokens no stop token is drawn. At most max_new_tokens.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0

    def finish_reason(self, num_generated: int, last_token: int) -> FinishReason | None:
        """What ends a sequence of `num_generated` tokens whose newest is `last_token`; None: go on."""
        if last_token in self.stop_token_ids:
            return FinishReason.STOP
        if num_generated >= self.max_new_tokens:
            return FinishReason.LENGTH
        return None


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was validated against the model's limits.

    prompt: token ids, at least one. generated: tokens already delivered by an earlier attempt; prefill absorbs
    `prompt + generated`, and counting goes on after them. grammar: what the answer follows, see `tandem.grammar`; empty: none.
    grammar_after: it holds for what comes after these tokens only, which end a model's reasoning. trace: of the attempt that
    it is part of.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    stop: StopRules
    service_class: ServiceClass = ServiceClass.INTERACTIVE
    generated: tuple[int, ...] = ()
    output: OutputOptions = OutputOptions()
    grammar: str = ""
    grammar_after: tuple[int, ...] = ()
    trace: TraceContext = NO_TRACE

    @property
    def tokens(self) -> tuple[int, ...]:
        """What prefill absorbs."""
        return self.prompt + self.generated

    @property
    def max_total_tokens(self) -> int:
        """Positions that the sequence can reach: prompt and answer, less the last token, which is never fed back."""
        return len(self.prompt) + self.stop.max_new_tokens - 1


@dataclass(slots=True)
class Timings:
    """Moments of one request in seconds on the router's monotonic clock; 0.0 = not reached."""

    received: float = 0.0
    queued: float = 0.0
    prefill_started: float = 0.0
    first_token: float = 0.0
    handed_off: float = 0.0
    decode_started: float = 0.0
    finished: float = 0.0
    newest_token: float = 0.0
    attempts: int = field(default=0)

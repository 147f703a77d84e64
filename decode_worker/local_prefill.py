"""Short prompts that the decode worker computes itself, one after the other, while its sequences go on.

A prompt's positions are computed as a prefill worker would: from nothing, in pieces that end at tiles' ends. So its numbers are
the same. What keeps the cadence of the running sequences is that a piece is interrupted, within a layer too, as soon as it has
had its share of a step's time; others then have their turn, a decode step among it. Nothing of a sequence is kept outside its
own blocks and slot, so steps may nest.

For the thread of the decode loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass, field

import torch

from tandem.clock import Clock
from tandem.engine import Engine
from tandem.errors import HandoffError, Overloaded, TandemError
from tandem.model.batch import SequenceChunk
from tandem.prompt_output import PromptOutput
from tandem.rate import Rate
from tandem.request import Drawn, TokenLogprobs
from transfer.lease import Lease

__all__ = ["ComputedPrompt", "LocalPrefill", "TakeTurns", "require_place"]

logger = logging.getLogger(__name__)

# What was measured longer ago says nothing: the next prompt that finds the worker idle is computed to see.
_FORGOTTEN_AFTER_S = 60.0
# Longest prompts that may stand here together: several routers may each find the worker idle.
_MOST_WAITING = 4

TakeTurns = Callable[[float], bool]
"""Called some times in each layer with the seconds that the prompt has been computed since the others had their turn. True:
they had another one just now."""


@dataclass(frozen=True, slots=True)
class ComputedPrompt:
    """outcome: its first token, or why there is none; None: nobody waits for it any more. prefill_s: from its beginning, the
    others' turns included."""

    lease: Lease
    outcome: Drawn | TandemError | None
    started_s: float
    prefill_s: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


def require_place(num_tokens: int, num_waiting_tokens: int, most_tokens: int) -> None:
    """Whether a prompt may be placed here. most_tokens: of one, as configured.

    Raises:
        HandoffError: it is longer than what is computed here. Overloaded: too many wait.
    """
    if num_tokens > most_tokens:
        raise HandoffError(f"a prompt of {num_tokens} tokens was to be computed on a decode worker, {most_tokens} are the most")
    if num_waiting_tokens + num_tokens > _MOST_WAITING * most_tokens:
        raise Overloaded(f"{num_waiting_tokens} prompt tokens wait at this decode worker", retry_after_s=1.0)


class _TurnFailedError(Exception):
    """Something is wrong with the loop and not with the prompt: it goes through, with its cause."""


class _UnwantedError(Exception):
    """Unwinds the forward pass of a prompt that nobody waits for any more."""


@dataclass(slots=True)
class LocalPrefill:
    """Memory rule: it ends no lease. What it is told to forget while it computes it, it hands back as ended when it has stopped
    writing into it.

    on_start: told when a prompt is begun. waiting: leases whose prompts are to be computed, in the order of their coming.
    """

    engine: Engine
    output: PromptOutput
    clock: Clock
    on_start: Callable[[Lease], None] = lambda lease: None
    waiting: deque[Lease] = field(default_factory=deque)
    _current: Lease | None = None
    _is_unwanted: bool = False
    _pace: Rate = field(default_factory=lambda: Rate(0.0))
    _seen_s: float = 0.0
    _own_s: float = 0.0

    @property
    def num_waiting(self) -> int:
        """With the one that is computed. May be read from another thread, as the next."""
        return len(self.waiting) + (self._current is not None)

    @property
    def num_waiting_tokens(self) -> int:
        current = self._current
        return sum(len(lease.request.tokens) for lease in (*list(self.waiting), *([current] if current else [])))

    @property
    def token_s(self) -> float:
        """Seconds of computation for one prompt token, lately; 0.0: not known."""
        return self._pace.seconds if self.clock.now() - self._seen_s < _FORGOTTEN_AFTER_S else 0.0

    def forget(self, lease_ids: Set[str]) -> set[str]:
        """Nobody waits for these any more. Returns those that must not be ended yet, since they are being written."""
        self.waiting = deque(lease for lease in self.waiting if lease.id not in lease_ids)
        if self._current is None or self._current.id not in lease_ids:
            return set()
        self._is_unwanted = True
        return {self._current.id}

    def compute_next(self, take_turns: TakeTurns) -> ComputedPrompt:
        """The prompt that has waited longest, from its beginning to its end. During `take_turns` prompts may come, and be
        forgotten, this one too: it is computed no further then."""
        lease = self._current = self.waiting.popleft()
        started_s, self._is_unwanted, self._own_s = self.clock.now(), False, 0.0
        self.on_start(lease)
        told: list[TokenLogprobs] = []
        outcome: Drawn | TandemError | None
        try:
            outcome = self._compute(lease, told, take_turns)
        except _UnwantedError:
            outcome = None
        except _TurnFailedError:
            raise
        except Exception:  # the prompt ends here, and nothing else: the worker goes on
            logger.exception("the prompt of request %s could not be computed here", lease.request.request_id)
            outcome = HandoffError("prefill failed on this decode worker; see its log")
        else:
            self._note(len(lease.request.tokens))
        self._current = None
        if self._is_unwanted:  # since it gave way for the last time
            outcome = None
        return ComputedPrompt(lease, outcome, started_s, self.clock.now() - started_s, tuple(told))

    def _compute(self, lease: Lease, told: list[TokenLogprobs], take_turns: TakeTurns) -> Drawn | TandemError:
        tokens, tile = lease.request.tokens, self.engine.tile_tokens
        last_D = torch.empty(0)
        for start in range(0, len(tokens), tile):
            piece = SequenceChunk(tokens[start : start + tile], start, lease.block_ids, lease.slot)
            hidden_CD = self._forward(piece, take_turns)
            told += self.output.logprobs(lease.request, start, hidden_CD)
            last_D = hidden_CD[-1:]
        return self.output.first_tokens([lease.request], last_D)[0]

    def _forward(self, piece: SequenceChunk, take_turns: TakeTurns) -> torch.Tensor:
        began_s = self.clock.now()

        def give_way() -> None:
            nonlocal began_s
            own_s = self.clock.now() - began_s
            try:
                had_turns = take_turns(own_s)
            except Exception as error:
                raise _TurnFailedError from error
            if had_turns:
                self._own_s += own_s
                began_s = self.clock.now()
            if self._is_unwanted:
                raise _UnwantedError

        hidden_CD = self.engine.forward([piece], give_way=give_way)
        self._own_s += self.clock.now() - began_s
        return hidden_CD

    def _note(self, num_tokens: int) -> None:
        now = self.clock.now()
        if not self.token_s:  # whatever was seen before is forgotten
            self._pace = Rate(0.0)
        self._pace.note(num_tokens, self._own_s)
        self._seen_s = now

"""What is told of a prompt when it has been computed: its first token, and the logprobs of its own. Shared by whoever computes
prompts, so that an answer does not depend on where its prompt was computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tandem import logprobs
from tandem.engine import Engine
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.request import Drawn, Request, TokenLogprobs
from tandem.sampling import Draw, SequenceSampler, sample_each

__all__ = ["PromptOutput"]

# Rows of logits that exist at once: 64 rows of 248,320 in fp32 and fp64 are 190 MB.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class PromptOutput:
    engine: Engine
    grammars: Grammars

    def first_tokens(self, requests: Sequence[Request], hidden_PD: torch.Tensor) -> list[Drawn | TandemError]:
        """The token that follows each prompt, or why there is none. hidden_PD: of the last position of each."""
        if not requests:
            return []
        logits_PV = self.engine.logits(hidden_PD)
        tokens = sample_each(logits_PV, [partial(self._draw, request) for request in requests])
        return logprobs.told(logits_PV, tokens, [request.output.logprobs for request in requests])

    def logprobs(self, request: Request, num_before: int, hidden_CD: torch.Tensor) -> list[TokenLogprobs]:
        """What the positions of a chunk say of the prompt tokens that follow them. Nothing unless the client asked, nor in an
        attempt that resumes an answer: the first one has told it.

        num_before: positions before the chunk. hidden_CD: of the chunk.
        """
        wanted = request.output.prompt_logprobs
        if wanted is None or request.generated:
            return []
        told: list[TokenLogprobs] = []
        next_tokens = request.prompt[num_before + 1 : num_before + 1 + hidden_CD.shape[0]]
        for start in range(0, len(next_tokens), _ROWS):
            some = next_tokens[start : start + _ROWS]
            logits_TV = self.engine.logits(hidden_CD[start : start + len(some)])
            told += logprobs.of_prompt(logits_TV, some, wanted)
        return told

    def _draw(self, request: Request) -> Draw:
        return SequenceSampler(request, self.grammars.start(request)).draw()

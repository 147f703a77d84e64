"""From a step's hidden states to what the client gets of it: first tokens, and logprobs of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prefill_worker.prompt import RunningPrompt
from tandem import logprobs
from tandem.engine import Engine
from tandem.grammar import Grammars
from tandem.request import TokenLogprobs
from tandem.sampling import SequenceSampler, sample

__all__ = ["FirstDraw", "draw_first_tokens", "note_prompt_logprobs"]

# Rows of logits that exist at once: 64 rows of 248,320 in fp32 and fp64 are 190 MB.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class FirstDraw:
    """logprobs: None unless the client asked."""

    token: int
    logprobs: TokenLogprobs | None = None


def draw_first_tokens(
    engine: Engine, grammars: Grammars, prompts: Sequence[RunningPrompt], hidden_PD: torch.Tensor
) -> list[FirstDraw]:
    """hidden_PD: of the last position of each prompt."""
    if not prompts:
        return []
    requests = [prompt.task.request for prompt in prompts]
    logits_PV = engine.logits(hidden_PD)
    tokens = sample(logits_PV, [SequenceSampler(request, grammars.start(request)).draw() for request in requests])
    told = logprobs.of_tokens(logits_PV, tokens, [request.output.logprobs for request in requests])
    return [FirstDraw(token, entry) for token, entry in zip(tokens, told, strict=True)]


def note_prompt_logprobs(engine: Engine, prompt: RunningPrompt, hidden_CD: torch.Tensor) -> None:
    """Append to `prompt.prompt_logprobs` what the positions of a chunk say of the prompt tokens that follow them. Nothing is
    done unless the client asked, nor in an attempt that resumes an answer: the first one has told it.

    hidden_CD: of the chunk that begins at `prompt.num_computed`.
    """
    request = prompt.task.request
    wanted = request.output.prompt_logprobs
    if wanted is None or request.generated:
        return
    begin = prompt.num_computed + 1
    next_tokens = request.prompt[begin : begin + hidden_CD.shape[0]]
    for start in range(0, len(next_tokens), _ROWS):
        some = next_tokens[start : start + _ROWS]
        logits_TV = engine.logits(hidden_CD[start : start + len(some)])
        prompt.prompt_logprobs += logprobs.of_prompt(logits_TV, some, wanted)

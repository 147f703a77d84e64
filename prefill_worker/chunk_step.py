"""One forward pass over a chunk of several prompts, pushing what becomes final while the rest is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from prefill_worker.prompt import RunningPrompt
from prefill_worker.scheduler import ChunkPlan
from tandem import logprobs
from tandem.cache.spec import PagedKvSpec
from tandem.engine import Engine
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.model.batch import SequenceChunk
from tandem.request import Drawn, Request
from tandem.sampling import Draw, SequenceSampler, sample_each

__all__ = ["ChunkStep"]

# Rows of logits that exist at once: 64 rows of 248,320 in fp32 and fp64 are 190 MB.
_ROWS = 64


@dataclass(frozen=True, slots=True)
class ChunkStep:
    engine: Engine
    grammars: Grammars

    def run(
        self,
        prompts: Sequence[RunningPrompt],
        plans: Sequence[ChunkPlan],
        between_layers: Callable[[], None] | None = None,
    ) -> list[Drawn | TandemError]:
        """Run one planned chunk of each prompt. Returns the first tokens of those that it completes, in order, or why one
        cannot have its token.

        between_layers() may run other prompts: nothing of a sequence is kept outside its own blocks and slot."""
        chunks = [
            SequenceChunk(
                tokens=prompt.tokens[prompt.num_computed : prompt.num_computed + plan.num_tokens],
                context_tokens=prompt.num_computed,
                block_ids=prompt.memory.block_ids,
                slot=prompt.memory.slot,
            )
            for prompt, plan in zip(prompts, plans, strict=True)
        ]
        completed = [prompt for prompt, plan in zip(prompts, plans, strict=True) if plan.is_last]

        def on_layer(layer: int) -> None:
            self._push_layer(completed, layer)
            if between_layers is not None:
                between_layers()

        hidden_TD = self.engine.forward(chunks, on_layer)
        ends = list(accumulate(plan.num_tokens for plan in plans))
        for prompt, plan, end in zip(prompts, plans, ends, strict=True):
            self._note_prompt_logprobs(prompt, hidden_TD[end - plan.num_tokens : end])
        rows = [end - 1 for end, plan in zip(ends, plans, strict=True) if plan.is_last]
        return self._draw([prompt.task.request for prompt in completed], hidden_TD[rows])

    def _push_layer(self, completed: Sequence[RunningPrompt], layer: int) -> None:
        """In a prompt's last chunk every layer leaves as soon as it is final."""
        is_attention = isinstance(self.engine.memory.specs.layers[layer][0], PagedKvSpec)
        for prompt in completed:
            if prompt.handoff is None:
                continue
            if is_attention:
                prompt.handoff.push_kv(prompt.num_pushed_blocks, len(prompt.memory.block_ids), layers=(layer,))
            else:
                prompt.handoff.push_state(layer)

    def _draw(self, requests: Sequence[Request], hidden_PD: torch.Tensor) -> list[Drawn | TandemError]:
        """hidden_PD: of the last position of each prompt."""
        if not requests:
            return []
        logits_PV = self.engine.logits(hidden_PD)
        tokens = sample_each(logits_PV, [partial(self._first_draw, request) for request in requests])
        return logprobs.told(logits_PV, tokens, [request.output.logprobs for request in requests])

    def _first_draw(self, request: Request) -> Draw:
        return SequenceSampler(request, self.grammars.start(request)).draw()

    def _note_prompt_logprobs(self, prompt: RunningPrompt, hidden_CD: torch.Tensor) -> None:
        """Append to `prompt.prompt_logprobs` what the positions of a chunk say of the prompt tokens that follow them. Nothing
        is done unless the client asked, nor in an attempt that resumes an answer: the first one has told it.

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
            logits_TV = self.engine.logits(hidden_CD[start : start + len(some)])
            prompt.prompt_logprobs += logprobs.of_prompt(logits_TV, some, wanted)

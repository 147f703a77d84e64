"""One forward pass over a chunk of several prompts, pushing what becomes final while the rest is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prefill_worker.prompt import RunningPrompt
from prefill_worker.scheduler import ChunkPlan
from tandem.cache.spec import PagedKvSpec
from tandem.engine import Engine
from tandem.errors import TandemError
from tandem.grammar import Grammars
from tandem.model.batch import SequenceChunk
from tandem.prompt_output import PromptOutput
from tandem.request import Drawn

__all__ = ["ChunkStep", "GiveWayError"]


class GiveWayError(Exception):
    """What gave way to others failed, and not the step that did: none of its prompts is to blame. To be raised from give_way();
    nobody but the worker's life catches it."""


@dataclass(frozen=True, slots=True)
class ChunkStep:
    engine: Engine
    grammars: Grammars

    def run(
        self,
        prompts: Sequence[RunningPrompt],
        plans: Sequence[ChunkPlan],
        give_way: Callable[[], None] | None = None,
    ) -> list[Drawn | TandemError]:
        """Run one planned chunk of each prompt. Returns the first tokens of those that it completes, in order, or why one
        cannot have its token.

        give_way() is called several times in each layer, and may run other prompts: nothing of a sequence is kept outside its
        own blocks and slot."""
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

        hidden_TD = self.engine.forward(chunks, lambda layer: self._push_layer(completed, layer), give_way)
        output = PromptOutput(self.engine, self.grammars)
        ends = list(accumulate(plan.num_tokens for plan in plans))
        for prompt, plan, end in zip(prompts, plans, ends, strict=True):
            hidden_CD = hidden_TD[end - plan.num_tokens : end]
            prompt.prompt_logprobs += output.logprobs(prompt.task.request, prompt.num_computed, hidden_CD)
        rows = [end - 1 for end, plan in zip(ends, plans, strict=True) if plan.is_last]
        return output.first_tokens([prompt.task.request for prompt in completed], hidden_TD[rows])

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

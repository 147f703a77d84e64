"""What the cluster tells beside the tokens is what transformers computes on the same checkpoint."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from tandem.model.load import load_model
from tandem.request import OutputOptions, Request, SamplingParams, StopRules
from tests.local_cluster import RANDOM, LocalCluster, local_cluster

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def reference() -> torch.nn.Module:
    from transformers import Qwen3_5ForCausalLM

    return Qwen3_5ForCausalLM.from_pretrained(load_model(RANDOM).folder).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    async with local_cluster() as running:
        yield running


def logits_of(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return found


async def test_logprobs_of_answer_and_prompt_over_several_chunks(cluster: LocalCluster, reference: torch.nn.Module) -> None:
    prompt = tuple(torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(4)).tolist())
    request = Request("logprobs", prompt, SamplingParams(0.8, seed=3), StopRules(8), output=OutputOptions(5, 3))
    answer = await cluster.generate(request)
    expected = torch.log_softmax(logits_of(reference, [*prompt, *answer.tokens]), -1)
    told = [*answer.prompt.logprobs, *answer.logprobs]
    assert len(told) == len(prompt) - 1 + 8
    for position, entry in enumerate(told):
        row = expected[position]
        assert entry.token.token_id == (*prompt, *answer.tokens)[position + 1]
        assert entry.token.logprob == pytest.approx(row[entry.token.token_id].item(), abs=TOLERANCE)
        assert [top.logprob for top in entry.top] == pytest.approx(row.topk(len(entry.top)).values.tolist(), abs=TOLERANCE)


async def test_a_prefix_that_is_cached_does_not_shorten_prompt_logprobs(cluster: LocalCluster) -> None:
    prompt = tuple(range(1, 140))
    await cluster.generate(Request("warm", prompt, SamplingParams(), StopRules(2)))
    told = await cluster.generate(Request("again", prompt, SamplingParams(), StopRules(2), output=OutputOptions(None, 0)))
    assert len(told.prompt.logprobs) == len(prompt) - 1


async def test_greedy_with_penalties_over_the_hand_off(cluster: LocalCluster, reference: torch.nn.Module) -> None:
    prompt = tuple(b"the same the same the same")
    params = SamplingParams(presence_penalty=0.4, frequency_penalty=0.6, repetition_penalty=1.3)
    answer = await cluster.generate(Request("penalties", prompt, params, StopRules(16)))
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    for place, token in enumerate(answer.tokens):
        before = [*prompt, *answer.tokens[:place]]
        scores = processor(torch.tensor([before]), logits_of(reference, before)[-1:])[0]
        for seen in set(answer.tokens[:place]):
            scores[seen] -= 0.4 + 0.6 * answer.tokens[:place].count(seen)
        assert scores[token] >= scores.max() - TOLERANCE

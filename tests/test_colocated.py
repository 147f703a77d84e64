"""The one-process engine against transformers' `generate`, and against itself in other company."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig
from tandem.errors import CapacityError
from tandem.model.load import LoadedModel
from tandem.request import Request, SamplingParams, StopRules
from tests.model.variants import VARIANTS, Variant, load, make

LENGTHS = (1, 2, 3, 20, 64, 65, 100, 129)
CACHE = CacheConfig(block_size_tokens=16)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["three value heads per key head", "uneven layers"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Variant:
    return make(tmp_path_factory.mktemp("checkpoint") / "model", VARIANTS[request.param])


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(0, 96, (n,), generator=generator).tolist()) for n in LENGTHS]


def requests_for(prompts: list[tuple[int, ...]], sampling: SamplingParams, new_tokens: list[int]) -> list[Request]:
    return [
        Request(str(i), prompt, sampling, StopRules(count))
        for i, (prompt, count) in enumerate(zip(prompts, new_tokens, strict=True))
    ]


def generate(loaded: LoadedModel, requests: list[Request], chunk_tokens: int = 64, max_batch: int = 8) -> list[list[int]]:
    return ColocatedEngine(loaded, CACHE, chunk_tokens, max_batch).generate(requests)


def test_64_greedy_tokens_are_those_of_transformers(made: Variant, prompts: list[tuple[int, ...]]) -> None:
    got = generate(made.loaded, requests_for(prompts, SamplingParams(), [64] * 8))
    for prompt, answer in zip(prompts, got, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = made.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert answer == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.95, seed=3)], ids=["greedy", "seeded"]
)
def test_tokens_are_the_same_alone_and_among_sequences_that_join_and_leave(
    dtype: str, sampling: SamplingParams, made: Variant, prompts: list[tuple[int, ...]]
) -> None:
    loaded = load(made.folder, dtype)
    requests = requests_for(prompts, sampling, [5, 40, 1, 17, 64, 9, 33, 2])
    alone = [generate(loaded, [request])[0] for request in requests]
    assert [len(answer) for answer in alone] == [5, 40, 1, 17, 64, 9, 33, 2]
    assert generate(loaded, requests, max_batch=3) == alone
    assert generate(loaded, requests[::-1], max_batch=8)[::-1] == alone


def test_a_stop_token_ends_a_sequence_and_is_its_last(made: Variant, prompts: list[tuple[int, ...]]) -> None:
    free = generate(made.loaded, requests_for(prompts[3:4], SamplingParams(), [64]))[0]
    stop = free[10]
    request = Request("0", prompts[3], SamplingParams(), StopRules(64, frozenset({stop})))
    assert generate(made.loaded, [request])[0] == free[: free.index(stop) + 1]


def test_a_resumed_request_continues_the_same_tokens(made: Variant, prompts: list[tuple[int, ...]]) -> None:
    seeded = SamplingParams(temperature=0.8, seed=11)
    whole = generate(made.loaded, requests_for(prompts[4:5], seeded, [30]))[0]
    resumed = Request("0", prompts[4], seeded, StopRules(30), generated=tuple(whole[:12]))
    assert generate(made.loaded, [resumed])[0] == whole[12:]


def test_a_small_budget_serves_one_after_the_other_and_too_small_a_one_is_refused(
    made: Variant, prompts: list[tuple[int, ...]]
) -> None:
    requests = requests_for(prompts[2:5], SamplingParams(), [8] * 3)
    specs = made.loaded.model.cache_specs(CACHE.block_size_tokens)
    one = specs.slot_bytes + specs.blocks_for(64 + 7) * specs.block_bytes
    small = ColocatedEngine(made.loaded, CacheConfig(block_size_tokens=16, budget_bytes=one), 64, 8)
    assert small.generate(requests) == generate(made.loaded, requests)
    with pytest.raises(CapacityError):
        ColocatedEngine(made.loaded, CacheConfig(block_size_tokens=16, budget_bytes=one - 1), 64, 8).generate(requests)


def test_no_request_is_no_answer(made: Variant) -> None:
    assert generate(made.loaded, []) == []


def test_sizes_below_one_are_the_callers_mistake(made: Variant) -> None:
    for chunk_tokens, max_batch in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            ColocatedEngine(made.loaded, CACHE, chunk_tokens, max_batch)


def test_a_folder_is_the_models_name(made: Variant) -> None:
    assert made.loaded.name == Path(made.folder).name

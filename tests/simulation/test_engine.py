"""The engine of the simulation gives the reference answer exactly when its memory holds what it left there."""

from __future__ import annotations

import itertools

import pytest
import torch

from tandem.model.batch import SequenceChunk
from tandem.request import Request, SamplingParams, StopRules
from tandem.sampling import Draw, sample
from tests.simulation.engine import DigestEngine, reference

PROMPT = tuple(range(5, 18))
BLOCKS, SLOT = (3, 1, 7, 4, 6), 2


def answer(engine: DigestEngine, sampling: SamplingParams, chunks: tuple[int, ...], length: int) -> list[int]:
    """By chunks of the prompt, then token by token."""
    done, new = 0, PROMPT[: chunks[0]]
    tokens: list[int] = []
    for size in (*chunks[1:], *[1] * length):
        hidden = engine.forward([SequenceChunk(new, done, BLOCKS, SLOT)])
        done += len(new)
        if done < len(PROMPT):
            new = PROMPT[done : done + size]
        else:
            tokens += sample(engine.logits(hidden[-1:]), [Draw(sampling, done)])
            new = (tokens[-1],)
    return tokens


@pytest.mark.parametrize("chunks", [(13,), (4, 4, 5), (1,) * 13])
@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(0.8, 0.9, 20, 7)])
def test_the_engine_gives_the_reference_however_the_prompt_is_cut(chunks: tuple[int, ...], sampling: SamplingParams) -> None:
    wanted = list(itertools.islice(reference(Request("r", PROMPT, sampling, StopRules(6))), 6))
    assert answer(DigestEngine(8, 4), sampling, chunks, 6) == wanted


@pytest.mark.parametrize("what", ["recurrent", "conv", "kv"])
def test_any_change_of_memory_changes_the_answer(what: str) -> None:
    engine = DigestEngine(8, 4)
    answer(engine, SamplingParams(), (13,), 1)
    tensors = {"recurrent": engine.memory.recurrent[2][SLOT], "conv": engine.memory.conv[0][SLOT], "kv": engine.memory.kv[1][3]}
    chunk = SequenceChunk((9,), len(PROMPT), BLOCKS, SLOT)
    saved = {layer: tensor.clone() for layer, tensor in engine.memory.recurrent.items()}
    tails = {layer: tensor.clone() for layer, tensor in engine.memory.conv.items()}
    right = engine.forward([chunk]).item()
    for layer, tensor in saved.items():
        engine.memory.recurrent[layer].copy_(tensor)
        engine.memory.conv[layer].copy_(tails[layer])
    tensors[what].view(torch.int32).view(-1)[0] ^= 1
    assert engine.forward([chunk]).item() != right

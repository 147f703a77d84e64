"""One process, no hand-off: tandem's model beside transformers' on the same checkpoint, threads and tokens.

    python -m bench.engine [--threads N] [--repetitions N] [--model FOLDER] [--json]

Prefill: forward of one prompt and the logits of its last position. Decode: one step (forward, logits, greedy choice) at
batch 1 and 8 behind a prompt; transformers runs its plain forward with its cache, which is faster than its `generate`.
The repetitions of the two alternate, so that a change of the machine's speed meets both; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM

from bench.checkpoints import bench_checkpoint
from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.config import ModelSource
from tandem.model.batch import ForwardBatch, SequenceChunk
from tandem.model.hybrid import HybridModel
from tandem.model.load import load_model
from tandem.request import SamplingParams
from tandem.sampling import Draw, sample

__all__ = ["main"]

BLOCK_SIZE = 32
PROMPT_TOKENS = 1024
DECODE_CONTEXT_TOKENS = 256
DECODE_STEPS = 16


@dataclass(frozen=True)
class Row:
    name: str
    unit: str
    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours


class Ours:
    def __init__(self, model: HybridModel, batch: int) -> None:
        self._model = model
        blocks = -(-(PROMPT_TOKENS + DECODE_STEPS) // BLOCK_SIZE)
        self._memory = CacheMemory.allocate(model.cache_specs(BLOCK_SIZE), PoolSizes(blocks * batch, batch))
        self._tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]

    def _step(self, rows: list[list[int]], context: int) -> list[int]:
        chunks = [SequenceChunk(tokens, context, self._tables[i], i) for i, tokens in enumerate(rows)]
        batch = ForwardBatch.build(chunks, BLOCK_SIZE)
        hidden = self._model.forward(batch, self._memory)
        last = [end - 1 for end in batch.cu_seqlens[1:]]
        position = context + len(rows[0])
        return sample(self._model.logits(hidden[last]), [Draw(SamplingParams(), position)] * len(rows))

    def prefill(self, prompts: list[list[int]], chunk_tokens: int) -> list[int]:
        tokens: list[int] = []
        for start in range(0, len(prompts[0]), chunk_tokens):
            tokens = self._step([prompt[start : start + chunk_tokens] for prompt in prompts], start)
        return tokens

    def decode(self, tokens: list[int], context: int, steps: int) -> None:
        for step in range(steps):
            tokens = self._step([[token] for token in tokens], context + step)


class Theirs:
    def __init__(self, folder: Path) -> None:
        self._model: Any = Qwen3_5ForCausalLM.from_pretrained(folder).eval()
        self._cache: Any = None

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        self._cache = out.past_key_values
        tokens: torch.Tensor = out.logits[:, -1].argmax(-1, keepdim=True)
        return tokens

    @torch.inference_mode()
    def decode(self, tokens: torch.Tensor, steps: int) -> None:
        for _ in range(steps):
            out = self._model(tokens, past_key_values=self._cache, use_cache=True)
            self._cache = out.past_key_values
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)


def _seconds(act: Callable[[], object]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _prompts(vocab_size: int, count: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    prompts: list[list[int]] = torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
    return prompts


def _prefill_row(model: HybridModel, theirs: Theirs, chunk_tokens: int, repetitions: int) -> Row:
    ours = Ours(model, 1)
    prompts = _prompts(model.config.vocab_size, 1, PROMPT_TOKENS)
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 1):
        pair = (_seconds(lambda: ours.prefill(prompts, chunk_tokens)), _seconds(lambda: theirs.prefill(prompts)))
        if repetition:  # the first warms up
            for kept, seconds in zip(times, pair, strict=True):
                kept.append(seconds * 1e3)
    name = f"prefill {PROMPT_TOKENS} tokens" + (f", chunks of {chunk_tokens}" if chunk_tokens < PROMPT_TOKENS else "")
    return Row(name, "ms", statistics.median(times[0]), statistics.median(times[1]))


def _decode_row(model: HybridModel, theirs: Theirs, batch: int, repetitions: int) -> Row:
    ours = Ours(model, batch)
    prompts = _prompts(model.config.vocab_size, batch, DECODE_CONTEXT_TOKENS)
    times: tuple[list[float], list[float]] = ([], [])
    for repetition in range(repetitions + 1):
        my_tokens, their_tokens = ours.prefill(prompts, DECODE_CONTEXT_TOKENS), theirs.prefill(prompts)
        pair = (
            _seconds(lambda tokens=my_tokens: ours.decode(tokens, DECODE_CONTEXT_TOKENS, DECODE_STEPS)),  # type: ignore[misc]
            _seconds(lambda tokens=their_tokens: theirs.decode(tokens, DECODE_STEPS)),  # type: ignore[misc]
        )
        if repetition:
            for kept, seconds in zip(times, pair, strict=True):
                kept.append(seconds / DECODE_STEPS * 1e3)
    return Row(f"decode step, batch {batch}", "ms", statistics.median(times[0]), statistics.median(times[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="checkpoint folder (default: the 121 M benchmark checkpoint)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.simplefilter("ignore", FutureWarning)  # transformers renames the cache's argument between versions
    folder = Path(args.model) if args.model else bench_checkpoint()
    model, theirs = load_model(ModelSource(path=str(folder))).model, Theirs(folder)
    rows = [_prefill_row(model, theirs, chunk, args.repetitions) for chunk in (PROMPT_TOKENS, 512)]
    rows += [_decode_row(model, theirs, batch, args.repetitions) for batch in (1, 8)]
    if args.json:
        print(json.dumps([vars(row) | {"ratio": row.ratio} for row in rows]))
        return
    print(f"{folder.name}, {args.threads} threads, medians of {args.repetitions}")
    print(f"{'':36}{'tandem':>12}{'transformers':>16}{'times faster':>16}")
    for row in rows:
        print(f"{row.name:36}{row.ours:9.1f} {row.unit}{row.theirs:13.1f} {row.unit}{row.ratio:16.2f}")


if __name__ == "__main__":
    main()

"""Conversations that grow: what a prefix cache saves, turn by turn.

    python -m bench.multiturn [--conversations 8] [--turns 4] [--json FILE]

A prefill and a decode worker in processes of their own, on the 121 M checkpoint, three times: with the cache off, with room,
and with so little that it evicts all the time. All conversations begin with the same instructions and run at once. The answers
of the first run stand in the later prompts of all three. Shown per turn: time to first token at the median, prompt tokens
computed and found; and how many answers differ from the first run's. In bfloat16 they do so without any cache too, since a
prompt's rows are rounded by the company that its chunks happen to have and random weights give near ties everywhere; for
equal answers take --dtype float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.checkpoints import bench_checkpoint
from bench.pair import WorkerPair, worker_pair
from tandem.config import CacheConfig, ModelSource, PrefillConfig, WorkerConfig
from tandem.request import Request, SamplingParams, StopRules

__all__ = ["Turn", "converse", "main"]

_VOCAB = 32000
_INSTRUCTIONS = 300
_OPENING = (150, 500)
_REPLY = (60, 200)
_ANSWER = 24
_EVERY = 512
# What one state of this checkpoint takes: 9 layers of 12 heads of 64 x 64 fp32 and a tail of 1,280 channels x 3 in bf16.
_STATE_GIB = 9 * (12 * 64 * 64 * 4 + 1280 * 3 * 2) / 2**30


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of a conversation. new_tokens: what is in none of its earlier prompts; the answer to them is new as well."""

    number: int
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    ttft_s: float
    answer: tuple[int, ...]


async def converse(pair: WorkerPair, number: int, turns: int, script: list[Turn] | None) -> list[Turn]:
    """The user's part depends on the conversation's number alone. script: the same conversation in an earlier run, whose
    answers stand in the prompts here too, so that one that differs does not change all that follow."""
    rng = random.Random(number)
    instructions = random.Random("instructions")
    prompt = [instructions.randrange(_VOCAB) for _ in range(_INSTRUCTIONS)]
    prompt += [rng.randrange(_VOCAB) for _ in range(rng.randint(*_OPENING))]
    seen, taken = 0, []
    for turn in range(turns):
        request = Request(f"{number}-{turn}", tuple(prompt), SamplingParams(), StopRules(_ANSWER))
        started_s = time.monotonic()
        outcome = await pair.generate(request)
        if outcome.failed is not None or outcome.first_token is None:
            raise RuntimeError(f"{request.request_id}: {outcome.failed}")
        answer = (outcome.first_token.token, *outcome.tokens)
        ttft_s = outcome.first_token_s - started_s
        taken.append(Turn(turn, len(prompt), len(prompt) - seen, outcome.first_token.cached_tokens, ttft_s, answer))
        seen = len(prompt)
        said = script[turn].answer if script else answer
        prompt += [*said, *(rng.randrange(_VOCAB) for _ in range(rng.randint(*_REPLY)))]
    return taken


Talks = list[list[Turn]]


async def _run(prefix_gib: float, args: argparse.Namespace, script: Talks | None) -> Talks:
    config = WorkerConfig(
        model=ModelSource(str(bench_checkpoint()), dtype=args.dtype, max_context_tokens=4096),
        cache=CacheConfig(budget_bytes=1 << 30, max_sequences=16, prefix_gib=prefix_gib),
        prefill=PrefillConfig(checkpoint_every_tokens=_EVERY, checkpoint_ends=not args.exact),
        threads=1,
    )
    async with worker_pair(config) as pair:
        scripts: Sequence[list[Turn] | None] = script or [None] * args.conversations
        return await asyncio.gather(*(converse(pair, i, args.turns, said) for i, said in enumerate(scripts)))


def _show(name: str, talks: Talks) -> None:
    print(f"\n{name}\n  turn  prompt  computed  found  TTFT p50")
    for same in zip(*talks, strict=True):
        prompt, cached = sum(t.prompt_tokens for t in same), sum(t.cached_tokens for t in same)
        ttft_s = statistics.median(t.ttft_s for t in same)
        print(f"  {same[0].number + 1:4d}  {prompt:6d}  {prompt - cached:8d}  {cached:5d}  {ttft_s:7.2f} s")


def _only_new(talks: Talks) -> bool:
    """From the second turn on, no more is computed than what is new and one checkpoint interval."""
    later = [turn for talk in talks for turn in talk[1:]]
    return all(turn.prompt_tokens - turn.cached_tokens <= turn.new_tokens + _EVERY for turn in later)


def main() -> int:
    parser = argparse.ArgumentParser(description="Conversations with and without the prefix cache.")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--dtype", default="auto", help="auto is the checkpoint's bfloat16")
    parser.add_argument("--repeat", action="store_true", help="run without a cache twice: what differs by company alone")
    parser.add_argument("--json", type=Path, help="write every turn there")
    parser.add_argument("--exact", action="store_true", help="states only where every bit is that of the uncut prompt")
    args = parser.parse_args()
    budgets = {"off": 0.0, "room": 1.0, "evicting": 2.5 * _STATE_GIB}
    if args.repeat:
        budgets = {"off": 0.0, "off again": 0.0, **budgets}
    runs: dict[str, Talks] = {}
    for name, gib in budgets.items():
        runs[name] = asyncio.run(_run(gib, args, runs.get("off")))
        _show(f"cache {name}", runs[name])
    answers = {name: [turn.answer for talk in talks for turn in talk] for name, talks in runs.items()}
    differing = {name: sum(a != b for a, b in zip(given, answers["off"], strict=True)) for name, given in answers.items()}
    only_new = _only_new(runs["room"])
    print(f"\nanswers that differ from those without a cache, of {len(answers['off'])}: {differing}")
    print(f"with room, later turns compute only what is new, and at most {_EVERY} tokens more: {only_new}")
    if args.json:
        args.json.write_text(json.dumps({name: [[asdict(t) for t in talk] for talk in talks] for name, talks in runs.items()}))
    return 0 if only_new and not any(differing.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The held-out questions through a running cluster, next to transformers: `python -m tools.train_embedded.served HOST:PORT`.

Each goes as a chat message through prefill worker, NIXL and decode worker, greedily, and to transformers' `generate` on the
same checkpoint in fp32. Every answer must be the same text on both sides, right or wrong: exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from tandem.client import AsyncClient
from tandem.errors import TandemError
from tandem.model.embedded import embedded_checkpoint
from tools.train_embedded.evaluate import chat_ids
from tools.train_embedded.questions import Asked, held_out, shares
from tools.train_embedded.recall import DISTANCES

__all__ = ["Comparison", "ask_cluster", "ask_transformers", "compare", "main"]

_MOST_TOKENS = 64
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Comparison:
    """Shares of right answers by group; differing: (question, the cluster's answer, transformers') where they are not equal."""

    cluster: dict[str, float]
    transformers: dict[str, float]
    differing: list[tuple[str, str, str]]


def compare(asked: Sequence[Asked], cluster: Sequence[str], transformers: Sequence[str]) -> Comparison:
    def right(answers: Sequence[str]) -> dict[str, float]:
        return shares(asked, [question.answer == answer for question, answer in zip(asked, answers, strict=True)])

    differing = [
        (question.prompt, ours, theirs)
        for question, ours, theirs in zip(asked, cluster, transformers, strict=True)
        if ours != theirs
    ]
    return Comparison(right(cluster), right(transformers), differing)


async def ask_cluster(client: AsyncClient, asked: Sequence[Asked]) -> list[str]:
    """The answers, a few at once. Raises TandemError: a request failed."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(question: Asked) -> str:
        async with gate:
            message = {"role": "user", "content": question.prompt}
            return (await client.generate([message], temperature=0.0, max_new_tokens=_MOST_TOKENS)).text

    return list(await asyncio.gather(*map(ask, asked)))


@torch.inference_mode()
def ask_transformers(folder: Path, asked: Sequence[Asked]) -> list[str]:
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = []
    for question in asked:
        ids = torch.tensor([chat_ids(tokenizer, question.prompt)])
        found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=_MOST_TOKENS)
        answers.append(tokenizer.decode(found[0, ids.shape[1] :].tolist(), skip_special_tokens=True))
    return answers


async def _through(address: str, asked: Sequence[Asked]) -> list[str]:
    async with AsyncClient(address) as client:
        return await ask_cluster(client, asked)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare a cluster's answers to the held-out questions with transformers'.")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--folder", type=Path, default=None, help="what the cluster serves (default: the embedded model)")
    parser.add_argument("--number", type=int, default=100, help="questions per group")
    parser.add_argument("--distances", type=int, nargs="+", default=list(DISTANCES))
    parser.add_argument("--json", type=Path, default=None, help="write the comparison here too")
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f"--number must be at least 1, not {args.number}")
    torch.set_num_threads(1)
    folder = args.folder or embedded_checkpoint()
    asked = held_out(Tokenizer.from_file(str(folder / "tokenizer.json")), args.number, args.distances)
    try:
        answers = asyncio.run(_through(args.address, asked))
    except TandemError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    found = compare(asked, answers, ask_transformers(folder, asked))
    for group, share in found.cluster.items():
        print(f"| {group:12} | cluster {share:6.1%} | transformers {found.transformers[group]:6.1%} |")
    for prompt, ours, theirs in found.differing:
        print(f"differs  …{prompt[-80:]!r}: {ours!r}, transformers {theirs!r}")
    print(f"{len(asked) - len(found.differing)} of {len(asked)} answers are equal")
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if found.differing else 0


if __name__ == "__main__":
    sys.exit(main())

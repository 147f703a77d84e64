"""Held-out evaluation of an exported folder: `python -m tools.train_embedded.evaluate FOLDER`.

Perplexity on unseen documents, share of questions answered word for word by distance, and how often the MTP layer's first
draft is the token that greedy decoding takes. Deterministic: fixed seeds, greedy, fp32.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.train_embedded.batches import Stage, make_batch
from tools.train_embedded.checkpoint import load_folder
from tools.train_embedded.documents import IM_END, IM_START, Kind
from tools.train_embedded.model import TrainedModel
from tools.train_embedded.questions import HELD_OUT_SEED, held_out, shares
from tools.train_embedded.recall import DISTANCES, recall_questions

__all__ = ["Evaluation", "chat_ids", "evaluate", "main"]

_CHUNK = 32  # lengths are padded to multiples of the delta rule's chunk
_FREE_PROMPTS = ("Tell me a story about Mia.", "Tell me a story about Tom and a lamp.", "What can you do?", "Hello!")

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Perplexities per token; accuracies and acceptance in 0..1; samples are (prompt, greedy answer)."""

    perplexity_prose: float
    perplexity_answers: float
    recall: dict[int, float]
    words: float
    sums: float
    mtp_acceptance: float
    samples: list[tuple[str, str]]


def chat_ids(tokenizer: Tokenizer, prompt: str, answer: str = "") -> list[int]:
    """The chat template's ids for one user message, and the beginning of the answer."""
    text = f"{IM_START}user\n{prompt}{IM_END}\n{IM_START}assistant\n{answer}"
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def _padded(ids: Sequence[int]) -> Tensor:
    return functional.pad(torch.tensor([ids]), (0, -len(ids) % _CHUNK))


def _answered(logits: Logits, tokenizer: Tokenizer, prompt: str, answer: str) -> bool:
    """Whether greedy decoding gives this answer and then stops: each of its tokens is the likeliest after those before."""
    start = len(chat_ids(tokenizer, prompt))
    ids = chat_ids(tokenizer, prompt, answer + IM_END)
    likeliest = logits(_padded(ids))[0, start - 1 : len(ids) - 1].argmax(-1)
    return likeliest.tolist() == ids[start:]


def _generate(logits: Logits, tokenizer: Tokenizer, prompt: str, most: int) -> tuple[list[int], int]:
    """Ids of prompt and greedy answer (without the end), and the prompt's length. Recomputes the prefix at each token."""
    ids = chat_ids(tokenizer, prompt)
    start, end = len(ids), tokenizer.token_to_id(IM_END)
    for _ in range(most):
        token = int(logits(_padded(ids))[0, len(ids) - 1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids, start


def _perplexities(logits: Logits, tokenizer: Tokenizer) -> tuple[float, float]:
    losses: dict[bool, list[Tensor]] = {True: [], False: []}
    for step in range(12):
        batch = make_batch(tokenizer, Stage(1, (512,), (1.0,)), 4096, HELD_OUT_SEED, step)
        kinds = batch.kinds[:, 1:]
        loss = functional.cross_entropy(logits(batch.tokens)[:, :-1].transpose(1, 2), batch.tokens[:, 1:], reduction="none")
        losses[True].append(loss[kinds == Kind.PROSE])
        losses[False].append(loss[(kinds >= Kind.ANSWER) & (kinds <= Kind.SUM)])
    return math.exp(torch.cat(losses[True]).mean()), math.exp(torch.cat(losses[False]).mean())


def _acceptance(model: TrainedModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> tuple[float, list[tuple[str, str]]]:
    """Share of greedily decoded tokens, from the second on, that the MTP layer drafts one step earlier."""
    right = total = 0
    samples = []
    for prompt in prompts:
        ids, start = _generate(lambda tokens: model.logits(model.hidden(tokens, False)[0]), tokenizer, prompt, 80)
        samples.append((prompt, tokenizer.decode(ids[start:])))
        ids.append(tokenizer.token_to_id(IM_END))
        drafts = model.logits(model.hidden(_padded(ids))[1])[0, start - 1 : len(ids) - 2].argmax(-1)
        right += sum(a == b for a, b in zip(drafts.tolist(), ids[start + 1 :], strict=True))
        total += len(ids) - start - 1
    return right / total, samples


@torch.inference_mode()
def evaluate(logits: Logits, model: TrainedModel, tokenizer: Tokenizer, number: int) -> Evaluation:
    """logits: [1, T] tokens to [1, T, vocabulary]. model gives the MTP drafts. number: questions per distance."""
    prose, answers = _perplexities(logits, tokenizer)
    questions = held_out(tokenizer, number)
    right = shares(questions, [_answered(logits, tokenizer, q.prompt, q.answer) for q in questions])
    recall = {distance: right[f"recall {distance}"] for distance in DISTANCES}
    asked = [q.prompt for distance in (32, 128) for q in recall_questions(tokenizer, distance, 20, seed=2)]
    acceptance, samples = _acceptance(model, tokenizer, [*_FREE_PROMPTS, *asked])
    return Evaluation(prose, answers, recall, right["words"], right["sums"], acceptance, samples[:12])


def _transformers_logits(folder: Path) -> Logits:
    from transformers import Qwen3_5ForCausalLM

    model = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return lambda tokens: model(tokens).logits


def _print(result: Evaluation) -> None:
    rows = [
        ("perplexity, prose", f"{result.perplexity_prose:.2f}"),
        ("perplexity, answers", f"{result.perplexity_answers:.3f}"),
        *((f"recall at {distance} tokens", f"{share:.1%}") for distance, share in result.recall.items()),
        ("copying, reversing, lists", f"{result.words:.1%}"),
        ("sums", f"{result.sums:.1%}"),
        ("MTP first draft accepted", f"{result.mtp_acceptance:.1%}"),
    ]
    for name, value in rows:
        print(f"| {name:28} | {value:>8} |")
    for prompt, answer in result.samples:
        print(f"\n> {prompt[-160:]}\n{answer}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Evaluate an exported checkpoint on held-out text.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", choices=("trainer", "transformers"), default="transformers")
    parser.add_argument("--number", type=int, default=100, help="questions per distance")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, default=None, help="write the numbers here too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    TrainedModel.set_compute_dtype(torch.float32)
    model, tokenizer = load_folder(args.folder)
    own: Logits = lambda tokens: model.logits(model.hidden(tokens, False)[0])  # noqa: E731
    result = evaluate(own if args.backend == "trainer" else _transformers_logits(args.folder), model, tokenizer, args.number)
    _print(result)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(result), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

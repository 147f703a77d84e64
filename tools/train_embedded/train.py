"""Train the embedded checkpoint: `python -m tools.train_embedded.train --out FOLDER`. Resumes from FOLDER/state.pt.

With `python -m torch.distributed.run --nproc-per-node 2 -m tools.train_embedded.train …` the rows of each batch are shared out,
which suits two busy cores better than two threads. The run stops between steps while the pause file exists. Batches depend on
the seed and the step alone, so a resumed run sees the data it would have seen.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from tools.train_embedded.batches import Batch, make_batch, stage_at
from tools.train_embedded.documents import Kind
from tools.train_embedded.model import TrainedModel
from tools.train_embedded.muon import Muon
from tools.train_embedded.recipe import (
    CONTEXT_SHARE,
    CURRICULUM,
    KIND_WEIGHTS,
    MTP_FROM,
    MTP_WEIGHT,
    STEPS,
    Schedule,
    architecture,
)
from tools.train_embedded.tokenizer import train_tokenizer

__all__ = ["main"]

_ADAM_PARTS = ("in_proj_a", "in_proj_b", "embed_tokens", "conv1d")


@dataclass(frozen=True, slots=True)
class Arguments:
    out: Path
    steps: int
    tokens_per_batch: int
    seed: int
    lr: float
    vocab_size: int
    threads: int
    compiled: bool
    pause_file: Path | None
    checkpoint_s: float
    log_every: int


def _arguments() -> Arguments:
    parser = argparse.ArgumentParser(description="Train the embedded checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder of state.pt, tokenizer.json and log.jsonl")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--compile", dest="compiled", action="store_true", help="compile layers; minutes at start, faster steps"
    )
    parser.add_argument("--pause-file", type=Path, default=None, help="wait between steps while this file exists")
    parser.add_argument("--checkpoint-s", type=float, default=240.0, help="seconds between checkpoints")
    parser.add_argument("--log-every", type=int, default=25, help="steps between lines of log.jsonl")
    return Arguments(**vars(parser.parse_args()))


def _tokenizer(args: Arguments) -> Tokenizer:
    """That of the run; the first rank makes it, the others wait."""
    path = args.out / "tokenizer.json"
    if not path.is_file() and (not dist.is_initialized() or dist.get_rank() == 0):
        train_tokenizer(args.vocab_size, args.seed, documents=6000).save(str(path))
    if dist.is_initialized():
        dist.barrier()
    return Tokenizer.from_file(str(path))


def _optimizers(model: TrainedModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices; AdamW for the embedding, the convolutions, the small projections and the vectors."""
    matrices, rest = [], []
    for name, param in model.named_parameters():
        is_matrix = param.ndim == 2 and not any(part in name for part in _ADAM_PARTS)
        (matrices if is_matrix else rest).append(param)
    return [
        Muon(matrices, lr, weight_decay=0.05),
        torch.optim.AdamW(rest, lr, betas=(0.9, 0.98), weight_decay=0.0, foreach=True),
    ]


def _head(embedding: Tensor, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [N] and correctness [N] of hidden states [N, D] against `targets` [N]."""
    logits = functional.linear(hidden.bfloat16(), embedding.bfloat16()).float()
    return functional.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets


class _Meter:
    """Means per class of token and sequence length since the last report."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, values: Tensor) -> None:
        self._sums[name] += float(values.float().sum())
        self._counts[name] += values.numel()

    def report(self) -> dict[str, float]:
        result = {
            name: round(total / self._counts[name], 4) for name, total in sorted(self._sums.items()) if self._counts[name]
        }
        self._sums.clear()
        self._counts.clear()
        return result


_WEIGHTS = torch.tensor([KIND_WEIGHTS[kind] for kind in Kind])


def _loss(model: TrainedModel, head: Callable[..., Any], batch: Batch, weight: float, with_mtp: bool, meter: _Meter) -> Tensor:
    """The loss to differentiate. Position t predicts token t + 1, the MTP layer token t + 2.

    weight: what the weighted losses are divided by. It is the same on every rank, so that a rank whose rows hold little to
    look up does not count as much as one whose rows are full of questions.
    """
    length = batch.tokens.shape[1]
    hidden, mtp_hidden = model.hidden(batch.tokens, with_mtp)
    total = torch.zeros(())
    for ahead, states, share in ((1, hidden, 1.0), (2, mtp_hidden, MTP_WEIGHT)):
        if states is None:
            continue
        kinds = batch.scored.roll(-ahead, 1)
        kinds[:, -ahead:] = Kind.PAD
        chosen = kinds.flatten().nonzero().squeeze(1)
        kinds = kinds.flatten()[chosen]
        targets = batch.tokens.roll(-ahead, 1).flatten()[chosen]
        losses, right = head(model.model.embed_tokens.weight, states.flatten(0, 1)[chosen], targets)
        total = total + share * (losses * _WEIGHTS[kinds]).sum() / weight
        suffix = "" if ahead == 1 else " +1"
        for kind in list(Kind)[1:]:
            meter.add(f"loss {kind.name.lower()}{suffix}", losses.detach()[kinds == kind])
            if kind in (Kind.ANSWER, Kind.RECALL, Kind.COPY, Kind.SUM):
                meter.add(f"right {kind.name.lower()}{suffix} @{length}", right[kinds == kind])
    return total


def _save(path: Path, state: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def _average_gradients(model: TrainedModel) -> None:
    """Mean over the ranks. Layers without a gradient have none on any rank."""
    if not dist.is_initialized():
        return
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def _wait_while(pause_file: Path | None) -> None:
    while pause_file is not None and pause_file.exists():
        time.sleep(2.0)


def _train(args: Arguments) -> None:
    tokenizer = _tokenizer(args)
    torch.manual_seed(args.seed)
    model = TrainedModel(architecture(tokenizer.get_vocab_size()))
    optimizers = _optimizers(model, args.lr)
    start, state_path = 0, args.out / "state.pt"
    if state_path.is_file():
        state = torch.load(state_path, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        start = state["step"]
    head = torch.compile(_head, dynamic=True) if args.compiled else _head
    if args.compiled:
        model.compile_layers()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, from step {start}", flush=True)
    _loop(args, tokenizer, model, optimizers, head, start)


def _loop(
    args: Arguments,
    tokenizer: Tokenizer,
    model: TrainedModel,
    optimizers: list[torch.optim.Optimizer],
    head: Callable[..., Any],
    start: int,
) -> None:
    schedule, meter = Schedule(args.steps), _Meter()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    saved_at = reported_at = time.monotonic()

    def save(step: int) -> None:
        optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
        _save(args.out / "state.pt", {"model": model.state_dict(), "optimizers": optimizer_states, "step": step})

    for step in range(start, args.steps):
        if rank == 0 and args.pause_file is not None and args.pause_file.exists():
            save(step)  # a paused run can be ended without loss
        _wait_while(args.pause_file)
        stage = stage_at(CURRICULUM, step)
        batch = make_batch(tokenizer, stage, args.tokens_per_batch, args.seed, step, CONTEXT_SHARE)
        weight = float(_WEIGHTS[batch.scored].sum()) / ranks
        _loss(model, head, batch.part(rank, ranks), weight, step >= MTP_FROM, meter).backward()
        _average_gradients(model)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * schedule.factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        now = time.monotonic()
        if rank == 0 and (step + 1) % args.log_every == 0:
            speed = round(args.log_every * args.tokens_per_batch / (now - reported_at))
            line = {
                "step": step + 1,
                "tokens": (step + 1) * args.tokens_per_batch,
                "tokens_per_s": speed,
                "norm": round(float(norm), 3),
            }
            with (args.out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(line | meter.report()) + "\n")
            reported_at = now
        if rank == 0 and now - saved_at > args.checkpoint_s:
            save(step + 1)
            saved_at = now
    if rank == 0:
        save(args.steps)


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if dist.is_torchelastic_launched():
        # A pause may be long, and the ranks do not see it at the same moment.
        dist.init_process_group("gloo", timeout=timedelta(hours=24))
    _train(args)


if __name__ == "__main__":
    main()

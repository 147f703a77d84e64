"""The trained modules compute what transformers and the recurrence compute, and a resumed run is the run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tools.train_embedded import train
from tools.train_embedded.batches import Stage
from tools.train_embedded.delta_rule import gated_delta_rule
from tools.train_embedded.model import TrainedModel
from tools.train_embedded.muon import Muon
from tools.train_embedded.recipe import CURRICULUM, MTP_FROM, STEPS, Schedule, architecture

HEADS, GROUPS, KEY, VALUE, TIME, CHUNK = 4, 2, 16, 24, 64, 16
CONFIG = architecture(300)


def inputs() -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    q = torch.randn(2, TIME, GROUPS, KEY, generator=made)
    k = torch.randn(2, TIME, GROUPS, KEY, generator=made)
    v = torch.randn(2, TIME, HEADS, VALUE, generator=made)
    g = -torch.rand(2, TIME, HEADS, generator=made) * 0.2
    beta = torch.rand(2, TIME, HEADS, generator=made)
    return [x.double().requires_grad_() for x in (q, k, v, g, beta)]


def by_recurrence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The rule as it is defined, one position after another."""
    q = functional.normalize(q, dim=-1).repeat_interleave(HEADS // GROUPS, 2) * KEY**-0.5
    k = functional.normalize(k, dim=-1).repeat_interleave(HEADS // GROUPS, 2)
    state = torch.zeros(2, HEADS, KEY, VALUE, dtype=q.dtype)
    outputs = []
    for t in range(TIME):
        state = state * g[:, t].exp()[..., None, None]
        written = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + k[:, t, :, :, None] * written[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1)


def test_the_chunked_delta_rule_and_its_gradients_are_those_of_the_recurrence() -> None:
    ours, theirs = inputs(), inputs()
    out, expected = gated_delta_rule(*ours, CHUNK), by_recurrence(*theirs)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    for grad, wanted in zip(
        torch.autograd.grad((out * weight).sum(), ours), torch.autograd.grad((expected * weight).sum(), theirs), strict=True
    ):
        torch.testing.assert_close(grad, wanted, rtol=0, atol=1e-9)


@pytest.fixture
def in_fp32() -> Any:
    TrainedModel.set_compute_dtype(torch.float32)
    yield
    TrainedModel.set_compute_dtype(torch.bfloat16)


@pytest.mark.usefixtures("in_fp32")
def test_transformers_computes_the_same_logits_from_the_state_dict() -> None:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    model = TrainedModel(CONFIG)
    with torch.no_grad():
        for param in model.parameters():
            param += torch.randn_like(param) * 0.05
    theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIG)).eval()
    found = theirs.load_state_dict({n: t for n, t in model.state_dict().items() if not n.startswith("mtp.")}, strict=False)
    assert (found.missing_keys, found.unexpected_keys) in (([], []), (["lm_head.weight"], []))
    tokens = torch.randint(0, 300, (2, 96), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, expected = model.logits(model.hidden(tokens, with_mtp=False)[0]), theirs(tokens).logits
    assert ((ours - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_muon_step_has_all_its_singular_values_near_one() -> None:
    param = torch.nn.Parameter(torch.zeros(24, 40))
    param.grad = torch.randn(24, 40, generator=torch.Generator().manual_seed(3)) * 1e-3
    Muon([param], lr=1.0).step()
    values = torch.linalg.svdvals(param.detach() / (0.2 * 40**0.5))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_before_the_decay_the_schedule_does_not_know_when_the_run_ends() -> None:
    short, long = Schedule(1000, decay=0.2), Schedule(5000, decay=0.2)
    assert [short.factor(step) for step in range(800)] == [long.factor(step) for step in range(800)]
    assert short.factor(0) < 0.05
    assert short.factor(999) == pytest.approx(0.05)


def test_the_curriculum_covers_the_run() -> None:
    ends = [stage.until for stage in CURRICULUM]
    assert ends == sorted(set(ends))
    assert ends[-1] == STEPS > MTP_FROM
    for stage in CURRICULUM:
        assert sum(stage.shares) == pytest.approx(1.0)
        assert len(stage.lengths) == len(stage.shares)


@pytest.mark.slow
def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "CURRICULUM", (Stage(1, (64,), (1.0,)),))
    monkeypatch.setattr(train, "MTP_FROM", 1)

    def run(folder: Path, steps: int) -> dict[str, Any]:
        words = ["train", "--out", str(folder), "--tokens-per-batch", "128", "--threads", "1", "--vocab-size", "400"]
        monkeypatch.setattr(sys, "argv", [*words, "--steps", str(steps)])
        train.main()
        state: dict[str, Any] = torch.load(folder / "state.pt", weights_only=True)
        return state

    monkeypatch.setattr(train, "Schedule", lambda steps: replace(Schedule(4), warmup_steps=1))
    monkeypatch.setattr(train, "train_tokenizer", lambda size, seed, documents: _TOKENIZER(size, seed, documents=60))
    whole = run(tmp_path / "whole", 3)
    run(tmp_path / "parts", 2)
    parts = run(tmp_path / "parts", 3)
    assert whole["step"] == parts["step"] == 3
    for name, tensor in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], tensor, rtol=0, atol=0)


_TOKENIZER = train.train_tokenizer

"""The chunked and the one-token form against the recurrence written out token by token in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tandem.kernels.torch_cpu import TorchCpuKernels
from tandem.model.batch import ForwardBatch, SequenceChunk

KERNELS = TorchCpuKernels(torch.float32)
J, V, P, Q, C, W = 2, 6, 8, 12, 20, 4


def plan_of(spans: list[tuple[int, int, int]]) -> object:
    """spans: (context, new tokens, slot)."""
    chunks = [SequenceChunk([0] * count, context, list(range(40)), slot) for context, count, slot in spans]
    return KERNELS.plan(ForwardBatch.build(chunks, 16), 16)


def inputs(num_tokens: int, decay: float = 1.0) -> list[torch.Tensor]:
    """q, k, v, log decay, beta."""
    g = torch.Generator().manual_seed(num_tokens)
    q, k = (torch.randn(num_tokens, J, P, generator=g) for _ in range(2))
    v = torch.randn(num_tokens, V, Q, generator=g)
    log_decay = -decay * torch.rand(num_tokens, V, generator=g)
    return [q, k, v, log_decay, torch.rand(num_tokens, V, generator=g)]


def token_by_token(tensors: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, decay, beta = (t.double() for t in tensors)
    q = functional.normalize(q, dim=-1) * P**-0.5
    k = functional.normalize(k, dim=-1)
    q, k = (x.repeat_interleave(V // J, dim=1) for x in (q, k))
    state = state.double()
    out = []
    for t in range(len(q)):
        state = state * decay[t].exp()[:, None, None]
        delta = beta[t][:, None] * (v[t] - torch.einsum("vp,vpq->vq", k[t], state))
        state = state + torch.einsum("vp,vq->vpq", k[t], delta)
        out.append(torch.einsum("vp,vpq->vq", q[t], state))
    return torch.stack(out).float(), state.float()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 63, 64, 65, 127, 128, 129, 200])
@pytest.mark.parametrize("context", [0, 40])
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
def test_output_and_state_are_those_of_the_recurrence(num_tokens: int, context: int, decay: float) -> None:
    states = torch.randn(3, V, P, Q)
    initial = states[1].clone() if context else torch.zeros(V, P, Q)
    tensors = inputs(num_tokens, decay)
    want_out, want_state = token_by_token(tensors, initial)
    out = KERNELS.delta_rule(*tensors, states, plan_of([(context, num_tokens, 1)]))
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(states[1], want_state, rtol=1e-4, atol=2e-5)


def test_equal_keys_without_decay_stay_stable() -> None:
    """The triangular system is at its worst here: every key reads every earlier one in full."""
    tensors = inputs(128)
    tensors[1] = tensors[1][:1].expand(128, -1, -1).contiguous()
    tensors[3].zero_()
    tensors[4].fill_(1.0)
    states = torch.zeros(1, V, P, Q)
    want_out, want_state = token_by_token(tensors, states[0])
    out = KERNELS.delta_rule(*tensors, states, plan_of([(0, 128, 0)]))
    torch.testing.assert_close(out, want_out, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[0], want_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", [[2, 3, 4], [4, 0, 2]], ids=["adjacent", "scattered"])
def test_a_decode_step_updates_exactly_its_slots(slots: list[int]) -> None:
    states = torch.randn(5, V, P, Q)
    before = states.clone()
    tensors = inputs(3)
    out = KERNELS.delta_rule(*tensors, states, plan_of([(9, 1, slot) for slot in slots]))
    for i, slot in enumerate(slots):
        want_out, want_state = token_by_token([t[i : i + 1] for t in tensors], before[slot])
        torch.testing.assert_close(out[i : i + 1], want_out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[slot], want_state, rtol=1e-5, atol=1e-6)
    others = [slot for slot in range(5) if slot not in slots]
    assert torch.equal(states[others], before[others])


def conv_reference(history: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    padded = functional.pad(history.T, (W - 1, 0))
    return functional.silu(functional.conv1d(padded[None], weight.T[:, None], groups=C))[0].T


@pytest.mark.parametrize("splits", [[1], [2], [3], [4], [1, 1, 1, 1, 1], [2, 1, 3], [1, 5], [30, 1, 1, 2]])
@pytest.mark.parametrize("slot", [0, 2])
def test_convolution_over_chunks_is_the_convolution_over_all(splits: list[int], slot: int) -> None:
    total = sum(splits)
    x, weight = torch.randn(total, C), torch.randn(W, C)
    tails = torch.full((3, C, W - 1), float("nan"))
    parts, done = [], 0
    for count in splits:
        parts.append(KERNELS.causal_conv(x[done : done + count], weight, tails, plan_of([(done, count, slot)])))
        done += count
    torch.testing.assert_close(torch.cat(parts), conv_reference(x, weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(tails[slot], functional.pad(x.T, (W - 1, 0))[:, -(W - 1) :])


def test_convolution_of_a_ragged_batch_keeps_sequences_apart() -> None:
    weight = torch.randn(W, C)
    xs = [torch.randn(n, C) for n in (2, 1, 7)]
    tails = torch.full((3, C, W - 1), float("nan"))
    out = KERNELS.causal_conv(torch.cat(xs), weight, tails, plan_of([(0, 2, 1), (0, 1, 2), (0, 7, 0)]))
    torch.testing.assert_close(out, torch.cat([conv_reference(x, weight) for x in xs]), rtol=1e-5, atol=1e-5)
    for x, slot in zip(xs, (1, 2, 0), strict=True):
        assert torch.equal(tails[slot], functional.pad(x.T, (W - 1, 0))[:, -(W - 1) :])

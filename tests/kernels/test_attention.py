"""Paged attention against dense attention over the same history."""

from __future__ import annotations

import math

import pytest
import torch

from tandem.kernels.torch_cpu import TorchCpuKernels
from tandem.model.batch import ForwardBatch, SequenceChunk

KERNELS = TorchCpuKernels(torch.float32)
H, G, D, BLOCK = 6, 2, 16, 4
BATCHES = {
    "fresh prompt": [(0, 9)],
    "one token fresh": [(0, 1)],
    "decode step": [(1, 1), (7, 1), (8, 1), (20, 1)],
    "continued chunk": [(5, 9)],
    "chunk that ends a block": [(4, 4)],
    "all kinds together": [(0, 3), (6, 1), (0, 1), (11, 6)],
}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q `[n, H, D]`, k and v `[L, G, D]`, the last n of L positions."""
    k, v = (x.double().repeat_interleave(H // G, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) / math.sqrt(D)
    future = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).float()


@pytest.mark.parametrize("name", BATCHES)
def test_paged_attention_is_dense_attention(name: str) -> None:
    torch.manual_seed(0)
    shapes = BATCHES[name]
    num_blocks = 40
    kv = torch.full((num_blocks, 2, BLOCK, G, D), math.nan)
    free = torch.randperm(num_blocks).tolist()
    chunks, histories = [], []
    for slot, (context, new) in enumerate(shapes):
        blocks = [free.pop() for _ in range(-(-(context + new) // BLOCK))]
        k, v = torch.randn(context + new, G, D), torch.randn(context + new, G, D)
        for position in range(context):
            kv[blocks[position // BLOCK], 0, position % BLOCK] = k[position]
            kv[blocks[position // BLOCK], 1, position % BLOCK] = v[position]
        chunks.append(SequenceChunk([0] * new, context, blocks, slot))
        histories.append((torch.randn(new, H, D), k, v))
    plan = KERNELS.plan(ForwardBatch.build(chunks, BLOCK), BLOCK)
    q = torch.cat([q for q, _, _ in histories])
    new_k, new_v = (torch.cat([h[i][c.context_tokens :] for h, c in zip(histories, chunks, strict=True)]) for i in (1, 2))
    gate = torch.randn(len(q), H * D)

    out = KERNELS.attention(q, new_k, new_v, gate, kv, plan)

    want = torch.cat([dense(*history) for history in histories]).flatten(1) * gate.sigmoid()
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    for chunk, (_, k, v) in zip(chunks, histories, strict=True):
        stored = kv[list(chunk.block_ids)]
        assert torch.equal(stored[:, 0].flatten(0, 1)[: len(k)], k)
        assert torch.equal(stored[:, 1].flatten(0, 1)[: len(v)], v)
    written = sum(context + new for context, new in shapes) * 2 * G * D
    assert int((~kv.isnan()).sum()) == written


def test_rotation_is_that_of_halves_and_leaves_the_rest() -> None:
    x, scale = torch.randn(5, H, D), torch.rand(H, D)
    angles = torch.randn(5, 3)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    out = KERNELS.norm_rope(x, scale, 1e-6, cos, sin)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale
    first, second, rest = normed[..., :3], normed[..., 3:6], normed[..., 6:]
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    want = torch.cat([first * c - second * s, second * c + first * s, rest], -1)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)

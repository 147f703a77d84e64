"""Where a prompt leaves checkpoints of its recurrent state. Pure.

A checkpoint is as large as the KV of thousands of tokens, so it is taken where it is likely to be used again:

- at the prompt's very end: the next turn of a conversation begins there. It costs no further step; the last block, only
  partly filled, is kept with it;
- where another prompt left this one's path: keys and values are there and the state is not, so the boundary is shared;
- at regular places along a long prompt, the further apart the longer it is.

The last two cut the chunk that would pass over them.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CheckpointPolicy"]


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """every_tokens: distance of the regular ones; a multiple of what the kernels compute at a time keeps every bit of the
    prompt. at_ends: also at ends and shared boundaries, wherever they lie. most_per_prompt: regular ones of one prompt."""

    every_tokens: int
    at_ends: bool
    most_per_prompt: int

    def places(self, num_tokens: int, hit_tokens: int, kv_tokens: int, block_size_tokens: int) -> tuple[int, ...]:
        """Positions after `hit_tokens`, ascending, up to `num_tokens`, where a prompt of so many tokens leaves its state.

        hit_tokens: where its computation starts. kv_tokens: so far its keys and values were in the cache.
        """
        if self.most_per_prompt < 1:
            return ()
        step = self._distance(num_tokens, block_size_tokens)
        places = set(range(hit_tokens // step * step + step, num_tokens, step))
        if self.at_ends:
            if self._is_worth_it(kv_tokens, hit_tokens, block_size_tokens) and kv_tokens < num_tokens:
                places.add(kv_tokens)
            if num_tokens - hit_tokens >= block_size_tokens:
                places.add(num_tokens)
        elif num_tokens % step == 0:
            places.add(num_tokens)
        return tuple(sorted(places))

    def _distance(self, num_tokens: int, block_size_tokens: int) -> int:
        """Whole blocks, so that every place but the end stands at the end of a full block."""
        step = -(-max(1, self.every_tokens) // block_size_tokens) * block_size_tokens
        return step * max(1, -(-num_tokens // (step * self.most_per_prompt)))

    def _is_worth_it(self, kv_tokens: int, hit_tokens: int, block_size_tokens: int) -> bool:
        """A step of its own is spent on it, so it must save a good part of what a regular one does."""
        return kv_tokens - hit_tokens >= max(block_size_tokens, self.every_tokens // 4)

"""What comes to a simulated fleet: requests at random times, of long-tailed lengths, many of which begin alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.fleet_workers import Costs, Sizes
from tandem.config import DecodeConfig, PrefillConfig
from tandem.request import ServiceClass

__all__ = ["Ask", "Fleet", "requests"]


@dataclass(frozen=True, slots=True)
class Fleet:
    """load: of the prefill pool, without its caches."""

    num_prefill: int = 64
    num_decode: int = 64
    num_requests: int = 100_000
    load: float = 0.8
    seed: int = 1
    num_prefixes: int = 3000
    sizes: Sizes = field(default_factory=Sizes)
    costs: Costs = field(default_factory=Costs)
    prefill: PrefillConfig = field(default_factory=lambda: PrefillConfig(chunk_tokens=2048, checkpoint_every_tokens=2048))
    decode: DecodeConfig = field(default_factory=DecodeConfig)


@dataclass(frozen=True, slots=True)
class Ask:
    """wait_s: after the one before it."""

    wait_s: float
    prompt: tuple[int, ...]
    answer_tokens: int
    service_class: ServiceClass


def requests(fleet: Fleet) -> Iterator[Ask]:
    """The same ones for the same fleet, made one by one."""
    rng = random.Random(fleet.seed)
    lengths = [_length(rng, 900, 1.0, 16_000) for _ in range(fleet.num_prefixes)]
    popularity = [1 / (rank + 10) for rank in range(fleet.num_prefixes)]
    picks = rng.choices(range(fleet.num_prefixes), popularity, k=fleet.num_requests)
    shared = [rng.random() < 0.75 for _ in range(fleet.num_requests)]
    own = [_length(rng, 500, 1.2, 30_000) for _ in range(fleet.num_requests)]
    tokens = sum(own) + sum(lengths[pick] for pick, is_shared in zip(picks, shared, strict=True) if is_shared)
    rate = fleet.load * fleet.num_prefill / (fleet.costs.prefill_s(fleet.prefill.chunk_tokens) / fleet.prefill.chunk_tokens)
    gap_s = tokens / fleet.num_requests / rate
    for number in range(fleet.num_requests):
        head = _tokens(picks[number] + 1, lengths[picks[number]]) if shared[number] else ()
        yield Ask(
            rng.expovariate(1 / gap_s),
            (*head, *_tokens(-number - 1, own[number])),
            _length(rng, 150, 0.9, 2000),
            ServiceClass.BATCH if rng.random() < 0.2 else ServiceClass.INTERACTIVE,
        )


def _length(rng: random.Random, median: float, spread: float, most: int) -> int:
    return max(1, min(most, int(median * rng.lognormvariate(0.0, spread))))


def _tokens(name: int, count: int) -> range:
    """Tokens that no other name begins with; cheap to make, since there are hundreds of millions."""
    start = name * 7919 % 1_000_000_007
    return range(start, start + count)

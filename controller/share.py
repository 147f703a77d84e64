"""How workers of one machine divide it. Pure."""

from __future__ import annotations

from dataclasses import replace

from tandem.config import WorkerConfig

__all__ = ["CACHE_FRACTION", "divide"]

CACHE_FRACTION = 0.5
"""Share of the available memory that all cache pools of a machine take together when no budget is given."""


def divide(config: WorkerConfig, num_workers: int, most_workers: int, num_cores: int, available_bytes: int) -> WorkerConfig:
    """The configuration of every worker, however many run; what the operator gave as a number stays.

    num_workers: that begin; cores are divided among them, since more can share them. most_workers: that there is room for;
    memory is divided among those, since it cannot be shared."""
    threads = config.threads or max(1, num_cores // max(1, num_workers))
    budget_bytes = config.cache.budget_bytes or int(available_bytes * CACHE_FRACTION) // max(1, most_workers)
    return replace(config, threads=threads, cache=replace(config.cache, budget_bytes=budget_bytes))

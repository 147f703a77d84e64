"""How workers of one machine divide it. Pure."""

from __future__ import annotations

from dataclasses import replace

from tandem.config import WorkerConfig

__all__ = ["CACHE_FRACTION", "divide"]

CACHE_FRACTION = 0.5
"""Share of the available memory that all cache pools of a machine take together when no budget is given."""


def divide(config: WorkerConfig, num_workers: int, num_cores: int, available_bytes: int) -> WorkerConfig:
    """The configuration of one of `num_workers` equal workers; what the operator gave as a number stays."""
    num_workers = max(1, num_workers)
    threads = config.threads or max(1, num_cores // num_workers)
    budget_bytes = config.cache.budget_bytes or int(available_bytes * CACHE_FRACTION) // num_workers
    return replace(config, threads=threads, cache=replace(config.cache, budget_bytes=budget_bytes))

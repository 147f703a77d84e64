"""Quantiles as every benchmark prints them."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["quantile", "summary_ms"]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of all does not exceed; nan of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary_ms(values: Sequence[float]) -> str:
    """p50, p95, p99 and the greatest, of seconds, in milliseconds."""
    shown = [quantile(values, share) * 1e3 for share in (0.5, 0.95, 0.99, 1.0)]
    return " ".join(f"{value:9.1f}" for value in shown)

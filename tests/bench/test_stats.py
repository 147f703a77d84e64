"""Quantiles that benchmarks print."""

import math

import pytest

from bench.stats import quantile


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 2), (0.75, 3), (0.99, 4), (1.0, 4)])
def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed(share: float, value: float) -> None:
    assert quantile([4, 2, 3, 1], share) == value


def test_nothing_has_no_quantile() -> None:
    assert math.isnan(quantile([], 0.5))

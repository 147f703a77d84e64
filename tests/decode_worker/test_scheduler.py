import pytest

from decode_worker.scheduler import num_joins


@pytest.mark.parametrize(
    ("verified", "running", "expected"),
    [(0, 5, 0), (3, 0, 3), (20, 0, 8), (20, 60, 4), (20, 64, 0), (20, 70, 0)],
)
def test_joins_are_bounded_per_step_and_by_the_batch(verified: int, running: int, expected: int) -> None:
    assert num_joins(verified, running, max_batch=64, max_joins_per_step=8) == expected

"""Workers of one machine divide its cores and memory; what the operator gave stays."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from controller.share import CACHE_FRACTION, divide
from tandem.config import CacheConfig, WorkerConfig

GIB = 1024**3


def test_cores_are_for_those_that_begin_and_half_of_the_memory_for_as_many_as_there_is_room_for() -> None:
    worker = divide(WorkerConfig(), num_workers=2, most_workers=4, num_cores=8, available_bytes=16 * GIB)
    assert (worker.threads, worker.cache.budget_bytes) == (4, 2 * GIB)


def test_what_the_operator_gave_stays() -> None:
    given_ = WorkerConfig(threads=3, cache=CacheConfig(budget_bytes=7))
    assert divide(given_, 4, 4, 64, 64 * GIB) == given_


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 256), st.integers(0, 2**50))
def test_all_workers_together_take_no_more_than_the_share(workers: int, more: int, cores: int, available: int) -> None:
    worker = divide(WorkerConfig(), workers, workers + more, cores, available)
    assert worker.threads >= 1
    assert worker.threads * workers <= max(cores, workers)
    assert worker.cache.budget_bytes * (workers + more) <= available * CACHE_FRACTION
    assert replace(worker, threads=0, cache=CacheConfig()) == WorkerConfig()

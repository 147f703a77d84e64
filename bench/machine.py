"""What the machine gives now. Memory is the limit of decode, and a virtual machine's share of it drifts by several times."""

from __future__ import annotations

import statistics
import time

import torch

__all__ = ["memory_read_gbps"]

_BYTES = 256 << 20
_READS = 7


def memory_read_gbps() -> float:
    """GB/s at which one thread sums 256 MB of fp32, more than any cache holds; the median of seven."""
    numbers = torch.ones(_BYTES // 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(_READS):
            begun_s = time.perf_counter()
            numbers.sum()
            seconds.append(time.perf_counter() - begun_s)
    finally:
        torch.set_num_threads(threads)
    return _BYTES / statistics.median(seconds) / 1e9

"""The classes into which prompts and concurrency are sorted for metrics: few, so that labels stay bounded. Pure.

A bucket is named by its upper bound, the bound included; the last one takes the rest.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = [
    "CONCURRENCY_BUCKETS",
    "PROMPT_BUCKETS",
    "REST",
    "concurrency_bucket",
    "prompt_bucket",
]

REST = "+Inf"

_PROMPT_TOKENS = (128, 512, 2048, 8192, 32768, 131072)
_CONCURRENCY = (1, 4, 16, 64, 256)

PROMPT_BUCKETS = (*map(str, _PROMPT_TOKENS), REST)
CONCURRENCY_BUCKETS = (*map(str, _CONCURRENCY), REST)


def prompt_bucket(num_tokens: int) -> str:
    return PROMPT_BUCKETS[bisect_left(_PROMPT_TOKENS, num_tokens)]


def concurrency_bucket(num_requests: int) -> str:
    return CONCURRENCY_BUCKETS[bisect_left(_CONCURRENCY, num_requests)]

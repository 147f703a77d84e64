"""`/metrics/targets`: what there is to scrape, in the format of Prometheus' HTTP service discovery
(https://prometheus.io/docs/prometheus/latest/http_sd/). Pure.

A target has no labels but `instance`: whatever else told a worker's word from a router's word of the same thing would make
the two add up in queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.state import WorkerEntry

__all__ = ["scrape_targets"]


def scrape_targets(scheme: str, own_address: str, workers: Iterable[WorkerEntry]) -> list[dict[str, Any]]:
    """This router, at the address where it was asked, and each worker that shows metrics of its own."""
    own = {"targets": [own_address], "labels": {"instance": own_address, "__scheme__": scheme}}
    shown = [worker.handle.info for worker in workers if worker.handle.info.metrics_address]
    return [own, *({"targets": [info.metrics_address], "labels": {"instance": info.id}} for info in shown)]

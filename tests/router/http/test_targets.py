"""What there is to scrape: the router where it was asked, and workers that show their own; with no label that adds up twice."""

from __future__ import annotations

from dataclasses import replace

from router.fake_workers import FakeWorkerHandle
from router.http.targets import scrape_targets
from router.state import WorkerEntry
from router.worker import PREFILL, WorkerInfo
from tests.router.http.tools import face
from tests.router.tools import MODEL


def test_workers_without_metrics_of_their_own_are_left_to_the_router() -> None:
    quiet = WorkerInfo("p0", PREFILL, "10.0.0.2:1", MODEL)
    shown = replace(quiet, id="p1", metrics_address="10.0.0.3:9464")
    assert scrape_targets("https", "router:8000", [WorkerEntry(FakeWorkerHandle(info)) for info in (quiet, shown)]) == [
        {"targets": ["router:8000"], "labels": {"instance": "router:8000", "__scheme__": "https"}},
        {"targets": ["10.0.0.3:9464"], "labels": {"instance": "p1"}},
    ]


async def test_the_router_names_itself_as_it_was_reached() -> None:
    async with face() as it:
        reply = await it.get("/metrics/targets")
        own = f"127.0.0.1:{it.port}"
        assert reply.json() == [{"targets": [own], "labels": {"instance": own, "__scheme__": "http"}}]

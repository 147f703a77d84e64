"""What holds for every test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes is the machine's, not the code's.
settings.register_profile("tandem", deadline=None)
settings.load_profile("tandem")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """When tests run side by side, those that start a whole cluster stay one behind the other: two would only measure each
    other's load."""
    for item in items:
        if item.get_closest_marker("cluster"):
            item.add_marker(pytest.mark.xdist_group("cluster"))


@pytest.fixture
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One that a test runs by hand, a step at a time."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()

"""A cluster in the foreground of which nothing came to be."""

import os
import signal
from collections.abc import Iterator

import pytest

import controller.launch
from tandem.cli import foreground
from tandem.config import ClusterConfig
from tandem.errors import TandemError


@pytest.fixture(autouse=True)
def handlers_and_reaper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(foreground, "start_reaper", lambda: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _fail(config: ClusterConfig) -> None:
    raise TandemError("the local Ray cluster did not start")


def test_a_start_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller.launch, "start_cluster", _fail)
    with pytest.raises(TandemError, match="did not start"):
        foreground.run_in_foreground(ClusterConfig())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_fails_because_all_were_told_to_stop_is_a_stop(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A signal to the whole group ends Ray's processes too, and then Ray cannot start."""

    def stopped(config: ClusterConfig) -> None:
        os.kill(os.getpid(), number)
        _fail(config)

    monkeypatch.setattr(controller.launch, "start_cluster", stopped)
    assert foreground.run_in_foreground(ClusterConfig()) == 0

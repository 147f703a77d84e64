"""The router as a child: restarted a bounded number of times, stopped for certain."""

import sys

import pytest

from tandem.cli.router_process import RouterProcess
from tandem.clock import FakeClock
from tandem.config import RouterConfig
from tandem.errors import TandemError

IGNORES_SIGTERM = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
)


def router(code: str) -> tuple[RouterProcess, FakeClock]:
    clock = FakeClock()
    return RouterProcess(RouterConfig(), "127.0.0.1:1", clock, [sys.executable, "-S", "-c", code]), clock


def wait_until_ended(process: RouterProcess) -> None:
    assert process._process is not None
    process._process.wait(10)


def test_a_router_that_keeps_ending_is_given_up_with_its_exit_code() -> None:
    process, clock = router("raise SystemExit(3)")
    process.start()
    for _ in range(5):
        wait_until_ended(process)
        clock.advance(5)
        assert process.restart_if_ended() == "the router ended (exit code 3); started again"
    wait_until_ended(process)
    with pytest.raises(TandemError, match=r"ended 6 times .* exit code 3"):
        process.restart_if_ended()


def test_restarts_get_slower() -> None:
    process, clock = router("pass")
    process.start()
    wait_until_ended(process)
    assert process.restart_if_ended() != ""
    wait_until_ended(process)
    assert process.restart_if_ended() == ""
    clock.advance(1)
    assert process.restart_if_ended() != ""
    process.stop(0)


def test_a_long_life_forgives_earlier_ends() -> None:
    process, clock = router("pass")
    process.start()
    for _ in range(10):
        wait_until_ended(process)
        clock.advance(60)
        assert process.restart_if_ended() != ""
    process.stop(0)


def test_one_that_runs_is_left_alone_and_stops_when_asked() -> None:
    process, _ = router("import time; time.sleep(60)")
    process.start()
    assert process.restart_if_ended() == ""
    process.stop(10)
    assert process.ended() == -15


def test_one_that_does_not_listen_is_killed() -> None:
    process, _ = router(IGNORES_SIGTERM)
    process.start()
    process.stop(0.2)
    assert process.ended() in (-9, -15)  # -15: the signal came before it was ignored

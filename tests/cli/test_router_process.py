"""The router as a child: restarted a bounded number of times, stopped for certain."""

import argparse
import io
import sys
from pathlib import Path

import pytest

from tandem.cli.router import add_parser, router_config
from tandem.cli.router_process import RouterProcess
from tandem.clock import FakeClock
from tandem.config import RouterConfig, TrustConfig
from tandem.errors import ConfigError, TandemError
from tandem.secret import Secret

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


def test_the_secret_goes_through_standard_input_and_not_on_the_command_line(tmp_path: Path) -> None:
    secret, heard = Secret("known to this test only"), tmp_path / "heard"
    config = RouterConfig(trust=TrustConfig(secret))
    assert not any(secret.reveal() in word for word in RouterProcess(config, "127.0.0.1:1", FakeClock())._command)
    code = f"import sys; open({str(heard)!r}, 'w').write(sys.stdin.read())"
    process = RouterProcess(config, "127.0.0.1:1", FakeClock(), [sys.executable, "-S", "-c", code])
    process.start()
    wait_until_ended(process)
    assert heard.read_text() == secret.reveal()


def test_a_router_reads_its_secret_from_standard_input_or_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("through the pipe alone"))
    assert router_config_of("--cluster-secret-file", "-").trust.secret == Secret("through the pipe alone")
    (tmp_path / "secret").write_text("in a file that is ours")
    assert router_config_of("--cluster-secret-file", str(tmp_path / "secret")).trust.secret == Secret("in a file that is ours")


def test_a_router_refuses_a_secret_on_its_command_line() -> None:
    with pytest.raises(ConfigError, match="--cluster-secret-file"):
        router_config_of("--settings", '{"trust": {"secret": "for everybody to read"}}')


def router_config_of(*words: str) -> RouterConfig:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return router_config(parser.parse_args(["router", "--controller", "127.0.0.1:1", *words]))

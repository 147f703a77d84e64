"""`ray start` as a child: what it is given, and its end."""

import json
import socket
import sys

import pytest

from controller.node.ray_process import RayProcess, head_command, is_reachable, node_command, token_environment
from tandem.errors import TandemError
from tandem.secret import Secret


def test_a_head_offers_no_worker_a_place() -> None:
    assert not any(word.startswith("--resources") for word in head_command("10.0.0.1", 6379))


def test_resources_are_one_word_that_no_shell_reads() -> None:
    words = node_command("head:6379", "10.0.0.2", {"tandem_decode": 1})
    offer = [word for word in words if word.startswith("--resources=")]
    assert [json.loads(word.partition("=")[2]) for word in offer] == [{"tandem_decode": 1}]


@pytest.mark.parametrize("command", [head_command("10.0.0.1", 6379), node_command("head:6379", "10.0.0.2", {})])
def test_the_current_folder_is_not_on_rays_search_path(command: list[str]) -> None:
    assert command[1:3] == ["-P", "-m"]


def test_rays_token_follows_from_the_secret_and_does_not_show_it() -> None:
    secret = Secret("0123456789abcdef")
    token = token_environment(secret)["RAY_AUTH_TOKEN"]
    assert token == token_environment(Secret("0123456789abcdef"))["RAY_AUTH_TOKEN"]
    assert token != token_environment(Secret("0123456789abcdeg"))["RAY_AUTH_TOKEN"]
    assert secret.reveal() not in token
    assert len(token) == 64


def test_reachable_is_where_somebody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()[:2]
        assert is_reachable(address)
    assert not is_reachable(address)


def test_an_ended_child_shows_with_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as a `tandem up` in this process has left it
    code = (
        "import os, sys; e = os.environ; unwanted = {'RAY_ADDRESS', 'RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'} & set(e); "
        "got = unwanted, e['RAY_worker_niceness'], e['RAY_ENABLE_UV_RUN_RUNTIME_ENV'], e['PYTHONSAFEPATH'], e['A']; "
        "sys.exit(7 if got == (set(), '0', '0', '1', 'b') else 1)"
    )
    ray = RayProcess([sys.executable, "-S", "-c", code], {"A": "b"})
    assert ray.ended() is None
    ray.start()
    assert ray._process is not None
    ray._process.wait(10)
    assert ray.ended() == 7
    ray.stop()


def test_a_child_is_ended_with_sigterm() -> None:
    ray = RayProcess([sys.executable, "-S", "-c", "import signal; signal.pause()"], {})
    ray.start()
    ray.stop()
    assert ray.ended() == -15


def test_a_command_that_is_not_there_is_a_sentence() -> None:
    with pytest.raises(TandemError, match="the Ray node cannot be started"):
        RayProcess(["/nowhere/ray"], {}).start()

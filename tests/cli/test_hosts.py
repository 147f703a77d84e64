"""Commands of a cluster of several hosts: what they refuse before anything is started."""

import json
from pathlib import Path

import pytest

from tandem.cli.errors import EXIT_FAILED
from tandem.cli.main import main
from tandem.config import WorkerConfig, beyond_loopback, on_node, transfer_of


@pytest.fixture(name="secret")
def _secret(tmp_path: Path) -> str:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef")
    return str(file)


def node(*arguments: str) -> list[str]:
    return ["node", "--role=decode", "--head=head:6379", "--controller=head:6380", "--host=10.0.0.7", *arguments]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["head", "--host=10.0.0.1"], "name its file with --cluster-secret-file"),
        (["head", "--host=10.0.0.1", "--ray-port=0"], "--ray-port must be from 1 to 65535"),
        (["head", "--host=10.0.0.1", "--ray-port=6380"], "are both 6380"),
        (["head", "--host=10.0.0.1", "--cluster-secret-file=/nowhere"], "cannot read the cluster secret /nowhere"),
        (node(), "no cluster secret was given"),
        (node("--head=here"), "--head 'here' is no HOST:PORT"),
        (node("--controller=here"), "--controller 'here' is no HOST:PORT"),
        (node("--probe-port=70000"), "--probe-port must be from 1 to 65535"),
        (node("--leave-s=nan"), "--leave-s must be more than 0"),
        (["leave", "--probe-port=1"], "no `tandem node` answers on port 1"),
        (["probe", "--address=127.0.0.1:1"], "the router at 127.0.0.1:1 cannot serve"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) != 0
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1


def test_a_head_refuses_a_model_that_is_not_there(tmp_path: Path, secret: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = tmp_path / "cluster.json"
    settings.write_text(json.dumps({"worker": {"model": {"path": "/nowhere"}}}))
    assert main(["head", "--host=10.0.0.1", f"--config={settings}", f"--cluster-secret-file={secret}"]) == EXIT_FAILED
    assert "/nowhere is neither a folder nor a hub id" in capsys.readouterr().err


def test_workers_of_a_joined_cluster_listen_where_their_node_is() -> None:
    joined = beyond_loopback(WorkerConfig())
    assert on_node(joined, "10.0.0.7").host == "10.0.0.7"
    assert transfer_of(on_node(joined, "10.0.0.7")).net_devices == ""
    # nodes on loopback keep to it
    assert transfer_of(on_node(joined, "127.0.0.1")).net_devices == "lo"


def test_an_address_that_the_operator_chose_stays() -> None:
    chosen = WorkerConfig(host="192.168.0.1")
    assert on_node(beyond_loopback(chosen), "10.0.0.7") == chosen


def test_alone_workers_stay_on_loopback() -> None:
    assert on_node(WorkerConfig(), "10.0.0.7").host == "127.0.0.1"

"""What `scale` and `drain` refuse before they ask anybody."""

import pytest

from tandem.cli import main as cli
from tandem.cli.scale import pool_line, wishes_of
from tandem.errors import ConfigError
from tandem.v1 import operations_pb2


def test_wishes_are_read_from_words() -> None:
    assert wishes_of(["prefill=3", "decode=0"]) == {"prefill": 3, "decode": 0}
    assert wishes_of(["decode=all"]) == {"decode": None}


@pytest.mark.parametrize(
    "words", [["decode"], ["decode="], ["decode=-1"], ["decode=1.5"], ["router=1"], ["decode=1", "decode=2"]]
)
def test_a_word_that_is_no_wish_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=words[-1].partition("=")[0]):
        wishes_of(words)


def test_wrong_arguments_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", "decode=many"]) == 2
    assert cli.main(["drain", "decode-1", "--timeout", "-5"]) == 2
    assert cli.main(["drain", "decode-1", "--timeout", "nan"]) == 2
    for command in (["scale", "decode=1"], ["replace", "decode"]):
        for wait in ("nan", "-1", "inf"):
            assert cli.main([*command, "--wait", wait]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 9


def test_where_nobody_answers_it_exits_with_1_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scale", "decode=1", "--address", "127.0.0.1:1"]) == 1
    assert "start a cluster with `tandem up`" in capsys.readouterr().err


def test_a_pools_line_gives_the_reason() -> None:
    pool = operations_pb2.PoolSize(wanted=3, ready=1, reason="2 starting")
    assert pool_line("decode", pool) == "decode    1 of 3 ready  (2 starting)"

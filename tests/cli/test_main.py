"""The command line's frame: what it prints, how it exits, what it does not import."""

import subprocess
import sys
import time

import pytest

from tandem.cli import main as cli
from tandem.cli.errors import exit_code, report
from tandem.errors import CapacityError, CheckpointError, ConfigError, TandemError, Unavailable


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (CheckpointError("x"), 1),
        (CapacityError("x"), 1),
        (Unavailable("x"), 1),
        (TandemError("x"), 1),
    ],
)
def test_exit_codes_follow_the_error_tree(error: TandemError, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    report(TandemError("first\n  second"))
    assert capsys.readouterr() == ("", "tandem: first second\n")


def test_help_names_every_public_command_and_no_internal_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name, command in cli.COMMANDS.items() if command.help)
    assert "router" not in text


def test_an_unknown_command_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["serve"])
    assert exit_.value.code == 2
    assert "invalid choice: 'serve'" in capsys.readouterr().err


def test_errors_and_interrupts_of_a_command_end_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.cli import status

    def fail(args: object) -> int:
        raise Unavailable("no router answers")

    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(status, "run", fail)
    assert cli.main(["status"]) == 1
    assert capsys.readouterr().err == "tandem: no router answers\n"
    monkeypatch.setattr(status, "run", interrupt)
    assert cli.main(["status"]) == 130
    assert capsys.readouterr() == ("", "")


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    code = "import sys; from tandem.cli.main import main; main(['--help'])\n"
    probe = (
        "import atexit, sys\n"
        "atexit.register(lambda: print('HEAVY', sorted({'ray', 'grpc', 'torch', 'transformers'} & set(sys.modules))))\n"
    )
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", probe + code], capture_output=True, text=True, timeout=30, check=False)
    assert "HEAVY []" in done.stdout
    assert time.monotonic() - begin < 5  # 0.1 s on an idle machine


def test_a_reader_that_goes_away_is_no_error_to_talk_about() -> None:
    shell = f"{sys.executable} -m tandem.cli.main --help | head -c 1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=30, check=False)
    assert done.stderr == ""

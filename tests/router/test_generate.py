"""`tandem generate` against a real server: what it prints, and how it ends."""

import asyncio
import json
import signal
import sys

import pytest

from router.fake_workers import Script
from tandem.cli.main import main
from tandem.cli.timeline import draw, duration
from tandem.v1 import inference_pb2 as pb
from tests.router.test_server import door
from tests.router.tools import Bench, says, until


async def generate(address: str, *arguments: str) -> int:
    """The command line in a thread of its own, as it brings its own event loop."""

    def command() -> int:
        try:
            return main(["generate", *arguments, "--address", address])
        except SystemExit as end:
            return int(end.code or 0)

    return await asyncio.to_thread(command)


async def test_the_answer_is_printed_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(script=says("hi wörld"))) as it:
        assert await generate(it.address, "hello") == 0
    assert capsys.readouterr() == ("hi wörld\n", "")


async def test_json_is_one_object_with_all_there_is_to_know(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(script=says("hi ö. more"))) as it:
        assert await generate(it.address, "hello", "--json", "--stop", ".", "--seed", "3", "--temperature", "0.5") == 0
        request = it.bench.cluster.prefill[0].submitted[0][0]
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"]) == ("hi ö", "stop")
    assert bytes(answer["token_ids"]).decode() == "hi ö."
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 6, "cached_tokens": 0}
    assert set(answer["timings"]) == {"queue", "prefill", "handoff_exposed", "ttft", "decode", "total"}
    assert (answer["prefill_worker"], answer["decode_worker"], answer["attempts"]) == ("p0", "d0", 1)
    assert (request.sampling.seed, request.sampling.temperature) == (3, 0.5)


async def test_the_timeline_follows_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(script=says("hi"))) as it:
        assert await generate(it.address, "hello", "--timeline") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["hi", ""]
    assert [line.split()[0].rstrip("│") for line in lines[2:6]] == ["queue", "prefill", "hand-off", "decode"]
    assert "p0 → d0" in lines[4]
    assert "first token after" in lines[6]


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["x", "--max-new-tokens", "0"], 2, "max_new_tokens"),
        (["x", "--temperature", "nan"], 2, "sampling.temperature"),
        (["x", "--max-new-tokens", "99999999999"], 2, "--max-new-tokens: 99999999999 is out of range"),
        (["x", "--seed", "-1"], 2, "--seed: -1 is out of range"),
        (["\udcff"], 2, "PROMPT: is no valid UTF-8"),
        (["x", "--stop", "\udcff"], 2, "--stop: is no valid UTF-8"),
        (["x", "--timeout", "0"], 2, "--timeout"),
        (["x", "--json", "--timeline"], 2, "not allowed"),
        (["x", "--max-new-tokens", "few"], 2, "invalid int"),
        ([], 2, "PROMPT"),
    ],
)
async def test_wrong_arguments_exit_with_2(
    arguments: list[str], code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with door(Bench()) as it:
        assert await generate(it.address, *arguments) == code
    out, err = capsys.readouterr()
    assert (out, word in err, "Traceback" in err) == ("", True, False)


async def test_a_timeout_says_which_pool_has_no_worker(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(1, 0)) as it:
        assert await generate(it.address, "x", "--timeout", "0.5") == 1
    assert "no whole answer within 0.5 s: no decode worker is ready" in capsys.readouterr().err


async def test_a_failure_is_one_sentence_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(0, 0), known=False) as it:
        assert await generate(it.address, "x") == 1
    assert "no worker has reported its model" in capsys.readouterr().err
    assert await generate("127.0.0.1:1", "x") == 1
    err = capsys.readouterr().err
    assert err.startswith("tandem: no router answers at 127.0.0.1:1, or it was lost in the middle (")
    assert err.count("\n") == 1
    assert await generate("nowhere", "x") == 2


async def test_a_timeout_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(script=Script(step_s=3600))) as it:
        assert await generate(it.address, "x", "--timeout", "0.2") == 1
    assert "no whole answer within 0.2 s" in capsys.readouterr().err


async def test_ctrl_c_cancels_the_request_and_exits_with_130() -> None:
    bench = Bench(script=Script(step_s=3600))
    async with door(bench) as it:
        command = [sys.executable, "-m", "tandem.cli.main", "generate", "x", "--address", it.address]
        process = await asyncio.create_subprocess_exec(
            *command,
            stderr=asyncio.subprocess.PIPE,
            # Whatever started the tests may ignore it, as a shell does for what runs in its background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        await until(lambda: bench.pipeline.num_by_phase["decoding"])
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert (process.returncode, err) == (130, b"")
        await until(lambda: bench.cluster.decode[0].cancelled and bench.cluster.prefill[0].cancelled)


def finished(**fields: object) -> pb.Finished:
    timings = pb.RequestTimings(queue=0.1, prefill=0.3, handoff_exposed=0.1, ttft=0.4, decode=0.5, total=1.0)
    usage = pb.Usage(prompt_tokens=10, completion_tokens=6)
    return pb.Finished(finish_reason="length", usage=usage, timings=timings, prefill_worker="p", **fields)  # type: ignore[arg-type]


def test_bars_stand_where_their_time_was() -> None:
    bars = [line.split("│")[1] for line in draw(finished(decode_worker="d"), colour=False).splitlines()[:4]]
    assert {len(bar) for bar in bars} == {48}
    first = [len(bar) - len(bar.lstrip()) for bar in bars]
    assert first == [0, 4, 19, 24]
    assert bars[3].endswith("█")


def test_a_request_without_decode_has_no_such_bars() -> None:
    text = draw(finished(attempts=2), colour=False)
    assert "decode" not in text
    assert "2 attempts" in text


def test_a_prompt_computed_where_its_answer_is_written_has_no_hand_off() -> None:
    names = [line.split("│")[0].strip() for line in draw(finished(decode_worker="p"), colour=False).splitlines()[:3]]
    assert names == ["queue", "prefill", "decode"]


def test_a_timeline_of_nothing_is_still_drawn() -> None:
    assert draw(pb.Finished(), colour=True)


@pytest.mark.parametrize(("seconds", "text"), [(2.5, "2.50 s"), (0.0123, "12.3 ms"), (0.00002, "20 µs"), (0, "0 µs")])
def test_durations_are_in_the_unit_of_their_size(seconds: float, text: str) -> None:
    assert duration(seconds).strip() == text

"""The typed client against a router over fake workers."""

import asyncio
import contextlib
import io

import pytest

from router.fake_workers import Script
from tandem.cli.chat import converse, typed
from tandem.client import AsyncClient, Client, Message
from tandem.client.messages import request_of
from tandem.config import RouterConfig
from tandem.errors import ConfigError, InvalidRequest, Overloaded, Unavailable
from tandem.request import Phase
from tandem.v1 import inference_pb2 as pb
from tests.router.test_server import door
from tests.router.tools import Bench, says, until

HELLO: list[Message] = [{"role": "user", "content": "x"}]


async def test_parts_add_up_to_the_answer() -> None:
    async with door(Bench(script=says("hi wörld"))) as it, AsyncClient(it.address) as client:
        parts = [part async for part in client.stream("hello", logprobs=1, request_id="mine")]
        assert "".join(part.text for part in parts) == "hi wörld"
        assert parts[-1].finished is not None
        answer = await client.generate("hello", logprobs=1, request_id="mine")
        assert (answer.text, answer.finish_reason, answer.finished.request_id) == ("hi wörld", "stop", "mine")
        assert len(answer.logprobs) == len(answer.token_ids) == 10
        assert [model.name for model in await client.models()] == ["bytes"]


async def test_several_answers_chats_and_tokens() -> None:
    async with door(Bench(script=says("<think>\nhm\n</think>\n\nhi"))) as it, AsyncClient(it.address) as client:
        answers = await client.generate_all(HELLO, n=3)
        assert [(a.index, a.reasoning, a.text) for a in answers] == [(i, "hm", "hi") for i in range(3)]
        assert (await client.generate([104, 105], echo=True, max_new_tokens=1)).prompt == pb.Prompt(
            token_ids=[104, 105], text="hi"
        )


async def test_the_blocking_client_is_the_same() -> None:
    async with door(Bench(script=says("sync"))) as it:

        def ask() -> tuple[str, str, str]:
            with Client(it.address) as client:
                streamed = "".join(part.text for part in client.stream("x"))
                return streamed, client.generate("x").text, client.models()[0].name

        assert await asyncio.to_thread(ask) == ("sync", "sync", "bytes")


async def test_leaving_the_loop_cancels() -> None:
    bench = Bench(script=Script(step_s=0.001))
    async with door(bench) as it, AsyncClient(it.address) as client:
        async with contextlib.aclosing(client.stream("x", max_new_tokens=400)) as parts:
            await anext(parts)
        await until(lambda: bench.ended and not bench.cluster.num_running)
        assert [job.phase for job in bench.ended] == [Phase.CANCELLED]
        bench.assert_nothing_is_left()


async def test_errors_are_those_of_the_package() -> None:
    bench = Bench(script=Script(step_s=3600), config=RouterConfig(max_queue=1), slots=1)
    async with door(bench) as it, AsyncClient(it.address) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.generate("x", temperature=1000)
        assert refused.value.field == "sampling.temperature"
        with pytest.raises(TimeoutError):
            await client.generate("x", timeout_s=0.05)
        asks = [asyncio.ensure_future(client.generate("x")) for _ in range(2)]
        await until(lambda: it.bench.pipeline._queue.num_waiting == 1)
        with pytest.raises(Overloaded) as full:
            await client.generate("x")
        assert full.value.retry_after_s > 0
        for ask in asks:
            ask.cancel()
        await asyncio.wait(asks)
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(Unavailable, match="no router answers at 127"):
            await client.generate("x", timeout_s=5)


def test_what_a_request_cannot_carry_is_refused_here() -> None:
    with pytest.raises(InvalidRequest):
        request_of("x", seed=-1)
    with pytest.raises(InvalidRequest):
        request_of("\ud800")


def test_every_option_finds_its_field() -> None:
    message = request_of(
        HELLO,
        model="m",
        top_k=3,
        logit_bias={4: 0.5},
        stop=["a"],
        batch=True,
        tools=[{"type": "function", "function": {"name": "f"}}],
        template_options={"enable_thinking": False},
        json_schema={"type": "object"},
    )
    assert (message.model, message.sampling.top_k, dict(message.sampling.logit_bias)) == ("m", 3, {4: 0.5})
    assert (list(message.stop), message.service_class) == (["a"], pb.SERVICE_CLASS_BATCH)
    assert '"f"' in message.chat.tools
    assert message.chat.template_options == '{"enable_thinking": false}'
    assert message.json_schema == '{"type": "object"}'
    assert request_of("x", choice=["a"]).choice.texts == ["a"]


async def test_a_conversation_remembers_until_it_begins_anew(capsys: pytest.CaptureFixture[str]) -> None:
    async with door(Bench(script=says("yes"))) as it:

        def talk() -> None:
            with Client(it.address) as client:
                converse(client, ["one", "two", "/new", "three", "/quit", "four"], {"max_new_tokens": 9}, "be brief")

        await asyncio.to_thread(talk)
        asked = [[f"{m.role}:{m.content}" for m in job.message.chat.messages] for job in it.bench.ended]
        assert asked == [
            ["system:be brief", "user:one"],
            ["system:be brief", "user:one", "assistant:yes", "user:two"],
            ["system:be brief", "user:three"],
        ]
    assert capsys.readouterr().out == "yes\nyes\nyes\n"


def test_words_that_are_no_utf8_end_the_conversation_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"one\n\xff\n"), encoding="utf-8"))
    lines = typed()
    with pytest.raises(ConfigError, match="standard input: is no valid UTF-8"):
        list(lines)

"""OpenAI's own client against the HTTP face."""

import asyncio
import math
from typing import Any

import openai
import pytest

from router.fake_workers import Script
from tandem.config import RouterConfig
from tandem.request import Phase
from tests.router.http.tools import face
from tests.router.tools import Bench, says, until


async def test_a_completion_has_text_usage_and_reason() -> None:
    async with face(Bench(script=says("wörld"))) as it:
        got = await it.client.completions.create(model="bytes", prompt="hello")
        assert (got.choices[0].text, got.choices[0].finish_reason, got.object) == ("wörld", "stop", "text_completion")
        assert got.usage is not None
        assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (5, 7, 12)
        assert got.model == "bytes"


async def test_a_streamed_completion_is_the_same_text_and_ends_with_usage_when_asked() -> None:
    async with face(Bench(script=says("wörld 🤝"))) as it:
        options: Any = {"include_usage": True}
        stream = await it.client.completions.create(
            model="bytes", prompt="hello", stream=True, stream_options=options, max_tokens=99
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "wörld 🤝"
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


async def test_several_prompts_with_several_answers_are_numbered_in_order() -> None:
    async with face(Bench(script=Script(answer=lambda request, index: request.prompt[0] + index))) as it:
        got = await it.client.completions.create(model="bytes", prompt=["a", "m"], n=2, max_tokens=3)
        assert [(choice.index, choice.text) for choice in got.choices] == [(0, "abc"), (1, "abc"), (2, "mno"), (3, "mno")]
        assert got.usage is not None
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (2, 12)
        tokens: Any = [[97, 98], [109]]
        got = await it.client.completions.create(model="bytes", prompt=tokens, max_tokens=2)
        assert [choice.text for choice in got.choices] == ["ab", "mn"]


async def test_completion_logprobs_with_echo_cover_the_prompt() -> None:
    async with face(Bench(script=says("ok"))) as it:
        got = await it.client.completions.create(model="bytes", prompt="hé", echo=True, logprobs=2)
        [choice] = got.choices
        assert choice.text == "héok"
        told = choice.logprobs
        assert told is not None
        assert told.tokens == ["h", "bytes:\\xc3", "bytes:\\xa9", "o", "k", "\0"]
        assert told.token_logprobs is not None
        assert told.token_logprobs[0] is None
        assert told.token_logprobs[1:] == [-math.log(2)] * 5
        assert told.top_logprobs is not None
        assert told.top_logprobs[3] == {"o": -math.log(2), "p": -2 * math.log(2)}
        assert told.text_offset is not None
        assert told.text_offset[3] == sum(len(token) for token in told.tokens[:3])


async def test_a_chat_answers_whole_and_streamed_with_logprobs() -> None:
    async with face(Bench(script=says("hi there"))) as it:
        messages: Any = [{"role": "developer", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "yo"}]}]
        got = await it.client.chat.completions.create(model="bytes", messages=messages, logprobs=True, top_logprobs=1)
        [choice] = got.choices
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hi there", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [entry.token for entry in choice.logprobs.content] == [*"hi there", "\0"]
        assert choice.logprobs.content[0].bytes == [ord("h")]
        assert choice.logprobs.content[0].top_logprobs[0].logprob == -math.log(2)
        assert bytes(it.bench.ended[0].request.prompt) == b"system: be\nuser: yo\n"

        stream = await it.client.chat.completions.create(model="bytes", messages=messages, stream=True, n=2)
        texts = ["", ""]
        async for chunk in stream:
            for part in chunk.choices:
                texts[part.index] += part.delta.content or ""
        assert texts == ["hi there", "hi there"]


async def test_the_synchronous_client_works_too() -> None:
    async with face(Bench(script=says("sync"))) as it:

        def ask() -> tuple[str, str]:
            with openai.OpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=0) as client:
                whole = client.completions.create(model="bytes", prompt="x").choices[0].text
                stream = client.completions.create(model="bytes", prompt="x", stream=True)
                return whole, "".join(chunk.choices[0].text for chunk in stream)

        assert await asyncio.to_thread(ask) == ("sync", "sync")


async def test_parameters_arrive_at_the_worker() -> None:
    async with face() as it:
        await it.client.completions.create(
            model="bytes",
            prompt="x",
            max_tokens=3,
            temperature=0.5,
            top_p=0.9,
            seed=-1,
            presence_penalty=1.5,
            frequency_penalty=-0.5,
            logit_bias={"65": -100},
            stop=["zz"],
            user="me",
            extra_body={"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True},
        )
        request = it.bench.ended[0].request
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -0.5, 1.1)
        assert (sampling.seed, sampling.logit_bias) == (2**64 - 1, ((65, -100.0),))
        assert (request.stop.max_new_tokens, request.stop.min_new_tokens, request.stop.stop_token_ids) == (3, 2, frozenset())


async def test_the_default_temperature_is_openais() -> None:
    async with face() as it:
        await it.client.completions.create(model="bytes", prompt="x")
        assert it.bench.ended[0].request.sampling.temperature == 1.0
        assert it.bench.ended[0].request.stop.max_new_tokens == 16


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 101}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**70}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 50}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"stop": [1]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], "a", 3]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 17}, "prompt"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
        ({"temprature": 1}, "temprature"),
    ],
)
async def test_a_bad_parameter_is_named_as_openai_names_it(body: dict[str, Any], param: str) -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", {"prompt": "x", **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
        assert error["message"].startswith(param)
        it.bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "boss", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "colour": "red"}, "messages[0].colour"),
        ("hello", "messages[0]"),
    ],
)
async def test_a_bad_message_is_named(message: Any, param: str) -> None:
    async with face() as it:
        reply = await it.post("/v1/chat/completions", {"messages": [message]})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'"x"', b"[" * 100_000])
async def test_what_is_no_object_is_refused(body: bytes) -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "body")


async def test_half_of_a_surrogate_pair_is_no_prompt() -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", rb'{"prompt": "\ud800"}')
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    "body", [rb'{"prompt": "a", "\ud800": 1}', rb'{"prompt": "a", "stream_options": {"\ud800": 1}}'], ids=["outer", "inner"]
)
async def test_half_of_a_surrogate_pair_is_no_name(body: bytes) -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", body)
        assert (reply.status_code, reply.json()["error"]["param"][-1]) == (400, "?")


async def test_another_model_is_not_found() -> None:
    async with face() as it:
        with pytest.raises(openai.NotFoundError, match="other"):
            await it.client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.NotFoundError):
            await it.client.models.retrieve("other")
        reply = await it.post("/v1/completions", b'{"model": 5, "prompt": "x"}')
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")


async def test_a_full_queue_is_429_with_a_hint() -> None:
    bench = Bench(script=Script(step_s=3600), config=RouterConfig(max_queue=1), slots=1)
    async with face(bench) as it:
        asks = [asyncio.ensure_future(it.client.completions.create(model="bytes", prompt="x")) for _ in range(2)]
        await until(lambda: bench.pipeline._queue.num_waiting == 1)
        with pytest.raises(openai.RateLimitError) as refused:
            await it.client.completions.create(model="bytes", prompt="x")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        for ask in asks:
            ask.cancel()
        await asyncio.wait(asks)
        await until(lambda: not bench.pipeline.num_by_phase)
        bench.assert_nothing_is_left()


async def test_no_worker_is_503_and_before_any_model_is_known_too() -> None:
    async with face(Bench(0, 1, config=RouterConfig(queue_wait_s=0.05))) as it:
        with pytest.raises(openai.InternalServerError) as refused:
            await it.client.completions.create(model="bytes", prompt="x")
        assert refused.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_cancels_at_once(stream: bool, begun: bool) -> None:
    bench = Bench(script=Script(prefill_s=0.0 if begun else 3600, step_s=3600))
    async with face(bench) as it:
        ask = asyncio.ensure_future(it.post("/v1/completions", {"prompt": "x", "stream": stream}))
        await until(lambda: bench.pipeline.num_by_phase.get("decoding" if begun else "prefilling"))
        ask.cancel()
        await asyncio.wait([ask])
        await until(lambda: bench.ended and not bench.cluster.num_running)
        assert [job.phase for job in bench.ended] == [Phase.CANCELLED]
        bench.assert_nothing_is_left()


async def test_an_error_after_the_first_token_ends_the_stream_with_an_error_event() -> None:
    bench = Bench(script=Script(lost_after={"d0": 2}), config=RouterConfig(queue_wait_s=0.05))
    async with face(bench) as it:
        stream = await it.client.completions.create(model="bytes", prompt="x", stream=True)
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass
        bench.assert_nothing_is_left()


async def test_a_body_that_is_too_large_is_refused_unread() -> None:
    async with face(max_body_bytes=1000) as it:
        reply = await it.post("/v1/completions", {"prompt": "x" * 2000})
        assert (reply.status_code, reply.json()["error"]["type"]) == (413, "invalid_request_error")


async def test_request_ids_come_back_and_bad_ones_are_refused() -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "mine-7"})
        assert (reply.headers["x-request-id"], reply.json()["id"]) == ("mine-7", "cmpl-mine-7")
        assert it.bench.ended[0].request_id == "mine-7"
        reply = await it.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "x" * 300})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-id")
        assert len((await it.post("/v1/completions", {"prompt": "x"})).headers["x-request-id"]) == 32


async def test_models_metrics_and_health() -> None:
    async with face() as it:
        models = await it.client.models.list()
        assert [model.id for model in models.data] == ["bytes"]
        assert (await it.client.models.retrieve("bytes")).id == "bytes"
        assert "tandem_kv_blocks" in (await it.get("/metrics")).text
        assert (await it.get("/healthz")).status_code == (await it.get("/readyz")).status_code == 200
        it.bench.cluster.lose("d0")
        assert ((await it.get("/healthz")).status_code, (await it.get("/readyz")).status_code) == (200, 503)
        assert (await it.get("/nothing")).json()["error"]["type"] == "invalid_request_error"


async def test_nothing_is_allowed_to_pages_of_other_origins() -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", {"prompt": "x"}, headers={"origin": "http://evil"})
        assert not [name for name in reply.headers if name.startswith("access-control")]


TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
CALLS = '<think>\nsum\n</think>\n\nOK\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "x"}]


async def test_tool_calls_and_reasoning_are_in_their_fields() -> None:
    async with face(Bench(script=says(CALLS))) as it:
        got = await it.client.chat.completions.create(model="bytes", messages=HELLO, tools=TOOLS)
        [choice] = got.choices
        assert (choice.message.content, choice.finish_reason) == ("OK", "tool_calls")
        assert choice.message.reasoning_content == "sum"  # type: ignore[attr-defined]
        assert choice.message.tool_calls is not None
        call: Any = choice.message.tool_calls[0]
        assert (call.function.name, call.function.arguments, call.id[:5]) == ("add", '{"a": 1}', "call_")


async def test_tool_calls_and_reasoning_stream() -> None:
    async with face(Bench(script=says(CALLS))) as it:
        stream = await it.client.chat.completions.create(model="bytes", messages=HELLO, tools=TOOLS, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "OK"
        assert "".join(getattr(chunk.delta, "reasoning_content", "") for chunk in chunks) == "sum"
        [call] = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
        assert call.function is not None
        assert (call.index, call.function.name, call.function.arguments) == (0, "add", '{"a": 1}')
        assert chunks[-1].finish_reason == "tool_calls"


async def test_options_reach_the_template_and_its_reasoning_may_begin_in_the_prompt() -> None:
    async with face(Bench(script=says("sum\n</think>\n\nOK"))) as it:
        body: Any = {"chat_template_kwargs": {"thinking": True}}
        got = await it.client.chat.completions.create(model="bytes", messages=HELLO, extra_body=body)
        assert (got.choices[0].message.content, got.choices[0].message.reasoning_content) == ("OK", "sum")  # type: ignore[attr-defined]


async def test_a_conversation_with_calls_and_their_results_goes_in() -> None:
    async with face() as it:
        call: Any = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
        messages.append({"role": "tool", "tool_call_id": "call_1", "content": "1"})
        await it.client.chat.completions.create(model="bytes", messages=messages, tools=TOOLS, tool_choice="auto")
        sent = it.bench.ended[0].message.chat
        assert (sent.messages[1].tool_calls[0].name, sent.messages[2].tool_call_id) == ("add", "call_1")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
    ],
)
async def test_a_bad_parameter_of_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    async with face() as it:
        reply = await it.post("/v1/chat/completions", {"messages": HELLO, **body})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


SCHEMA: Any = {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "json_object"),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA["schema"]}}, "json_schema"),
        ({"structured_outputs": {"regex": "a+"}}, "regex"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice"),
    ],
)
async def test_structured_output_is_asked_for_in_either_way(body: dict[str, Any], expected: str | None) -> None:
    async with face() as it:
        for path, what in (("/v1/chat/completions", {"messages": HELLO}), ("/v1/completions", {"prompt": "x"})):
            assert (await it.post(path, {**what, **body})).status_code == 200
            assert it.bench.ended[-1].message.WhichOneof("constraint") == expected
            assert bool(it.bench.ended[-1].request.grammar) == (expected is not None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ],
)
async def test_a_schema_that_cannot_be_compiled_is_refused_with_the_reason(body: dict[str, Any], param: str) -> None:
    async with face() as it:
        reply = await it.post("/v1/completions", {"prompt": "x", **body})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert len(reply.json()["error"]["message"]) > len(param) + 10

"""OpenAI's client against real workers, real NIXL and a small model: the same answers as through gRPC."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.otel import OtelTracer
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import kserve_pb2 as kserve
from tests.local_cluster import RANDOM, LocalCluster, local_cluster, until
from tests.traces import PARTS, PROMPT_WORDS, TRACEPARENT, Trace, texts_of, traces_of

MODEL = Path(RANDOM.path).name
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(spans: InMemorySpanExporter) -> AsyncIterator[LocalCluster]:
    async with local_cluster(2, 2, make_tracer=lambda *who: OtelTracer.to_exporter(spans, *who)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def infer(text: str, asked: dict[str, Any]) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(model_name=MODEL)
    for name, value in (("text_input", text), ("sampling_parameters", json.dumps(asked))):
        request.inputs.add(name=name, datatype="BYTES", shape=[1]).contents.bytes_contents.append(value.encode())
    return request


async def native(cluster: LocalCluster, message: pb.GenerateRequest) -> str:
    return "".join([response.text async for response in cluster.stub.Generate(message)])


async def test_a_seed_gives_the_same_text_through_any_face(cluster: LocalCluster, client: openai.AsyncOpenAI) -> None:
    sampling = pb.Sampling(temperature=0.9, top_p=0.95, seed=11, frequency_penalty=0.4, repetition_penalty=1.1)
    expected = await native(
        cluster, pb.GenerateRequest(text="Once upon a time", sampling=sampling, max_new_tokens=40, ignore_eos=True)
    )
    options: Any = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 40,
        "temperature": 0.9,
        "top_p": 0.95,
        "seed": 11,
        "frequency_penalty": 0.4,
        "extra_body": {"repetition_penalty": 1.1, "ignore_eos": True},
    }
    whole = await client.completions.create(**options)
    streamed = "".join([chunk.choices[0].text async for chunk in await client.completions.create(**options, stream=True)])
    assert whole.choices[0].text == streamed == expected
    await cluster.until_whole()


async def test_a_seed_gives_the_same_text_alone_in_a_crowd_on_any_worker_and_through_any_face(
    cluster: LocalCluster, client: openai.AsyncOpenAI
) -> None:
    sampling = pb.Sampling(temperature=1.0, seed=23, min_p=0.01, presence_penalty=0.3)
    message = pb.GenerateRequest(text="The river was", sampling=sampling, max_new_tokens=24, ignore_eos=True)
    alone = await native(cluster, message)
    served_by = set()

    async def through_grpc() -> str:
        responses = [response async for response in cluster.stub.Generate(message)]
        served_by.add((responses[-1].finished.prefill_worker, responses[-1].finished.decode_worker))
        return "".join(response.text for response in responses)

    async def through_http() -> str:
        body: Any = {"min_p": 0.01, "ignore_eos": True}
        got = await client.completions.create(
            model=MODEL,
            prompt="The river was",
            max_tokens=24,
            temperature=1,
            seed=23,
            presence_penalty=0.3,
            extra_body=body,
        )
        return got.choices[0].text

    async def through_kserve() -> str:
        asked = {"max_tokens": 24, "temperature": 1, "seed": 23, "min_p": 0.01, "presence_penalty": 0.3, "ignore_eos": True}
        reply = await cluster.kserve.ModelInfer(infer("The river was", asked))
        place = [output.name for output in reply.outputs].index("text_output")
        return reply.raw_output_contents[place][4:].decode()

    async def stranger(number: int) -> str:
        other = pb.Sampling(temperature=0.2 * (number % 6), seed=number, repetition_penalty=1 + number / 10)
        text = "stranger " * (number + 1)
        return await native(cluster, pb.GenerateRequest(text=text, sampling=other, max_new_tokens=30, ignore_eos=True))

    async def in_a_crowd() -> None:
        strangers = [asyncio.create_task(stranger(number)) for number in range(16)]
        same = await asyncio.gather(*(through() for through in (through_grpc, through_http, through_kserve) for _ in range(4)))
        await asyncio.gather(*strangers)
        assert same == [alone] * 12

    # Prompts that are equal go where the first one's state is kept: other prefill workers have tests/test_handoff_parity.py.
    # Which decode worker they go to is the crowd's doing: it may take more than one to see both.
    for _ in range(6):
        await in_a_crowd()
        if len({decode for _, decode in served_by}) == 2:
            break
    assert len({decode for _, decode in served_by}) == 2
    await cluster.until_whole()


async def test_a_crowd_of_different_parameters_is_answered_as_alone(cluster: LocalCluster, client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> Any:
        return await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": f"Tell me about {seed}"}],
            seed=seed,
            max_tokens=12,
            n=2,
            temperature=0.3 * (seed % 4),
            presence_penalty=(seed % 3) / 2,
            logprobs=bool(seed % 2),
            extra_body={"min_p": 0.01 * (seed % 5), "ignore_eos": True},
        )

    together = await asyncio.gather(*(ask(seed) for seed in range(8)))
    for seed in range(0, 8, 3):
        alone = await ask(seed)
        assert [c.message.content for c in alone.choices] == [c.message.content for c in together[seed].choices]
        # A prefix that is found rather than computed may change the last bits.
        assert _logprobs(alone) == pytest.approx(_logprobs(together[seed]), abs=1e-3)
    await cluster.until_whole()


def _logprobs(got: Any) -> list[float]:
    return [entry.logprob for choice in got.choices if choice.logprobs for entry in choice.logprobs.content]


async def test_an_answer_follows_its_schema_over_the_hand_off(cluster: LocalCluster, client: openai.AsyncOpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    messages: Any = [{"role": "user", "content": "x"}]
    for seed in range(4):
        got = await client.chat.completions.create(
            model=MODEL, messages=messages, response_format=form, seed=seed, max_tokens=200
        )
        if got.choices[0].finish_reason == "stop":
            data = json.loads(got.choices[0].message.content or "")
            assert isinstance(data["ok"], bool)
            assert data["n"] in (1, 2, 3)
    extra: Any = {"structured_outputs": {"choice": ["left", "right"]}}
    chosen = await client.completions.create(model=MODEL, prompt="go ", n=4, seed=2, extra_body=extra)
    assert {choice.text for choice in chosen.choices} <= {"left", "right"}
    await cluster.until_whole()


async def test_what_workers_measure_is_told_to_the_router(cluster: LocalCluster) -> None:
    def total(name: str) -> float:
        return sum(series.total for (family, _), series in cluster.measures.series().items() if family == name)

    names = ("prefill_tokens", "prefix_cache_hit_tokens", "decode_tokens", "transfer_bytes", "requests")
    before = {name: total(name) for name in names}
    prompt = list(range(40, 80))
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), max_new_tokens=6, ignore_eos=True)
    await native(cluster, message)
    await until(lambda: total("decode_tokens") >= before["decode_tokens"] + 5, 5.0)
    await until(lambda: total("transfer_bytes") > before["transfer_bytes"], 5.0)
    # Each worker tells by itself, and an answer is absorbed in idle time: more than the prompt may come.
    computed_before = before["prefill_tokens"] + before["prefix_cache_hit_tokens"]
    await until(lambda: total("prefill_tokens") + total("prefix_cache_hit_tokens") >= computed_before + len(prompt), 5.0)
    added = {name: total(name) - before[name] for name in names}
    assert added["requests"] == 1


async def traced(cluster: LocalCluster, spans: InMemorySpanExporter, count: int = 1) -> list[Trace]:
    """The traces since the last look, once they are whole and nothing is under way."""
    await cluster.until_whole()
    found: list[Trace] = []

    def all_there() -> bool:
        found[:] = traces_of(spans.get_finished_spans())
        return len(found) == count and all(trace.is_whole for trace in found)

    await until(all_there, 10.0)
    spans.clear()
    return found


async def test_a_request_is_one_trace_over_router_prefill_transfer_and_decode(
    cluster: LocalCluster, spans: InMemorySpanExporter
) -> None:
    await cluster.until_whole()
    spans.clear()
    text = await native(cluster, pb.GenerateRequest(text=" ".join(PROMPT_WORDS), max_new_tokens=8, ignore_eos=True))
    (trace,) = await traced(cluster, spans)
    assert trace.parents == PARTS
    assert {name: trace.service(name) for name in PARTS} == {
        "tandem.request": "tandem-router",
        "tandem.queue": "tandem-router",
        "tandem.attempt": "tandem-router",
        "tandem.prefill": "tandem-prefill",
        "tandem.transfer": "tandem-prefill",
        "tandem.decode": "tandem-decode",
    }
    assert trace.root_parent is None
    workers = trace.attributes("tandem.attempt")
    assert trace.instance("tandem.prefill") == workers["tandem.prefill_worker"]
    assert trace.instance("tandem.decode") == workers["tandem.decode_worker"]
    assert trace.attributes("tandem.request")["gen_ai.usage.output_tokens"] == 8
    assert trace.attributes("tandem.decode")["gen_ai.usage.output_tokens"] == 7  # prefill drew the first
    assert trace.attributes("tandem.transfer")["tandem.state_bytes"] > 0
    assert trace.in_order("tandem.request", "tandem.queue", "tandem.attempt", "tandem.prefill", "tandem.decode")
    assert not [word for word in (*PROMPT_WORDS, text) if word in texts_of(trace.spans)]


@pytest.mark.parametrize("door", ["grpc", "http", "kserve"])
async def test_a_clients_trace_goes_on_through_every_door(
    cluster: LocalCluster, spans: InMemorySpanExporter, door: str
) -> None:
    await cluster.until_whole()
    spans.clear()
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=value"}
    asked = {"max_tokens": 3, "ignore_eos": True}
    if door == "grpc":
        message = pb.GenerateRequest(text="a", max_new_tokens=3, ignore_eos=True)
        async for _ in cluster.stub.Generate(message, metadata=tuple(headers.items())):
            pass
    elif door == "http":
        async with httpx2.AsyncClient() as http:
            reply = await http.post(f"{cluster.http_url}/v1/completions", json={"prompt": "a", **asked}, headers=headers)
            assert reply.status_code == 200
    else:
        await cluster.kserve.ModelInfer(infer("a", asked), metadata=tuple(headers.items()))
    (trace,) = await traced(cluster, spans)
    assert trace.parents == PARTS
    assert f"00-{trace.trace_id}-{trace.root_parent}-01" == TRACEPARENT
    assert {span.context.trace_state.to_header() for span in trace.spans} == {"vendor=value"}


async def test_answers_to_one_request_share_its_trace_and_what_ends_at_the_first_token_has_no_transfer(
    cluster: LocalCluster, spans: InMemorySpanExporter
) -> None:
    await cluster.until_whole()
    spans.clear()
    await native(cluster, pb.GenerateRequest(text="a", max_new_tokens=1, n=3, sampling=pb.Sampling(temperature=1.0)))
    (trace,) = await traced(cluster, spans)
    names = [span.name for span in trace.spans]
    assert {name: names.count(name) for name in names} == {
        "tandem.request": 1,
        "tandem.queue": 3,
        "tandem.attempt": 3,
        "tandem.prefill": 3,
    }


async def test_a_client_that_the_collector_does_not_want_is_not_traced(
    cluster: LocalCluster, spans: InMemorySpanExporter
) -> None:
    await cluster.until_whole()
    spans.clear()
    unsampled = (("traceparent", TRACEPARENT.removesuffix("01") + "00"),)
    async for _ in cluster.stub.Generate(pb.GenerateRequest(text="a", max_new_tokens=3), metadata=unsampled):
        pass
    await cluster.until_whole()
    assert spans.get_finished_spans() == ()

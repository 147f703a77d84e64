"""Without a known key nobody gets in at any door, and a key's own limit holds."""

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import openai
import pytest

from router.answer import Delta
from router.callers import ANYONE, Callers
from router.fake_workers import Script
from router.job import Outcome
from tandem.client import AsyncClient
from tandem.errors import ConfigError, Overloaded, Unauthenticated
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import kserve_pb2, kserve_pb2_grpc
from tandem.v1 import operations_pb2 as operations
from tests.router.http.tools import face
from tests.router.test_kserve import infer
from tests.router.test_server import door
from tests.router.tools import Bench, prompt, says, until

KEY, OTHER = "sk-0123456789abcdef", "sk-another-key-of-some-length"


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    file = tmp_path / "keys"
    file.write_text(f"# who   key   at once\nteam {KEY} 2\n\nother {OTHER}  # no limit\n")
    return Callers.load(str(file))


def test_a_key_is_found_by_either_header(callers: Callers) -> None:
    assert callers.identify([("authorization", f"Bearer {KEY}")]).name == "team"
    assert callers.identify([("x-api-key", OTHER)]).name == "other"
    assert callers.identify([("authorization", f"bearer  {KEY} ".encode())]).max_at_once == 2


@pytest.mark.parametrize(
    "headers",
    [[], [("authorization", KEY)], [("authorization", f"Bearer {KEY}x")], [("x-api-key", "")], [("authorization", "Basic x")]],
)
def test_anything_else_is_refused(callers: Callers, headers: list[tuple[str, str]]) -> None:
    with pytest.raises(Unauthenticated):
        callers.identify(headers)


def test_without_a_file_everybody_may() -> None:
    assert Callers.load("").identify([]) is ANYONE


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no API key"),
        ("only-a-name", "line 1"),
        (f"a {KEY}\nb {KEY}", "line 2.*that of a already"),
        (f"a {KEY} many", "line 1.*no number"),
        (f"a {KEY} 1 2 3", "line 1.*one or two numbers"),
        (f"a {KEY} 1 -2", "line 1.*'-2' is no number"),
        ("a short", "too short"),
    ],
)
def test_a_broken_file_is_named_by_line_and_never_shows_a_key(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason) as error:
        Callers.load(str(file))
    assert KEY not in str(error.value)
    with pytest.raises(ConfigError, match="cannot read"):
        Callers.load(str(tmp_path / "none"))


async def test_every_grpc_method_but_health_asks_for_a_key(callers: Callers) -> None:
    async with door(Bench(script=says("hi"), callers=callers)) as it:
        kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(it.channel)
        for call in (
            it.inference.ListModels(pb.ListModelsRequest()),
            it.operations.GetStatus(operations.GetStatusRequest()),
            kserve.ServerLive(kserve_pb2.ServerLiveRequest()),
            kserve.ModelInfer(kserve_pb2.ModelInferRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in it.inference.Generate(pb.GenerateRequest(text="x")):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await it.health() == "SERVING"
        async with AsyncClient(it.address, api_key=KEY) as client:
            assert (await client.generate("x")).text == "hi"
        assert it.bench.ended[0].request_id
        it.bench.assert_nothing_is_left()


async def test_http_asks_for_a_key_as_openai_does(callers: Callers) -> None:
    async with face(Bench(script=says("hi"), callers=callers)) as it:
        with pytest.raises(openai.AuthenticationError) as refused:
            await it.client.completions.create(model="bytes", prompt="x")
        assert refused.value.code == "invalid_api_key"
        with pytest.raises(openai.AuthenticationError):
            await it.client.models.list()
        known = it.client.with_options(api_key=KEY)
        assert (await known.completions.create(model="bytes", prompt="x")).choices[0].text == "hi"
        assert (await it.get("/healthz")).status_code == 200


async def test_a_key_has_only_so_many_answers_under_way(callers: Callers) -> None:
    bench = Bench(script=Script(step_s=3600), callers=callers)
    team = callers.identify([("x-api-key", KEY)])
    async with door(bench) as it, AsyncClient(it.address, api_key=KEY) as client:
        first = asyncio.ensure_future(client.generate("x"))
        await until(lambda: team.num_at_once == 1)
        with pytest.raises(Overloaded, match="2 answers"):
            await client.generate("x", n=2)
        second = asyncio.ensure_future(client.generate("x"))
        await until(lambda: team.num_at_once == 2)
        with pytest.raises(Overloaded):
            await client.generate("x")
        for ask in (first, second):
            ask.cancel()
        await asyncio.wait((first, second))
        await until(lambda: team.num_at_once == 0)
        async with AsyncClient(it.address, api_key=OTHER) as other:
            with pytest.raises(TimeoutError):
                await other.generate("x", n=5, timeout_s=0.2)
        await until(lambda: not bench.cluster.num_running and not bench.pipeline.num_by_phase)
        bench.assert_nothing_is_left()


def keys_with(tmp_path: Path, line: str) -> Callers:
    file = tmp_path / "limited"
    file.write_text(line)
    return Callers.load(str(file))


async def test_a_key_has_only_so_many_answers_waiting_and_others_still_get_in(tmp_path: Path) -> None:
    callers = keys_with(tmp_path, f"team {KEY} 0 1\nother {OTHER}\n")
    bench = Bench(script=Script(step_s=3600), callers=callers, slots=1)
    team = callers.identify([("x-api-key", KEY)])
    async with door(bench) as it, AsyncClient(it.address, api_key=KEY) as client:
        running = asyncio.ensure_future(client.generate("x"))
        await until(lambda: bench.pipeline.num_by_phase["decoding"] == 1)
        waiting = asyncio.ensure_future(client.generate("x"))
        await until(lambda: team.num_queued == 1)
        with pytest.raises(Overloaded, match=r"1 answers waiting at once \(max_queued\)") as refused:
            await client.generate("x")
        assert refused.value.retry_after_s > 0
        kserve = kserve_pb2_grpc.GRPCInferenceServiceStub(it.channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await kserve.ModelInfer(infer("text_input", "BYTES", bytes_contents=[b"x"]), metadata=(("x-api-key", KEY),))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.value.trailing_metadata())["retry-after-ms"]) > 0
        async with AsyncClient(it.address, api_key=OTHER) as other:
            also = asyncio.ensure_future(other.generate("x"))
            await until(lambda: bench.pipeline.num_by_phase["queued"] == 2)
            also.cancel()
            await asyncio.wait([also])
        for ask in (running, waiting):
            ask.cancel()
        await asyncio.wait((running, waiting))
        await until(lambda: not bench.pipeline.num_by_phase and not bench.cluster.num_running)
        assert (team.num_at_once, team.num_queued) == (0, 0)
        bench.assert_nothing_is_left()


async def test_http_tells_a_key_when_to_come_again(tmp_path: Path) -> None:
    callers = keys_with(tmp_path, f"team {KEY} 0 1\n")
    bench = Bench(script=Script(step_s=3600), callers=callers, slots=1)
    async with face(bench) as it:
        client = it.client.with_options(api_key=KEY)
        with pytest.raises(openai.RateLimitError, match="max_queued") as refused:
            await client.completions.create(model="bytes", prompt="x", n=3)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        await until(lambda: not bench.pipeline.num_by_phase and not bench.cluster.num_running)
        bench.assert_nothing_is_left()


async def test_an_answer_that_is_placed_again_is_not_refused_for_the_queue_of_its_key(tmp_path: Path) -> None:
    callers = keys_with(tmp_path, f"team {KEY} 0 1\n")
    team = callers.identify([("x-api-key", KEY)])
    bench = Bench(script=Script(handoff_failures=["TransferFailed"]), callers=callers)
    stream = bench.pipeline.generate(prompt(max_new_tokens=3), "r", None, team)
    first = await anext(stream)
    with team.queued():  # another one waits by now
        rest = [item async for item in stream]
    assert isinstance(first, Delta)
    assert isinstance(rest[-1], Outcome)
    assert rest[-1].attempts == 2
    assert team.num_queued == 0

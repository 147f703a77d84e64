"""The front door over real gRPC: statuses, metadata, health, reflection, cancellation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.fake_workers import Script
from router.fleet import Fleet, PoolWish
from router.operations import OperationsService
from router.server import HealthReporter, InferenceService, build_server
from router.worker import WorkerLoad
from tandem.config import RouterConfig
from tandem.rpc import bind, create_blocking_channel, create_channel
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem.v1 import kserve_pb2 as kserve
from tandem.v1 import kserve_pb2_grpc as kserve_grpc
from tandem.v1 import operations_pb2 as operations
from tandem.v1 import operations_pb2_grpc as operations_grpc
from tests.router.http.tools import face
from tests.router.tools import SERVED, Bench, prompt, says, until


class Door:
    """A bench behind a real server, and a channel to it."""

    def __init__(self, bench: Bench, fleet: Fleet, channel: grpc.aio.Channel, address: str) -> None:
        self.bench = bench
        self.address = address
        self.fleet = fleet
        self.channel = channel
        self.inference = pb_grpc.InferenceStub(channel)
        self.operations = operations_grpc.OperationsStub(channel)

    async def health(self, service: str = "") -> str:
        reply = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(service=service))
        return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


@asynccontextmanager
async def door(bench: Bench, known: bool = True) -> AsyncIterator[Door]:
    table = bench.cluster.table
    fleet = Fleet(table, lambda info: pytest.fail("no handle is made here"), lambda path: SERVED.tokenizer)
    fleet.model = SERVED if known else None
    bench.pipeline._model = lambda: fleet.model
    reporter = HealthReporter(table)
    await reporter.start()
    server = build_server(
        InferenceService(bench.pipeline, fleet), OperationsService(bench.pipeline, fleet, table), reporter, 1024 * 1024
    )
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        address = f"127.0.0.1:{port}"
        async with create_channel(address) as channel:
            yield Door(bench, fleet, channel, address)
    finally:
        await server.stop(None)


async def refusal(call: grpc.aio.UnaryStreamCall) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value


async def test_an_answer_ends_with_one_message_that_tells_all() -> None:
    async with door(Bench(script=says("hi wörld"))) as it:
        call = it.inference.Generate(prompt(), metadata=(("x-request-id", "mine-1"),))
        messages = [message async for message in call]
        assert "".join(message.text for message in messages) == "hi wörld"
        assert bytes(i for message in messages for i in message.token_ids) == "hi wörld".encode() + b"\0"
        assert [message.HasField("finished") for message in messages] == [False] * (len(messages) - 1) + [True]
        end = messages[-1].finished
        assert (end.finish_reason, end.prefill_worker, end.decode_worker, end.attempts) == ("stop", "p0", "d0", 1)
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (5, 10)
        assert end.request_id == dict(await call.initial_metadata())["x-request-id"] == "mine-1"
        times = end.timings
        assert 0 <= times.queue <= times.ttft <= times.total
        assert 0 < times.decode <= times.total
        assert times.ttft == pytest.approx(times.queue + times.prefill)


async def test_a_request_id_is_made_when_none_is_given() -> None:
    async with door(Bench()) as it:
        ids = {[m async for m in it.inference.Generate(prompt(max_new_tokens=1))][-1].finished.request_id for _ in range(2)}
        assert len(ids) == 2


async def test_equal_request_ids_do_not_mix_their_answers() -> None:
    async with door(Bench()) as it:

        async def ask(text: str) -> list[int]:
            call = it.inference.Generate(prompt(text, max_new_tokens=9), metadata=(("x-request-id", "same"),))
            return [i async for message in call for i in message.token_ids]

        together = await asyncio.gather(ask("a"), ask("b"))
        assert together == [await ask("a"), await ask("b")]


async def test_a_request_for_nothing_names_the_field() -> None:
    async with door(Bench()) as it:
        error = await refusal(it.inference.Generate(prompt(max_new_tokens=0)))
        assert (error.code(), error.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "max_new_tokens: must be at least 1, not 0",
        )
        assert dict(error.trailing_metadata())["x-request-id"]


EMPTY = {
    "text": pb.GenerateRequest(text=""),
    "tokens": pb.GenerateRequest(token_ids=pb.TokenIds()),
    "chat": pb.GenerateRequest(chat=pb.ChatMessages()),
    "nothing": pb.GenerateRequest(),
}


async def test_an_empty_prompt_is_refused_at_every_door_and_the_next_request_served() -> None:
    bench = Bench(script=says("hi"))
    async with door(bench) as it, face(bench) as http:
        for message in EMPTY.values():
            assert (await refusal(it.inference.Generate(message))).code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await kserve_grpc.GRPCInferenceServiceStub(it.channel).ModelInfer(kserve.ModelInferRequest())
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        for body in ({"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [""]}, {}):
            assert (await http.post("/v1/completions", body)).status_code == 400
        assert (await http.post("/v1/chat/completions", {"messages": []})).status_code == 400
        assert [message async for message in it.inference.Generate(prompt())][-1].finished.finish_reason == "stop"
        assert (await http.post("/v1/completions", {"prompt": "x"})).json()["choices"][0]["text"] == "hi"
        bench.assert_nothing_is_left()


async def test_what_an_error_quotes_is_cut_to_what_a_trailer_carries() -> None:
    async with door(Bench()) as it, face(it.bench) as http:
        for message in (
            pb.GenerateRequest(text="x", regex="(" * 5000),
            pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="é" * 20_000, content="x")])),
            pb.GenerateRequest(text="x", json_schema='{"type": "' + "y" * 20_000 + '"}'),
        ):
            error = await refusal(it.inference.Generate(message))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().split(":")[0] in ("regex", "chat.messages[0].role", "json_schema")
        assert len((await http.post("/v1/completions", {"prompt": "x", "z" * 1_000_000: 1})).content) < 5000


async def test_a_bad_request_id_is_refused() -> None:
    async with door(Bench()) as it:
        error = await refusal(it.inference.Generate(prompt(), metadata=(("x-request-id", "x" * 200),)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "x-request-id" in error.details()


@pytest.mark.parametrize(
    "data", [b"\x12\x02\xff\xfe", b"\x12\x03\xed\xa0\x80", b"\xff\xff\xff"], ids=["bytes", "surrogate", "noise"]
)
async def test_bytes_that_are_no_request_are_the_clients_mistake(data: bytes) -> None:
    async with door(Bench()) as it:
        error = await refusal(it.channel.unary_stream("/tandem.v1.Inference/Generate")(data, timeout=5))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "method",
    [
        "/tandem.v1.Inference/ListModels",
        "/tandem.v1.Operations/GetStatus",
        "/inference.GRPCInferenceService/ModelInfer",
        "/inference.GRPCInferenceService/ModelStreamInfer",
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_bytes_that_are_no_message_are_refused_by_every_method(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def refused_code(address: str, sent: list[bytes]) -> grpc.StatusCode:
        # Not grpc.aio: a message that it sends after the refusal came hides that behind an INTERNAL of the client's own.
        with create_blocking_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
            list(channel.stream_stream(method)(iter(sent), timeout=5))
        return refused.value.code()

    async with door(Bench()) as it:
        for sent in ([b"\xff\xff\xff"], [b"\xff", b"\xff"]):
            assert await asyncio.to_thread(refused_code, it.address, sent) is grpc.StatusCode.INVALID_ARGUMENT
        assert not caplog.records


async def test_a_call_whose_request_never_comes_ends_in_time() -> None:
    bench = Bench(config=RouterConfig(client_timeout_s=0.05))
    async with door(bench) as it:
        for path in ("/tandem.v1.Inference/Generate", "/inference.GRPCInferenceService/ModelInfer"):
            error = await refusal(it.channel.stream_stream(path)(timeout=5))
            assert (error.code(), "did not come" in error.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, True)
            assert (
                await refusal(it.channel.stream_stream(path)(iter(()), timeout=5))
            ).code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_beyond_the_limit_is_refused() -> None:
    async with door(Bench()) as it:
        error = await refusal(it.inference.Generate(prompt("x" * 2_000_000), timeout=5))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_full_queue_comes_with_a_retry_hint() -> None:
    bench = Bench(script=Script(step_s=3600), config=RouterConfig(max_queue=1), slots=1)
    async with door(bench) as it:
        calls = [it.inference.Generate(prompt()) for _ in range(2)]
        await asyncio.gather(*(call.wait_for_connection() for call in calls))
        await until(lambda: bench.pipeline.num_by_phase == {"queued": 1, "decoding": 1})
        error = await refusal(it.inference.Generate(prompt()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["retry-after-ms"]) > 0
        for call in calls:
            call.cancel()


async def test_no_worker_is_unavailable() -> None:
    async with door(Bench(0, 1, config=RouterConfig(queue_wait_s=0.05))) as it:
        error = await refusal(it.inference.Generate(prompt()))
        assert (error.code(), "no prefill worker" in error.details()) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_before_any_worker_is_known_the_answer_is_unavailable() -> None:
    async with door(Bench(0, 0), known=False) as it:
        assert (await refusal(it.inference.Generate(prompt()))).code() is grpc.StatusCode.UNAVAILABLE
        assert not (await it.inference.ListModels(pb.ListModelsRequest())).models


async def test_a_deadline_reaches_the_workers() -> None:
    bench = Bench(script=Script(step_s=3600))
    async with door(bench) as it:
        call = it.inference.Generate(prompt(), timeout=1)
        await until(lambda: bench.pipeline.num_by_phase["decoding"])
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: bench.ended and not bench.cluster.num_running)
        bench.assert_nothing_is_left()


async def test_a_client_that_leaves_frees_both_workers() -> None:
    bench = Bench(script=Script(step_s=0.005))
    async with door(bench) as it:
        call = it.inference.Generate(prompt(max_new_tokens=400))
        await call.read()
        call.cancel()
        await until(lambda: bench.ended)
        assert all(len(keys) == 1 for keys in bench.cluster.cancels().values())
        await until(lambda: not bench.cluster.num_running)
        bench.assert_nothing_is_left()


async def test_a_bug_is_internal_and_logged_with_the_request(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: object, index: int) -> int:
        return 1

    bench = Bench(script=Script(answer=broken))
    bench.cluster.prefill[0].on_submit = lambda *_: 1 / 0
    async with door(bench) as it:
        error = await refusal(it.inference.Generate(prompt(), metadata=(("x-request-id", "the-one"),)))
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "the-one" in error.details()
        assert any("the-one" in record.message and record.exc_info for record in caplog.records)
        bench.assert_nothing_is_left()


async def test_health_follows_the_pools() -> None:
    bench = Bench()
    async with door(bench) as it:
        assert {await it.health(""), await it.health("tandem.v1.Inference")} == {"SERVING"}
        bench.cluster.lose("d0")
        await asyncio.sleep(0)
        assert {await it.health(""), await it.health("tandem.v1.Inference")} == {"NOT_SERVING"}
        bench.cluster.decode[0].load = WorkerLoad(state_slots_total=1)
        bench.cluster.table.changed()
        await asyncio.sleep(0)
        assert await it.health() == "SERVING"
        bench.cluster.table.set_draining("p0", True)
        await asyncio.sleep(0)
        assert await it.health() == "NOT_SERVING"


async def test_reflection_lists_the_services() -> None:
    async with door(Bench()) as it:
        stub = reflection_pb2_grpc.ServerReflectionStub(it.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        reply = await call.read()
        names = {service.name for service in reply.list_services_response.service}
        assert {"tandem.v1.Inference", "tandem.v1.Operations", "grpc.health.v1.Health"} <= names


async def test_models_and_status_tell_what_is_there() -> None:
    bench = Bench(2, 1)
    async with door(bench) as it:
        (model,) = (await it.inference.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.fingerprint, model.max_context_tokens) == ("bytes", "f1", 512)
        it.fleet.pools = {"prefill": PoolWish(2), "decode": PoolWish(2, "no node offers tandem_decode")}
        bench.cluster.decode[0].load = WorkerLoad(
            queue=1, running=3, kv_blocks_used=7, kv_blocks_total=64, leases={"running": 3}
        )
        bench.cluster.table.set_draining("p1", True)
        status = await it.operations.GetStatus(operations.GetStatusRequest())
        assert (status.model_name, status.model_fingerprint) == ("bytes", "f1")
        assert [(w.id, w.role, w.state) for w in status.workers] == [
            ("p0", "prefill", "ready"),
            ("p1", "prefill", "draining"),
            ("d0", "decode", "ready"),
        ]
        assert (status.workers[2].kv_blocks.used, status.workers[2].kv_blocks.total, status.workers[2].running) == (7, 64, 3)
        assert dict(status.leases) == {"running": 3}
        assert (status.pools["decode"].wanted, status.pools["decode"].ready) == (2, 1)
        assert status.pools["decode"].reason == "no node offers tandem_decode"


async def test_a_client_that_does_not_read_is_sent_few_messages() -> None:
    """Its window fills; what comes meanwhile waits as one answer, not as many messages."""
    text = "x" * 400
    bench = Bench(script=says(text))
    async with door(bench) as it:
        call = it.inference.Generate(prompt(max_new_tokens=400))
        await until(lambda: bench.ended)
        messages = [message async for message in call]
        assert "".join(message.text for message in messages) == text
        assert len(messages) < 400


# Windows of HTTP/2 that do not grow with what comes.
SMALL_WINDOWS = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535), ("grpc.enable_http_proxy", 0))


async def test_a_client_that_never_reads_is_given_up_in_time_and_leaves_nothing() -> None:
    bench = Bench(config=RouterConfig(client_timeout_s=0.2), slots=16)
    async with door(bench) as it, grpc.aio.insecure_channel(it.address, options=SMALL_WINDOWS) as channel:
        message = prompt("x" * 400, max_new_tokens=100, n=4, logprobs=20, prompt_logprobs=20, echo=True, ignore_eos=True)
        call = pb_grpc.InferenceStub(channel).Generate(message)
        await call.wait_for_connection()
        await until(lambda: bench.ended and not bench.pipeline.num_by_phase)
        bench.assert_nothing_is_left()
        error = await refusal(call)
        assert error.code() is grpc.StatusCode.CANCELLED
        assert "nothing of the answer was read" in error.details()

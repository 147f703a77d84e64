"""The gRPC front door: Inference, Operations, health and reflection."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from router.answer import Delta, Prompt
from router.fleet import Fleet
from router.gate import KeyInterceptor
from router.job import Outcome
from router.operations import OperationsService
from router.pipeline import Pipeline
from router.reader import RequestReader
from router.state import WorkerTable
from router.statuses import retry_hint, status_of_error
from router.validation import validate_request_id
from router.wire_text import find_invalid_text
from router.writer import write
from tandem.errors import InvalidRequest, RequestError
from tandem.request import TokenLogprobs
from tandem.rpc import create_server
from tandem.tracing import read_context
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import kserve_pb2 as kserve
from tandem.v1 import kserve_pb2_grpc as kserve_grpc
from tandem.v1 import operations_pb2 as operations
from tandem.v1 import operations_pb2_grpc as operations_grpc

__all__ = ["REQUEST_ID_HEADER", "HealthReporter", "InferenceService", "build_server"]

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
INFERENCE = pb.DESCRIPTOR.services_by_name["Inference"].full_name
OPERATIONS = operations.DESCRIPTOR.services_by_name["Operations"].full_name
KSERVE = kserve.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Bytes that are no GenerateRequest, invalid UTF-8 among them. field: where."""

    field: str
    reason: str


class InferenceService:
    def __init__(self, pipeline: Pipeline, fleet: Fleet) -> None:
        self._pipeline = pipeline
        self._fleet = fleet

    @property
    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """For the server: keys are asked for before anything is read."""
        callers = self._pipeline.callers
        reader = RequestReader(self._pipeline.client_timeout_s)
        return [KeyInterceptor(callers), reader] if callers.by_digest else [reader]

    async def Generate(self, request: pb.GenerateRequest | _Malformed, context: grpc.aio.ServicerContext) -> None:
        request_id = _request_id(context)
        try:
            validate_request_id(request_id)
            await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
            if isinstance(request, _Malformed):
                raise InvalidRequest(request.field, request.reason)
            await self._answer(request, request_id, context)
            return
        except (RequestError, TimeoutError) as error:
            (code, details), trailers = status_of_error(error), retry_hint(error)
        except Exception:
            if context.done():
                return  # the client left while we wrote to it
            log.exception("request %s ended by a bug", request_id)
            code, trailers = grpc.StatusCode.INTERNAL, ()
            details = f"internal error; the router's log has it under request {request_id}"
        await context.abort(code, details, ((REQUEST_ID_HEADER, _printable(request_id)), *trailers))

    async def ListModels(self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext) -> pb.ListModelsResponse:
        if self._fleet.model is None:
            return pb.ListModelsResponse()
        info = self._fleet.model.info
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=info.name,
                    fingerprint=info.fingerprint,
                    max_context_tokens=info.max_context_tokens,
                    vocab_size=info.vocab_size,
                )
            ]
        )

    async def _answer(self, request: pb.GenerateRequest, request_id: str, context: grpc.aio.ServicerContext) -> None:
        """`write` waits for the client; what comes meanwhile is one message afterwards."""
        metadata = context.invocation_metadata() or ()
        caller, trace = self._pipeline.callers.identify(metadata), read_context(metadata)
        stream = self._pipeline.generate(request, request_id, context.time_remaining(), caller, trace)
        async with contextlib.aclosing(stream):
            async for item in stream:
                await write(context, _response(item, self._token_bytes), self._pipeline.client_timeout_s)

    def _token_bytes(self, token_id: int) -> bytes:
        return self._fleet.model.tokenizer.token_bytes(token_id) if self._fleet.model else b""


class HealthReporter:
    """SERVING while a ready worker of each pool is connected. After `stop` it stays NOT_SERVING."""

    def __init__(self, table: WorkerTable) -> None:
        self.servicer = health.aio.HealthServicer()
        self._table = table
        self._stopped = False
        self._shown: bool | None = None
        self._one_at_a_time = asyncio.Lock()
        self._updates: set[asyncio.Task[None]] = set()
        table.listen(self._update)

    async def start(self) -> None:
        await self._show()

    async def stop(self) -> None:
        self._stopped = True
        await self._show()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def _serving(self) -> bool:
        return self._table.can_serve and not self._stopped

    def _update(self) -> None:
        if self._serving != self._shown:
            update = asyncio.ensure_future(self._show())
            self._updates.add(update)
            update.add_done_callback(self._updates.discard)

    async def _show(self) -> None:
        """What is true when its turn comes, so that quick changes end with the newest."""
        async with self._one_at_a_time:
            self._shown = self._serving
            statuses = health_pb2.HealthCheckResponse
            status = statuses.SERVING if self._shown else statuses.NOT_SERVING
            for service in ("", INFERENCE, OPERATIONS):
                await self.servicer.set(service, status)


def build_server(
    inference: InferenceService,
    operations_service: OperationsService,
    reporter: HealthReporter,
    max_message_bytes: int,
    connection_age_s: float = 0.0,
) -> grpc.aio.Server:
    """All services on one server, without a port yet. See `create_server` for its numbers."""
    server = create_server(max_message_bytes, inference.interceptors, connection_age_s)
    # By hand: the generated code would answer bytes that do not parse with UNKNOWN.
    methods = {
        "Generate": grpc.unary_stream_rpc_method_handler(
            inference.Generate, request_deserializer=_parse, response_serializer=pb.GenerateResponse.SerializeToString
        ),
        "ListModels": grpc.unary_unary_rpc_method_handler(
            inference.ListModels,
            request_deserializer=pb.ListModelsRequest.FromString,
            response_serializer=pb.ListModelsResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, methods),))
    operations_grpc.add_OperationsServicer_to_server(operations_service, server)
    kserve_grpc.add_GRPCInferenceServiceServicer_to_server(operations_service.kserve(), server)
    health_pb2_grpc.add_HealthServicer_to_server(reporter.servicer, server)
    names = (INFERENCE, OPERATIONS, KSERVE, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


def _parse(data: bytes) -> pb.GenerateRequest | _Malformed:
    try:
        return pb.GenerateRequest.FromString(data)
    except DecodeError:
        field = find_invalid_text(data, pb.GenerateRequest.DESCRIPTOR)
        return _Malformed(field, "is no valid UTF-8") if field else _Malformed("request", "cannot be parsed")


def _request_id(context: grpc.aio.ServicerContext) -> str:
    """The client's own, else a new one."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_HEADER:
            return str(value)
    return uuid.uuid4().hex


def _printable(request_id: str) -> str:
    return "".join(character for character in request_id[:128] if " " <= character <= "~")


def _response(item: Delta | Outcome, token_bytes: Callable[[int], bytes]) -> pb.GenerateResponse:
    if isinstance(item, Outcome):
        return pb.GenerateResponse(finished=_finished(item), index=item.index)
    response = pb.GenerateResponse(token_ids=item.token_ids, text=item.text, index=item.index, reasoning=item.reasoning)
    for call in item.tool_calls:
        response.tool_calls.add(id=f"call_{secrets.token_hex(12)}", name=call.name, arguments=call.arguments)
    if item.logprobs:
        response.logprobs.extend(map(partial(_logprobs, token_bytes), item.token_ids, item.logprobs))
    if item.prompt is not None:
        response.prompt.CopyFrom(_prompt(item.prompt, token_bytes))
    return response


def _prompt(prompt: Prompt, token_bytes: Callable[[int], bytes]) -> pb.Prompt:
    told = map(partial(_logprobs, token_bytes), prompt.token_ids[1:], prompt.logprobs)
    return pb.Prompt(token_ids=prompt.token_ids, text=prompt.text, logprobs=told)


def _logprobs(token_bytes: Callable[[int], bytes], token_id: int, entry: TokenLogprobs) -> pb.TokenLogprobs:
    def one(token_id: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token_id, logprob=logprob, text=token_bytes(token_id))

    return pb.TokenLogprobs(token=one(token_id, entry.logprob), top=[one(*pair) for pair in entry.top])


def _finished(outcome: Outcome) -> pb.Finished:
    return pb.Finished(
        finish_reason=outcome.finish_reason.value,
        usage=pb.Usage(
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
            cached_tokens=outcome.cached_tokens,
        ),
        timings=_timings(outcome),
        prefill_worker=outcome.prefill_worker,
        decode_worker=outcome.decode_worker,
        request_id=outcome.request_id,
        attempts=outcome.attempts,
    )


def _timings(outcome: Outcome) -> pb.RequestTimings:
    moments = outcome.timings
    decoded = moments.decode_started > 0
    return pb.RequestTimings(
        queue=moments.prefill_started - moments.received,
        prefill=moments.first_token - moments.prefill_started,
        handoff_exposed=outcome.handoff_exposed_s,
        ttft=moments.first_token - moments.received,
        decode=moments.finished - moments.decode_started if decoded else 0.0,
        total=moments.finished - moments.received,
    )

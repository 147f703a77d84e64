"""The KServe front door: `inference.GRPCInferenceService`, as Triton's clients and benchmark tools speak it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from importlib.metadata import version

import grpc
import grpc.aio

from router.answer import Delta
from router.callers import Caller
from router.fleet import Fleet
from router.job import Outcome
from router.pipeline import Pipeline
from router.state import WorkerTable
from router.statuses import retry_hint, status_of_error
from router.tensors import INPUTS, OUTPUTS, read_infer, write_infer
from router.validation import validate_request_id
from router.writer import write
from tandem.errors import Cancelled, InvalidRequest, RequestError
from tandem.trace_context import TraceContext
from tandem.tracing import read_context
from tandem.v1 import kserve_pb2 as pb
from tandem.v1 import kserve_pb2_grpc as pb_grpc

__all__ = ["KServeService"]

log = logging.getLogger(__name__)

# Requests of one stream that are served at once; the stream is read on when one has ended.
_MOST_AT_ONCE = 64


class KServeService(pb_grpc.GRPCInferenceServiceServicer):
    def __init__(self, pipeline: Pipeline, fleet: Fleet, table: WorkerTable) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._table = table

    async def ServerLive(self, request: pb.ServerLiveRequest, context: grpc.aio.ServicerContext) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, context: grpc.aio.ServicerContext) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._table.can_serve)

    async def ModelReady(self, request: pb.ModelReadyRequest, context: grpc.aio.ServicerContext) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=request.name == self._model and self._table.can_serve)

    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tandem", version=version("tandem"))

    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: grpc.aio.ServicerContext
    ) -> pb.ModelMetadataResponse:
        if request.name != self._model:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"model {request.name!r} is not served here")
        tensor = pb.ModelMetadataResponse.TensorMetadata
        return pb.ModelMetadataResponse(
            name=request.name,
            versions=["1"],
            platform="tandem",
            inputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in INPUTS],
            outputs=[tensor(name=name, datatype=kind, shape=shape) for name, kind, shape in OUTPUTS],
        )

    async def ModelInfer(self, request: pb.ModelInferRequest, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        """The whole answer at once."""
        token_ids: list[int] = []
        text: list[str] = []
        try:
            asked_by = self._caller(context), read_context(context.invocation_metadata() or ())
            async with contextlib.aclosing(self._answer(request, *asked_by, context.time_remaining())) as answer:
                async for item in answer:
                    if isinstance(item, Outcome):
                        return write_infer(request, self._model, token_ids, "".join(text), item.finish_reason.value)
                    token_ids += item.token_ids
                    text.append(item.text)
        except (RequestError, TimeoutError) as error:
            (code, details), hint = status_of_error(error), retry_hint(error)
        except Exception:
            log.exception("request %s ended by a bug", request.id)
            code, details, hint = grpc.StatusCode.INTERNAL, "internal error; the router's log has it", ()
        await context.abort(code, details, hint)
        raise AssertionError("abort does not return")

    async def ModelStreamInfer(  # type: ignore[override]  # it writes by itself, to give up a client that does not read
        self, request_iterator: AsyncIterator[pb.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> None:
        """Any number of requests, served side by side; a message for whatever has come of each since the client read last. The
        last one of each has the finish reason, or the error."""
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None] = asyncio.Queue(maxsize=1)
        asked_by = self._caller(context), read_context(context.invocation_metadata() or ())
        reading = asyncio.create_task(self._serve_all(request_iterator, *asked_by, responses))
        try:
            while (response := await responses.get()) is not None:
                await write(context, response, self._pipeline.client_timeout_s)
            return
        except Cancelled as error:
            code, details = status_of_error(error)
        finally:
            reading.cancel()
            await asyncio.wait([reading])
        await context.abort(code, details)

    async def _serve_all(
        self,
        requests: AsyncIterator[pb.ModelInferRequest],
        caller: Caller,
        trace: TraceContext,
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None],
    ) -> None:
        """Ends with None, whatever happens."""
        places = asyncio.Semaphore(_MOST_AT_ONCE)
        try:
            async with asyncio.TaskGroup() as serving:
                async for request in requests:
                    await places.acquire()
                    task = serving.create_task(self._serve_one(request, caller, trace, responses))
                    task.add_done_callback(lambda _: places.release())
        except Exception:
            log.exception("a stream of requests ended by a bug")
        await responses.put(None)

    async def _serve_one(
        self,
        request: pb.ModelInferRequest,
        caller: Caller,
        trace: TraceContext,
        responses: asyncio.Queue[pb.ModelStreamInferResponse | None],
    ) -> None:
        """One request's error is its own: the stream and the others go on."""
        try:
            async with contextlib.aclosing(self._answer(request, caller, trace, None)) as answer:
                async for item in answer:
                    if isinstance(item, Outcome):
                        part = write_infer(request, self._model, (), "", item.finish_reason.value)
                    else:
                        part = write_infer(request, self._model, item.token_ids, item.text, "")
                    await responses.put(pb.ModelStreamInferResponse(infer_response=part))
            return
        except (RequestError, TimeoutError) as error:
            message = status_of_error(error)[1]
        except Exception:
            log.exception("request %s ended by a bug", request.id)
            message = "internal error; the router's log has it"
        failed = pb.ModelInferResponse(id=request.id, model_name=request.model_name)
        await responses.put(pb.ModelStreamInferResponse(error_message=message, infer_response=failed))

    async def _answer(
        self, request: pb.ModelInferRequest, caller: Caller, trace: TraceContext, deadline_s: float | None
    ) -> AsyncGenerator[Delta | Outcome, None]:
        if request.model_version not in ("", "1"):
            raise InvalidRequest("model_version", f"{request.model_version!r} is not served; there is version 1")
        request_id = validate_request_id(request.id) if request.id else uuid.uuid4().hex
        answers = self._pipeline.generate(read_infer(request), request_id, deadline_s, caller, trace)
        async with contextlib.aclosing(answers) as stream:
            async for item in stream:
                yield item

    def _caller(self, context: grpc.aio.ServicerContext) -> Caller:
        return self._pipeline.callers.identify(context.invocation_metadata() or ())

    @property
    def _model(self) -> str:
        return self._fleet.model.info.name if self._fleet.model else ""

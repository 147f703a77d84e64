"""The Operations service: status from what this router sees; scaling and draining passed on to the controller."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from router.fleet import Fleet
from router.kserve import KServeService
from router.pipeline import Pipeline
from router.state import WorkerTable
from router.status import status_of
from tandem.errors import Unauthenticated
from tandem.v1 import operations_pb2 as pb
from tandem.v1 import operations_pb2_grpc as pb_grpc
from tandem.v1 import worker_pb2_grpc

__all__ = ["OperationsService"]

log = logging.getLogger(__name__)

_ANSWER_S = 10.0
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_TOLD = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


class OperationsService(pb_grpc.OperationsServicer):
    """control: of the controller; None: this router has none. operators: names of the API keys that may change the pools;
    empty: every caller may."""

    def __init__(
        self,
        pipeline: Pipeline,
        fleet: Fleet,
        table: WorkerTable,
        control: worker_pb2_grpc.ControlStub | None = None,
        operators: frozenset[str] = frozenset(),
    ) -> None:
        self._pipeline = pipeline
        self._fleet = fleet
        self._table = table
        self._control = control
        self._operators = operators

    async def GetStatus(self, request: pb.GetStatusRequest, context: grpc.aio.ServicerContext) -> pb.Status:
        return status_of(self._fleet, self._table, self._pipeline.num_by_phase)

    async def Scale(self, request: pb.ScaleRequest, context: grpc.aio.ServicerContext) -> pb.ScaleReply:
        reply: pb.ScaleReply = await self._pass_on(lambda control: control.Scale, request, context)
        return reply

    async def Drain(self, request: pb.DrainRequest, context: grpc.aio.ServicerContext) -> pb.DrainReply:
        reply: pb.DrainReply = await self._pass_on(lambda control: control.Drain, request, context)
        return reply

    async def Replace(self, request: pb.ReplaceRequest, context: grpc.aio.ServicerContext) -> pb.ReplaceReply:
        reply: pb.ReplaceReply = await self._pass_on(lambda control: control.Replace, request, context)
        return reply

    def kserve(self) -> KServeService:
        """The same pipeline, in KServe's protocol."""
        return KServeService(self._pipeline, self._fleet, self._table)

    async def _pass_on(
        self, method: Callable[[Any], Callable[..., Awaitable[Any]]], request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        caller = await self._require_operator(context)
        if self._control is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this router has no controller to pass it on to")
        log.info("%s asks: %s", caller, " ".join(str(request).split()))
        try:
            return await method(self._control)(request, timeout=_ANSWER_S)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        if code in _AWAY:
            code = grpc.StatusCode.UNAVAILABLE
            details = f"the controller does not answer, so nothing was changed as far as is known; try again ({details})"
        elif code not in _TOLD:
            log.error("the controller answers %s: %s", code.name, details)
            code, details = grpc.StatusCode.INTERNAL, "the controller could not do it; its log says why"
        return await context.abort(code, details)

    async def _require_operator(self, context: grpc.aio.ServicerContext) -> str:
        """The caller's name; the call ends here for one that may not."""
        try:
            name = self._pipeline.callers.identify(context.invocation_metadata() or ()).name
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        if self._operators and name not in self._operators:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"the API key {name} may not change the pools")
        return name

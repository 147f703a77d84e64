"""The decode worker's internal gRPC server: pairing, reservations, and one session per router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NoReturn

import grpc
import grpc.aio

from decode_worker.worker import DecodeWorker
from tandem.errors import HandoffError, InvalidRequest, LeaseLost, Leaving, NoRoom, PeerRefused, TandemError
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

__all__ = ["DecodeService"]

_STATUS: tuple[tuple[type[TandemError], grpc.StatusCode], ...] = (
    (InvalidRequest, grpc.StatusCode.INVALID_ARGUMENT),
    (NoRoom, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LeaseLost, grpc.StatusCode.NOT_FOUND),
    (Leaving, grpc.StatusCode.ABORTED),
    (PeerRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (HandoffError, grpc.StatusCode.FAILED_PRECONDITION),
)


class DecodeService(pb_grpc.DecodeWorkerServicer):
    """Turns calls into acts of the worker and its errors into statuses; holds nothing itself."""

    def __init__(self, worker: DecodeWorker) -> None:
        self._worker = worker

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.WorkerDescription:
        return self._worker.description

    async def Pair(self, request: pb.PairRequest, context: grpc.aio.ServicerContext) -> pb.PairReply:
        try:
            return self._worker.pair(request)
        except TandemError as error:
            await _abort(context, error)

    async def Reserve(self, request: pb.ReserveRequest, context: grpc.aio.ServicerContext) -> pb.ReserveReply:
        try:
            return self._worker.reserve(request)
        except TandemError as error:
            await _abort(context, error)

    async def Release(self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext) -> pb.ReleaseReply:
        try:
            self._worker.writer_quiet(request)
        except TandemError as error:
            await _abort(context, error)
        return pb.ReleaseReply()

    async def Session(
        self, request_iterator: AsyncIterator[pb.DecodeCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DecodeEvents]:
        try:
            async for events in self._worker.session(request_iterator):
                yield events
        except TandemError as error:
            await _abort(context, error)


async def _abort(context: grpc.aio.ServicerContext, error: TandemError) -> NoReturn:
    status = next((code for kind, code in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    await context.abort(status, str(error))
    raise AssertionError("abort does not return")

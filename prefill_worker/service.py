"""The prefill worker's internal gRPC server: one session per router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from prefill_worker.worker import PrefillWorker
from tandem.errors import TandemError
from tandem.v1 import worker_pb2 as pb
from tandem.v1 import worker_pb2_grpc as pb_grpc

__all__ = ["PrefillService"]


class PrefillService(pb_grpc.PrefillWorkerServicer):
    """Turns calls into acts of the worker; holds nothing itself."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.WorkerDescription:
        return self._worker.description

    async def Session(
        self, request_iterator: AsyncIterator[pb.PrefillCommand], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.PrefillEvents]:
        try:
            async for events in self._worker.session(request_iterator):
                yield events
        except TandemError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

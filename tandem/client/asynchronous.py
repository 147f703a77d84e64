"""The client for asyncio."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

from tandem.client.calls import DEFAULT_ADDRESS, call_options
from tandem.client.messages import Answer, Options, Part, Prompt, answers_of, error_of, part_of, request_of
from tandem.config import TlsConfig
from tandem.rpc import create_channel
from tandem.trust import Certificates
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

__all__ = ["AsyncClient"]


class AsyncClient:
    """As `Client`; made on the running event loop."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, tls: TlsConfig | None = None, api_key: str = "") -> None:
        self.address = address
        self._api_key = api_key
        self._channel = create_channel(address, certificates=Certificates.load(tls) if tls else None)
        self._stub = pb_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what still runs."""
        await self._channel.close()

    async def models(self) -> list[pb.Model]:
        timeout_s, metadata = call_options({}, self._api_key)
        try:
            reply = await self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.address) from None
        return list(reply.models)

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncGenerator[Part, None]:
        """Parts as they come. Closing the generator, or cancelling its reader, cancels the request.

        Raises:
            TandemError: see `tandem.errors`. TimeoutError: the deadline passed.
        """
        timeout_s, metadata = call_options(options, self._api_key)
        call = self._stub.Generate(request_of(prompt, **options), timeout=timeout_s, metadata=metadata)
        try:
            async for response in call:
                yield part_of(response)
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.address) from None
        finally:
            call.cancel()

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The answer, whole; of several the first. Raises as `stream`."""
        return (await self.generate_all(prompt, **options))[0]

    async def generate_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Answer]:
        """All n answers. Raises as `stream`."""
        async with contextlib.aclosing(self.stream(prompt, **options)) as parts:
            return answers_of([part async for part in parts])

"""The client for code that waits."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self, Unpack

import grpc

from tandem.client.calls import DEFAULT_ADDRESS, call_options
from tandem.client.messages import Answer, Options, Part, Prompt, answers_of, error_of, part_of, request_of
from tandem.config import TlsConfig
from tandem.rpc import create_blocking_channel
from tandem.trust import Certificates
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

__all__ = ["Client"]


class Client:
    """address: host:port of a router. tls: of a router that speaks TLS. api_key: where keys are asked for. Safe to share
    between threads. Raises ConfigError: a certificate cannot be used."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, tls: TlsConfig | None = None, api_key: str = "") -> None:
        self.address = address
        self._api_key = api_key
        self._channel = create_blocking_channel(address, certificates=Certificates.load(tls) if tls else None)
        self._stub = pb_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs."""
        self._channel.close()

    def models(self) -> list[pb.Model]:
        timeout_s, metadata = call_options({}, self._api_key)
        try:
            return list(self._stub.ListModels(pb.ListModelsRequest(), timeout=timeout_s, metadata=metadata).models)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Part]:
        """Parts as they come. Leaving the loop, or closing the iterator, cancels the request.

        Raises:
            TandemError: see `tandem.errors`. TimeoutError: the deadline passed.
        """
        timeout_s, metadata = call_options(options, self._api_key)
        call = self._stub.Generate(request_of(prompt, **options), timeout=timeout_s, metadata=metadata)
        try:
            for response in call:
                yield part_of(response)
        except grpc.RpcError as error:
            raise error_of(error, self.address) from None
        finally:
            call.cancel()

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """The answer, whole; of several the first. Raises as `stream`."""
        return self.generate_all(prompt, **options)[0]

    def generate_all(self, prompt: Prompt, **options: Unpack[Options]) -> list[Answer]:
        """All n answers. Raises as `stream`."""
        return answers_of(self.stream(prompt, **options))

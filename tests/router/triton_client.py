"""Triton's own client, in a process of its own: its messages and ours have the same names. Writes one JSON object.

python triton_client.py HOST:PORT
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException


def text_input(text: str) -> Any:
    tensor = triton.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def token_input(tokens: list[int]) -> Any:
    tensor = triton.InferInput("token_ids", [1, len(tokens)], "INT64")
    tensor.set_data_from_numpy(np.array([tokens], dtype=np.int64))
    return tensor


async def streamed(client: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async def given() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield request

    parts = []
    async for result, error in client.stream_infer(given()):
        if error is not None:
            parts.append({"error": str(error)})
            continue
        response = result.get_response()
        parts.append(
            {
                "id": response.id,
                "text": result.as_numpy("text_output")[0].decode(),
                "tokens": result.as_numpy("token_ids").tolist(),
                "reason": result.as_numpy("finish_reason")[0].decode(),
                "final": response.parameters["triton_final_response"].bool_param,
            }
        )
    return parts


async def main(address: str) -> dict[str, Any]:
    async with triton.InferenceServerClient(address) as client:
        metadata = await client.get_model_metadata("bytes")
        whole = await client.infer(
            "bytes", [text_input("hello")], request_id="r-1", parameters={"max_tokens": 50, "temperature": 0.5, "seed": 7}
        )
        only = await client.infer("bytes", [token_input([104, 105])], outputs=[triton.InferRequestedOutput("text_output")])
        ask = {"model_name": "bytes", "inputs": [text_input("hello")], "parameters": {"max_tokens": 50}}
        streams = await streamed(client, [{**ask, "request_id": f"s-{i}"} for i in range(3)])
        broken = await streamed(client, [{**ask, "parameters": {"temperature": 1000.0}}])
        try:
            await client.infer("bytes", [text_input("x")], parameters={"max_tokens": 0})
            refusal = ""
        except InferenceServerException as error:
            refusal = f"{error.status()}: {error.message()}"
        return {
            "live": await client.is_server_live(),
            "ready": [await client.is_server_ready(), await client.is_model_ready("bytes"), await client.is_model_ready("no")],
            "inputs": [tensor.name for tensor in metadata.inputs],
            "whole": [whole.as_numpy("text_output")[0].decode(), whole.as_numpy("finish_reason")[0].decode()],
            "only": [[output.name for output in only.get_response().outputs], only.as_numpy("text_output")[0].decode()],
            "streams": streams,
            "broken": broken,
            "refusal": refusal,
            "fields": fields(),
        }


def fields() -> dict[str, list[str]]:
    """Number and type of every field of Triton's messages."""
    return {
        message.name: [f"{field.number} {field.name} {field.type}" for field in message.fields]
        for message in service_pb2.DESCRIPTOR.message_types_by_name.values()
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(sys.argv[1]))))

"""KServe's protocol, spoken by Triton's own client."""

import asyncio
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from router.tensors import read_infer
from tandem.errors import InvalidRequest
from tandem.v1 import kserve_pb2 as kserve
from tests.router.test_server import door
from tests.router.tools import Bench, says

CLIENT = Path(__file__).with_name("triton_client.py")


async def tritons(address: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(sys.executable, str(CLIENT), address, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    told: dict[str, Any] = json.loads(out)
    return told


async def test_tritons_client_gets_whole_and_streamed_answers() -> None:
    async with door(Bench(script=says("wörld"))) as it:
        told = await tritons(it.address)
        assert told["live"] is True
        assert told["ready"] == [True, True, False]
        assert told["inputs"] == ["text_input", "token_ids", "sampling_parameters"]
        assert told["whole"] == ["wörld", "stop"]
        assert told["only"] == [["text_output"], "wörld"]
        for name in ("s-0", "s-1", "s-2"):
            parts = [part for part in told["streams"] if part["id"] == name]
            assert "".join(part["text"] for part in parts) == "wörld"
            assert [token for part in parts for token in part["tokens"]] == [*"wörld".encode(), 0]
            assert [part["final"] for part in parts] == [False] * (len(parts) - 1) + [True]
            assert parts[-1]["reason"] == "stop"
        assert "temperature" in told["broken"][0]["error"]
        assert "INVALID_ARGUMENT" in told["refusal"]
        assert "max_new_tokens" in told["refusal"]
        sampling = next(job.request.sampling for job in it.bench.ended if job.request_id == "r-1")
        assert (sampling.temperature, sampling.seed) == (0.5, 7)
        it.bench.assert_nothing_is_left()
        for name, fields in told["fields"].items():
            ours = kserve.DESCRIPTOR.message_types_by_name.get(name)
            for field in ours.fields if ours else ():
                assert f"{field.number} {field.name} {field.type}" in fields


def infer(name: str, datatype: str, raw: bytes | None = None, **contents: Any) -> kserve.ModelInferRequest:
    request = kserve.ModelInferRequest(raw_input_contents=[] if raw is None else [raw])
    tensor = request.inputs.add(name=name, datatype=datatype, shape=[1])
    tensor.contents.CopyFrom(kserve.InferTensorContents(**contents))
    return request


def test_contents_may_be_typed_instead_of_raw() -> None:
    assert read_infer(infer("text_input", "BYTES", bytes_contents=[b"hi"])).text == "hi"
    assert list(read_infer(infer("token_ids", "INT32", int_contents=[1, 2])).token_ids.ids) == [1, 2]


def test_sampling_parameters_are_openais() -> None:
    request = infer("text_input", "BYTES", bytes_contents=[b"hi"])
    request.inputs.add(name="sampling_parameters", datatype="BYTES").contents.bytes_contents.append(
        b'{"top_k": 5, "stop": "x"}'
    )
    message = read_infer(request)
    assert (message.sampling.top_k, list(message.stop), message.max_new_tokens) == (5, ["x"], 16)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (kserve.ModelInferRequest(), "prompt"),
        (infer("colour", "BYTES"), "colour"),
        (infer("text_input", "INT32"), "text_input"),
        (infer("text_input", "BYTES", raw=b""), "text_input"),
        (infer("text_input", "BYTES", raw=struct.pack("<I", 9) + b"x"), "text_input"),
        (infer("text_input", "BYTES", bytes_contents=[b"\xff"]), "text_input"),
        (infer("token_ids", "FP32"), "token_ids"),
        (infer("token_ids", "INT32", raw=b"abc"), "token_ids"),
        (infer("sampling_parameters", "BYTES", bytes_contents=[b"["]), "sampling_parameters"),
        (infer("sampling_parameters", "BYTES", bytes_contents=[b'{"prompt": "x", "n": 2}']), "n"),
        (infer("sampling_parameters", "BYTES", bytes_contents=[b'{"prompt": "x", "nn": 2}']), "nn"),
        (infer("sampling_parameters", "BYTES", bytes_contents=[b'{"prompt": "x", "\\ud800": 2}']), r"\?"),
    ],
)
def test_a_bad_tensor_is_named(request_: kserve.ModelInferRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        read_infer(request_)

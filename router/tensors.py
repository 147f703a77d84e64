"""KServe's tensors to a request of the pipeline, and its answer to tensors. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from router.http.completions import read_completion
from router.json_text import parse_json
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import kserve_pb2 as kserve

__all__ = ["INPUTS", "OUTPUTS", "read_infer", "write_infer"]

# name, datatype, shape.
INPUTS = (("text_input", "BYTES", (1,)), ("token_ids", "INT32", (-1,)), ("sampling_parameters", "BYTES", (1,)))
OUTPUTS = (("text_output", "BYTES", (1,)), ("token_ids", "INT32", (-1,)), ("finish_reason", "BYTES", (1,)))
# Of Triton's own tools; they say nothing of what is to be generated.
_IGNORED_INPUTS = ("stream", "exclude_input_in_output", "return_finish_reason", "return_num_output_tokens")
_IGNORED_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout")
_INTEGERS = {"INT32": "<i", "INT64": "<q", "UINT32": "<I"}


def read_infer(request: kserve.ModelInferRequest) -> pb.GenerateRequest:
    """One prompt, as text or tokens. Parameters have the names, ranges and defaults of OpenAI's completions; they stand in
    the request's own parameters, or as JSON in `sampling_parameters`.

    Raises:
        InvalidRequest: names the input or parameter.
    """
    body: dict[str, Any] = {"model": request.model_name}
    raw = iter(request.raw_input_contents)
    for tensor in request.inputs:
        data = next(raw, b"") if request.raw_input_contents else None
        if tensor.name in _IGNORED_INPUTS:
            continue
        if tensor.name == "text_input":
            body["prompt"] = _one_text(tensor, data)
        elif tensor.name == "token_ids":
            body["prompt"] = _integers(tensor, data)
        elif tensor.name == "sampling_parameters":
            body |= _json(_one_text(tensor, data))
        else:
            raise InvalidRequest(tensor.name, "is no input that is known here; see the model's metadata")
    body |= {key: value for key, value in _parameters(request.parameters) if key not in _IGNORED_PARAMETERS}
    asked = read_completion(body)
    if len(asked.messages) != 1 or asked.num_answers != 1:
        raise InvalidRequest("n", "one prompt has one answer here; send several requests")
    return asked.messages[0]


def write_infer(
    request: kserve.ModelInferRequest, model: str, token_ids: Sequence[int], text: str, finish_reason: str
) -> kserve.ModelInferResponse:
    """finish_reason: empty while the answer goes on. Only the outputs that were asked for, or all."""
    response = kserve.ModelInferResponse(model_name=model, model_version="1", id=request.id)
    raw = {
        "text_output": _bytes_tensor(text.encode()),
        "token_ids": struct.pack(f"<{len(token_ids)}i", *token_ids),
        "finish_reason": _bytes_tensor(finish_reason.encode()),
    }
    wanted = {output.name for output in request.outputs} or set(raw)
    for name, datatype, shape in OUTPUTS:
        if name in wanted:
            size = [len(token_ids)] if name == "token_ids" else list(shape)
            response.outputs.add(name=name, datatype=datatype, shape=size)
            response.raw_output_contents.append(raw[name])
    response.parameters["triton_final_response"].bool_param = bool(finish_reason)
    return response


def _one_text(tensor: kserve.ModelInferRequest.InferInputTensor, raw: bytes | None) -> str:
    if tensor.datatype != "BYTES":
        raise InvalidRequest(tensor.name, f"must be BYTES, not {tensor.datatype!r}")
    if raw is None:
        values = list(tensor.contents.bytes_contents)
    elif len(raw) >= 4 and len(raw) == 4 + struct.unpack_from("<I", raw)[0]:
        values = [raw[4:]]
    else:
        values = []
    if len(values) != 1:
        raise InvalidRequest(tensor.name, "must hold one text, of shape [1] or [1, 1]")
    try:
        return values[0].decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(tensor.name, "is no valid UTF-8") from error


def _integers(tensor: kserve.ModelInferRequest.InferInputTensor, raw: bytes | None) -> list[int]:
    if tensor.datatype not in _INTEGERS:
        raise InvalidRequest(tensor.name, f"must be one of {', '.join(_INTEGERS)}, not {tensor.datatype!r}")
    if raw is None:
        contents = tensor.contents
        return [*contents.int_contents, *contents.int64_contents, *contents.uint_contents]
    if len(raw) % struct.calcsize(_INTEGERS[tensor.datatype]):
        raise InvalidRequest(tensor.name, "has a broken length")
    return [value for (value,) in struct.iter_unpack(_INTEGERS[tensor.datatype], raw)]


def _parameters(parameters: Mapping[str, kserve.InferParameter]) -> Iterable[tuple[str, Any]]:
    for key, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is not None:
            yield key, getattr(parameter, kind)


def _json(text: str) -> dict[str, Any]:
    data = parse_json(text, "sampling_parameters")
    if not isinstance(data, dict):
        raise InvalidRequest("sampling_parameters", "must be a JSON object")
    return data


def _bytes_tensor(value: bytes) -> bytes:
    return struct.pack("<I", len(value)) + value

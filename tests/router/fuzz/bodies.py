"""Bodies that a client might send by mistake or by intent: good ones, changed at random. The same seed gives the same ones."""

from __future__ import annotations

import json
import random
import string
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from tandem.v1 import inference_pb2 as pb
from tandem.v1 import kserve_pb2 as kserve

__all__ = ["GOOD_CHAT", "GOOD_COMPLETION", "json_body", "proto_body", "some_bytes", "some_text"]

_COMMON: dict[str, Any] = {
    "model": "bytes",
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "min_tokens": 1,
    "n": 2,
    "stop": ["a", "b"],
    "seed": 5,
    "presence_penalty": 0.5,
    "logit_bias": {"5": 1},
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "service_tier": "flex",
    "structured_outputs": {"choice": ["a", "bc"]},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
}
GOOD_COMPLETION: dict[str, Any] = {**_COMMON, "prompt": ["hello", "you"], "logprobs": 2, "echo": True, "best_of": 2}
GOOD_CHAT: dict[str, Any] = {
    **_COMMON,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ],
    "logprobs": True,
    "top_logprobs": 2,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "chat_template_kwargs": {"thinking": True},
}
_GOOD_PROTOS: dict[str, list[Message]] = {
    "GenerateRequest": [
        pb.GenerateRequest(text="hello", max_new_tokens=5, n=2, logprobs=2, echo=True, stop=["a"]),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]), sampling=pb.Sampling(temperature=1, seed=7, top_k=3)),
        pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="x")], tools="[]")),
        pb.GenerateRequest(text="x", json_schema='{"type": "object"}', max_new_tokens=9),
    ],
    "ModelInferRequest": [
        kserve.ModelInferRequest(
            model_name="bytes",
            id="r",
            inputs=[kserve.ModelInferRequest.InferInputTensor(name="text_input", datatype="BYTES", shape=[1])],
            raw_input_contents=[b"\x05\x00\x00\x00hello"],
        ),
        kserve.ModelInferRequest(
            inputs=[
                kserve.ModelInferRequest.InferInputTensor(
                    name="token_ids",
                    datatype="INT32",
                    shape=[2],
                    contents=kserve.InferTensorContents(int_contents=[1, 2]),
                )
            ]
        ),
    ],
}
_WHOLE = (0, 1, -1, 2, 16, 20, 21, 127, 255, 511, 512, 2**31 - 1, -(2**31), 2**31, 2**63, 10**30)
_REAL = (0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, -2.0, 100.0, float("nan"), float("inf"), float("-inf"))
_NULLS = ("", "\x00", "{", "{}", "[]", "null", "(", "^(a|b)*$", '{"\\ud83d": "\\udc67"}')
_HALVES = ("\ud83d", "\udc67", "a\udc67\ud83d")  # of surrogate pairs: JSON can escape them alone, UTF-8 cannot hold them
_WORDS = ("bytes", "user", "never", "<think>", "é", "👩\u200d👧", "\ufffd", "x" * 700)


def some_bytes(rng: random.Random, most: int = 200) -> bytes:
    return rng.randbytes(rng.randrange(most))


def some_text(rng: random.Random) -> str:
    if rng.random() < 0.6:
        return rng.choice(_NULLS + _WORDS)
    return "".join(rng.choice(string.printable + "éß日👍") for _ in range(rng.randrange(12)))


def _json_text(rng: random.Random) -> str:
    return rng.choice(_HALVES) if rng.random() < 0.1 else some_text(rng)


def json_body(rng: random.Random, good: dict[str, Any]) -> bytes:
    """JSON of a body with parts left out, replaced or added; sometimes broken as text too."""
    body = {key: value for key, value in good.items() if key in ("prompt", "messages") or rng.random() < 0.5}
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        body = _changed(rng, body, good)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    return _damaged(rng, data) if rng.random() < 0.2 else data


def _changed(rng: random.Random, value: Any, donor: Any) -> Any:
    """Somewhere in it, something else."""
    if rng.random() < 0.3 or not value or not isinstance(value, dict | list):
        return _value(rng, donor)
    if isinstance(value, list):
        place = rng.randrange(len(value))
        return [_changed(rng, item, donor) if i == place else item for i, item in enumerate(value)]
    key = rng.choice([*value, *(donor if isinstance(donor, dict) else ()), _json_text(rng)])
    inner = donor.get(key) if isinstance(donor, dict) else donor
    return {**value, key: _changed(rng, value.get(key, inner), inner)}


def _value(rng: random.Random, donor: Any, depth: int = 0) -> Any:
    kind = rng.randrange(9 if depth < 3 else 6)
    if kind >= 7:
        return [_value(rng, donor, depth + 1) for _ in range(rng.choice((0, 1, 3, 17)))]
    if kind == 6:
        return {_json_text(rng): _value(rng, donor, depth + 1) for _ in range(rng.randrange(4))}
    return (None, rng.random() < 0.5, rng.choice(_WHOLE), rng.choice(_REAL), _json_text(rng), donor)[kind]


def proto_body(rng: random.Random, kind: Descriptor) -> bytes:
    """Bytes of a message of this kind: a good one, one of random fields, or noise; sometimes damaged on the wire."""
    good = _GOOD_PROTOS.get(kind.name)
    way = rng.random()
    if way < 0.1:
        return some_bytes(rng)
    data = rng.choice(good).SerializeToString() if good and way < 0.5 else b""
    if way > 0.3:
        data += _fields(rng, kind)  # a field that comes twice: the last counts
    return _damaged(rng, data) if rng.random() < 0.3 else data


def _fields(rng: random.Random, kind: Descriptor, depth: int = 0) -> bytes:
    if not kind.fields or depth > 4:
        return b""
    chosen = [rng.choice(kind.fields) for _ in range(rng.randrange(5))]
    return b"".join(_field(rng, field, depth) for field in chosen)


def _field(rng: random.Random, field: FieldDescriptor, depth: int) -> bytes:
    """Mostly of the field's own type on the wire, https://protobuf.dev/programming-guides/encoding."""
    types = FieldDescriptor
    if rng.random() < 0.05:
        return _varint(field.number << 3 | rng.randrange(8)) + some_bytes(rng, 20)
    if field.type == types.TYPE_MESSAGE:
        return _delimited(field.number, _fields(rng, field.message_type, depth + 1))
    if field.type in (types.TYPE_STRING, types.TYPE_BYTES):
        text = some_text(rng).encode()
        return _delimited(field.number, text if rng.random() < 0.9 else some_bytes(rng, 20))
    if field.type == types.TYPE_DOUBLE:
        return _varint(field.number << 3 | 1) + rng.randbytes(8)
    if field.type == types.TYPE_FLOAT:
        return _varint(field.number << 3 | 5) + rng.randbytes(4)
    return _varint(field.number << 3) + _varint(rng.choice(_WHOLE) % 2**64)


def _delimited(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _damaged(rng: random.Random, data: bytes) -> bytes:
    place = rng.randrange(len(data) + 1)
    match rng.randrange(5):
        case 0:
            return data[:place]
        case 1:
            return data[:place] + some_bytes(rng, 9) + data[place:]
        case 2:
            return data[:place] + data[place + rng.randrange(9) :]
        case 3:
            return data + data[place:]
    changed = bytearray(data)
    for _ in range(min(len(data), rng.randrange(1, 4))):
        changed[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(changed)

"""Whatever body comes, the answer is never an internal error, and nothing stays behind."""

import contextlib
import json
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.http.chat import read_chat
from router.http.completions import read_completion
from router.http.errors import refusal_of
from router.http.fields import parse_object
from router.validation import validate
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb
from tests.router.tools import SERVED

GOOD: dict[str, Any] = {
    "model": "bytes",
    "prompt": "hello",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "tool_calls": []}],
    "max_tokens": 5,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "n": 2,
    "stop": ["a", "b"],
    "seed": 5,
    "logprobs": 2,
    "top_logprobs": 2,
    "echo": True,
    "logit_bias": {"5": 1},
    "stream": False,
    "stream_options": {"include_usage": True},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
    "structured_outputs": {"choice": ["a"]},
    "chat_template_kwargs": {"thinking": True},
}
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=3).map(str)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
mutations = st.dictionaries(st.sampled_from(list(GOOD)), values | st.sampled_from(list(GOOD.values())), max_size=4)
MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def judge(read: Any, body: bytes) -> None:
    try:
        for message in read(parse_object(body)).messages:
            wire = pb.GenerateRequest.FromString(message.SerializeToString())
            validate(wire, "r", SERVED, 16, draw_seed=lambda: 1)
    except InvalidRequest as error:
        refusal = refusal_of(error)
        assert refusal.status in (400, 404)
        assert refusal.param


@MANY
@given(mutations, st.sets(st.sampled_from(list(GOOD))))
@pytest.mark.parametrize("read", [read_chat, read_completion])
def test_mutated_bodies_are_served_or_refused_by_parameter(read: Any, changed: dict[str, Any], kept: set[str]) -> None:
    body = {key: value for key, value in GOOD.items() if key in kept} | changed
    judge(read, json.dumps(body).encode())


@MANY
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(body: bytes) -> None:
    judge(read_completion, body)


@MANY
@given(st.binary(max_size=120))
def test_any_proto_is_served_or_refused_by_field(data: bytes) -> None:
    """What is no proto at all the server refuses; see test_server.py."""
    with contextlib.suppress(DecodeError, InvalidRequest):
        validate(pb.GenerateRequest.FromString(data), "r", SERVED, 16, draw_seed=lambda: 1)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.wire_text import find_invalid_text
from tandem.v1 import inference_pb2 as pb

BAD = b"\xff\xfe"
GOOD = pb.GenerateRequest(
    text="a prompt", model="m", stop=["one", "two"], max_new_tokens=300, sampling=pb.Sampling(temperature=0.5, seed=2**60)
)
CHAT = pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hello!")]))


def find(data: bytes) -> str | None:
    return find_invalid_text(data, pb.GenerateRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    ("message", "text", "path"),
    [
        (GOOD, b"a prompt", "text"),
        (GOOD, b"two", "stop"),
        (CHAT, b"hello!", "chat.messages.content"),
        (CHAT, b"user", "chat.messages.role"),
    ],
)
def test_the_field_of_invalid_text_is_named(message: pb.GenerateRequest, text: bytes, path: str) -> None:
    data = message.SerializeToString()
    assert find(data) is None
    spoiled = data.replace(text, b"\xff" * len(text))
    assert spoiled != data
    assert find(spoiled) == path


@given(st.binary(max_size=200))
def test_any_bytes_end_the_search(data: bytes) -> None:
    find(data)

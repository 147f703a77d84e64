"""What is taken for JSON, and how what is not is told."""

import pytest

from router.json_text import parse_json
from tandem.errors import InvalidRequest


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": "ü"}'.encode("utf-16"), "is no valid UTF-8 at byte 0"),
        (b"\xff\xfe{", "is no valid UTF-8 at byte 0"),
        (b'{"a": "\xfc"}', "is no valid UTF-8 at byte 7"),
        (b'\xef\xbb\xbf{"a": "\xfc"}', "is no valid UTF-8 at byte 10"),
        (b"{", "is no valid JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b"9" * 5_000, "holds a number that is too long"),
    ],
    ids=range(7),
)
def test_what_is_no_json_is_told_with_its_place(text: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"body: {reason}"):
        parse_json(text, "body")


@pytest.mark.parametrize("text", [b'{"a": "\xc3\xbc"}', b'\xef\xbb\xbf{"a": "\xc3\xbc"}', '{"a": "ü"}'], ids=range(3))
def test_utf8_is_read_with_and_without_a_mark(text: str | bytes) -> None:
    assert parse_json(text, "body") == {"a": "ü"}

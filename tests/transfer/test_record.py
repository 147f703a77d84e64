"""Every field of the record is checked by name, and every byte on the wire by its checksum."""

from __future__ import annotations

import contextlib
import math
import random
import struct
from dataclasses import fields, replace
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import HandoffRefused
from transfer.record import Expectation, HandoffRecord, WriteNotice, decode_message, verify

RECORD = HandoffRecord(
    lease_id="lease-1",
    epoch=7,
    nonce=bytes(range(16)),
    request_id="r-ä",
    attempt=2,
    writer_id="p-1",
    fingerprint="model",
    layout_digest="abc",
    num_positions=10,
    kv_bytes=3 << 33,
    state_bytes=4096,
    state_checksum=0xFEDCBA9876543210,
    first_token=42,
    compute_done_s=12.5,
    clock_id="boot",
)
EXPECTED = Expectation(
    lease_id=RECORD.lease_id,
    epoch=RECORD.epoch,
    nonce=RECORD.nonce,
    request_id=RECORD.request_id,
    attempt=RECORD.attempt,
    writer_id=RECORD.writer_id,
    fingerprint=RECORD.fingerprint,
    layout_digest=RECORD.layout_digest,
    num_positions=RECORD.num_positions,
    kv_bytes=RECORD.kv_bytes,
    state_bytes=RECORD.state_bytes,
    vocab_size=43,
    state_checksum=lambda: RECORD.state_checksum,
)
MUTATIONS: dict[str, list[Any]] = {
    "lease_id": ["lease-2", ""],
    "epoch": [6, 8],
    "nonce": [bytes(16)],
    "request_id": ["r", ""],
    "attempt": [1, 3],
    "writer_id": ["p-2"],
    "fingerprint": ["other", ""],
    "layout_digest": ["abd"],
    "num_positions": [9, 11, 0],
    "kv_bytes": [0, (3 << 33) - 1, (3 << 33) % (1 << 32)],
    "state_bytes": [4095],
    "state_checksum": [0, 0xFEDCBA9876543211],
    "first_token": [43, 2**32 - 1],
    "compute_done_s": [math.nan, math.inf, -1.0],
    "clock_id": [""],
}


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def test_a_true_record_survives_the_wire_and_holds() -> None:
    decoded = HandoffRecord.decode(RECORD.encode())
    assert decoded == RECORD
    verify(decoded, EXPECTED)


def test_the_mutations_below_reach_every_field() -> None:
    assert set(MUTATIONS) == {field.name for field in fields(HandoffRecord)}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in MUTATIONS.items() for v in values])
def test_each_wrong_field_is_refused_by_its_name(field: str, value: Any) -> None:
    wrong = HandoffRecord.decode(replace(RECORD, **{field: value}).encode())
    with pytest.raises(HandoffRefused) as caught:
        verify(wrong, EXPECTED)
    assert caught.value.field == field


def test_the_state_is_not_read_for_a_record_that_fails_before() -> None:
    def read() -> int:
        raise AssertionError("the slot was read")

    with pytest.raises(HandoffRefused, match="epoch"):
        verify(replace(RECORD, epoch=1), replace(EXPECTED, state_checksum=read))


def test_any_single_changed_byte_is_seen() -> None:
    data = RECORD.encode()
    for position in range(len(data)):
        for bit in (0, 7):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(HandoffRefused) as caught:
                decode_message(bytes(changed))
            assert caught.value.field == "record"


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_no_bytes_from_a_socket_raise_anything_else(data: bytes) -> None:
    for message in (data, sealed(b"TDMF\x01\x00\x01" + data), sealed(b"TDMF\x01\x00\x02" + data)):
        with contextlib.suppress(HandoffRefused):
            decode_message(message)


def test_every_truncation_and_every_tail_is_refused_even_with_a_true_checksum() -> None:
    body = RECORD.encode()[:-8]
    for cut in range(len(body)):
        with pytest.raises(HandoffRefused):
            decode_message(sealed(body[:cut]))
    with pytest.raises(HandoffRefused, match="3 bytes too many"):
        decode_message(sealed(body + b"abc"))


def test_bad_text_type_version_and_flag_are_refused() -> None:
    body = RECORD.encode()[:-8]
    notice = WriteNotice("l", 1, bytes(16), True).encode()[:-8]
    for wrong, reason in [
        (body[:9] + b"\xff" + body[10:], "UTF-8"),
        (body[:7] + b"\xff\xff" + body[9:], "a text of 65535"),
        (body[:4] + b"\x02" + body[5:], "version 2"),
        (body[:6] + b"\x09" + body[7:], "unknown type 9"),
        (b"TDMX" + body[4:], "not a tandem message"),
        (notice[:-1] + b"\x02", "closing"),
    ]:
        with pytest.raises(HandoffRefused, match=reason):
            decode_message(sealed(wrong))


def test_a_notice_is_no_record() -> None:
    notice = WriteNotice("lease-1", 7, bytes(16), closing=True)
    assert decode_message(notice.encode()) == notice
    with pytest.raises(HandoffRefused, match="another kind"):
        HandoffRecord.decode(notice.encode())


def test_what_cannot_be_written_is_the_writers_mistake() -> None:
    with pytest.raises(ValueError, match="nonce"):
        replace(RECORD, nonce=b"short").encode()
    with pytest.raises(ValueError, match="bytes of text"):
        replace(RECORD, request_id="x" * 2000).encode()


def test_random_valid_records_round_trip() -> None:
    chance = random.Random(5)
    for _ in range(200):
        record = replace(
            RECORD,
            lease_id="".join(chance.choices("ab→é", k=chance.randrange(20))),
            epoch=chance.getrandbits(64),
            nonce=chance.randbytes(16),
            kv_bytes=chance.getrandbits(64),
            compute_done_s=chance.random() * 1e9,
        )
        assert HandoffRecord.decode(record.encode()) == record

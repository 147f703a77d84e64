"""What travels beside the bytes: the hand-off record, and the small notices before it. Both are NIXL notifications.

The record is the last thing that a writer sends for a lease, after all its writes are done. Until a record was verified
field by field, nothing of the memory it speaks of may be believed. Wire format, little-endian::

    frame    "TDMF" | version u16 | type u8 | body | xxh3_64 of everything before, u64
    record   lease_id s | epoch u64 | nonce 16 bytes | request_id s | attempt u32 | writer_id s | fingerprint s
             | layout_digest s | num_positions u64 | kv_bytes u64 | state_bytes u64 | state_checksum u64
             | first_token u32 | compute_done_s f64 | clock_id s
    notice   lease_id s | epoch u64 | nonce 16 bytes | closing u8
    s        length u16 | UTF-8
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import xxhash

from tandem.errors import HandoffRefused

__all__ = [
    "NONCE_BYTES",
    "Expectation",
    "HandoffRecord",
    "WriteNotice",
    "clock_id",
    "decode_message",
    "verify",
]

NONCE_BYTES = 16
_VERSION = 1
_PREFIX = struct.Struct("<4sHB")
_MAGIC = b"TDMF"
_RECORD, _NOTICE = 1, 2
_CHECKSUM = struct.Struct("<Q")
_MAX_TEXT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class HandoffRecord:
    """What a writer says about the memory it has filled.

    lease_id, epoch, nonce: as granted. request_id, attempt: whose sequence. writer_id: the prefill worker.
    fingerprint, layout_digest: of the writer's model and caches. num_positions: N, positions that KV and state stand for.
    kv_bytes, state_bytes: written in all. state_checksum: see `transfer.checksum`. first_token: sampled by the writer, token N.
    compute_done_s: when the writer's last computation ended, on the monotonic clock that `clock_id` names.
    """

    lease_id: str
    epoch: int
    nonce: bytes
    request_id: str
    attempt: int
    writer_id: str
    fingerprint: str
    layout_digest: str
    num_positions: int
    kv_bytes: int
    state_bytes: int
    state_checksum: int
    first_token: int
    compute_done_s: float
    clock_id: str

    def encode(self) -> bytes:
        body = b"".join(
            (
                _text(self.lease_id),
                struct.pack("<Q", self.epoch),
                _nonce(self.nonce),
                _text(self.request_id),
                struct.pack("<I", self.attempt),
                _text(self.writer_id),
                _text(self.fingerprint),
                _text(self.layout_digest),
                struct.pack("<QQQQ", self.num_positions, self.kv_bytes, self.state_bytes, self.state_checksum),
                struct.pack("<Id", self.first_token, self.compute_done_s),
                _text(self.clock_id),
            )
        )
        return _frame(_RECORD, body)

    @classmethod
    def decode(cls, data: bytes) -> HandoffRecord:
        """Raises HandoffRefused("record", …) for anything that `encode` cannot have written."""
        message = decode_message(data)
        if not isinstance(message, cls):
            raise HandoffRefused("record", "another kind of message")
        return message


@dataclass(frozen=True, slots=True)
class WriteNotice:
    """A writer's sign of life: its writes for this lease have begun. closing: the record will follow within milliseconds."""

    lease_id: str
    epoch: int
    nonce: bytes
    closing: bool

    def encode(self) -> bytes:
        body = _text(self.lease_id) + struct.pack("<Q", self.epoch) + _nonce(self.nonce) + bytes([self.closing])
        return _frame(_NOTICE, body)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the owner of a lease holds against a record. `state_checksum` is asked last, since it reads the whole slot."""

    lease_id: str
    epoch: int
    nonce: bytes
    request_id: str
    attempt: int
    writer_id: str
    fingerprint: str
    layout_digest: str
    num_positions: int
    kv_bytes: int
    state_bytes: int
    vocab_size: int
    state_checksum: Callable[[], int]


def decode_message(data: bytes) -> HandoffRecord | WriteNotice:
    """Parse one notification. Every byte comes from a socket and is checked.

    Raises:
        HandoffRefused: field "record": wrong magic, version, type, length, text, checksum, or bytes left over.
    """
    if len(data) < _PREFIX.size + _CHECKSUM.size:
        raise HandoffRefused("record", f"{len(data)} bytes are too few")
    magic, version, kind = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise HandoffRefused("record", "not a tandem message")
    if version != _VERSION:
        raise HandoffRefused("record", f"version {version}, this worker speaks {_VERSION}")
    (checksum,) = _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)
    if checksum != xxhash.xxh3_64_intdigest(data[: -_CHECKSUM.size]):
        raise HandoffRefused("record", "its own checksum does not match: it was changed on the way")
    reader = _Reader(data, _PREFIX.size, len(data) - _CHECKSUM.size)
    if kind == _RECORD:
        message: HandoffRecord | WriteNotice = _read_record(reader)
    elif kind == _NOTICE:
        message = _read_notice(reader)
    else:
        raise HandoffRefused("record", f"unknown type {kind}")
    reader.end()
    return message


def verify(record: HandoffRecord, expected: Expectation) -> None:
    """Compare every field; return only if all of them hold.

    Raises:
        HandoffRefused: names the first field that does not hold.
    """
    for field in (
        *("lease_id", "epoch", "nonce", "writer_id", "request_id", "attempt", "fingerprint", "layout_digest"),
        *("num_positions", "kv_bytes", "state_bytes"),
    ):
        said, wanted = getattr(record, field), getattr(expected, field)
        if said != wanted:
            raise HandoffRefused(field, "does not match" if field == "nonce" else f"{said!r} said, {wanted!r} expected")
    if not 0 <= record.first_token < expected.vocab_size:
        raise HandoffRefused("first_token", f"{record.first_token} is outside a vocabulary of {expected.vocab_size}")
    if not (math.isfinite(record.compute_done_s) and record.compute_done_s >= 0):
        raise HandoffRefused("compute_done_s", f"{record.compute_done_s} is no time")
    if not record.clock_id:
        raise HandoffRefused("clock_id", "empty: the time cannot be placed")
    found = expected.state_checksum()
    if record.state_checksum != found:
        raise HandoffRefused("state_checksum", f"{record.state_checksum:016x} said, {found:016x} in the slot")


@cache
def clock_id() -> str:
    """Names this machine's monotonic clock: times may be compared only between processes of equal id."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _frame(kind: int, body: bytes) -> bytes:
    data = _PREFIX.pack(_MAGIC, _VERSION, kind) + body
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def _text(value: str) -> bytes:
    data = value.encode("utf-8")
    if len(data) > _MAX_TEXT_BYTES:
        raise ValueError(f"{len(data)} bytes of text; {_MAX_TEXT_BYTES} are allowed")
    return struct.pack("<H", len(data)) + data


def _nonce(value: bytes) -> bytes:
    if len(value) != NONCE_BYTES:
        raise ValueError(f"a nonce has {NONCE_BYTES} bytes, not {len(value)}")
    return value


class _Reader:
    """Takes typed values off a message; whatever is missing, left over or malformed is a refusal."""

    def __init__(self, data: bytes, start: int, stop: int) -> None:
        self._data = data
        self._at = start
        self._stop = stop

    def raw(self, count: int) -> bytes:
        if self._at + count > self._stop:
            raise HandoffRefused("record", "it ends in the middle of a field")
        self._at += count
        return self._data[self._at - count : self._at]

    def u8(self) -> int:
        return self.raw(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self.raw(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.raw(8), "little")

    def f64(self) -> float:
        value: float = struct.unpack("<d", self.raw(8))[0]
        return value

    def text(self) -> str:
        length = int.from_bytes(self.raw(2), "little")
        if length > _MAX_TEXT_BYTES:
            raise HandoffRefused("record", f"a text of {length} bytes")
        try:
            return self.raw(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise HandoffRefused("record", "a text is not UTF-8") from error

    def end(self) -> None:
        if self._at != self._stop:
            raise HandoffRefused("record", f"{self._stop - self._at} bytes too many")


def _read_record(reader: _Reader) -> HandoffRecord:
    # Python evaluates the arguments in order, which is the order on the wire.
    return HandoffRecord(
        lease_id=reader.text(),
        epoch=reader.u64(),
        nonce=reader.raw(NONCE_BYTES),
        request_id=reader.text(),
        attempt=reader.u32(),
        writer_id=reader.text(),
        fingerprint=reader.text(),
        layout_digest=reader.text(),
        num_positions=reader.u64(),
        kv_bytes=reader.u64(),
        state_bytes=reader.u64(),
        state_checksum=reader.u64(),
        first_token=reader.u32(),
        compute_done_s=reader.f64(),
        clock_id=reader.text(),
    )


def _read_notice(reader: _Reader) -> WriteNotice:
    lease_id, epoch, nonce, closing = reader.text(), reader.u64(), reader.raw(NONCE_BYTES), reader.u8()
    if closing > 1:
        raise HandoffRefused("record", f"closing = {closing}")
    return WriteNotice(lease_id, epoch, nonce, bool(closing))

"""Which text of a protobuf message is no UTF-8. The parser refuses such a message without a name; clients deserve one."""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, FieldDescriptor

__all__ = ["find_invalid_text"]

_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}


def find_invalid_text(data: bytes, message: Descriptor) -> str | None:
    """The path of the first string field of `message` whose bytes are no UTF-8, such as `chat.messages.content`; None: there is
    none, or the bytes are no message at all.

    Format: https://protobuf.dev/programming-guides/encoding
    """
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH_DELIMITED:
            length, place = _varint(data, place)
            field = message.fields_by_number.get(number)
            if field is not None and (found := _within(data[place : place + length], field)) is not None:
                return found
            place += length
        elif kind == 0:
            _, place = _varint(data, place)
        elif kind in _FIXED_BYTES:
            place += _FIXED_BYTES[kind]
        else:
            return None
    return None


def _within(value: bytes, field: FieldDescriptor) -> str | None:
    if field.type == FieldDescriptor.TYPE_STRING:
        try:
            value.decode()
        except UnicodeDecodeError:
            return str(field.name)
    elif field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
        inner = find_invalid_text(value, field.message_type)
        if inner is not None:
            return f"{field.name}.{inner}"
    return None


def _varint(data: bytes, place: int) -> tuple[int, int]:
    """Its value and where the next field begins; past the end of `data`, whatever stands there ends the search."""
    value = shift = 0
    while place < len(data):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            break
        shift += 7
    return value, place

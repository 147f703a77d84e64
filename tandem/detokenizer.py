"""Token ids to text while they come: whole characters only, at a cost per token that does not grow with the answer.

Nearly all tokenizers are bytes underneath. Where the decoder is byte-level (GPT-2's and Qwen's) or falls back to bytes
(Llama's), each id stands for fixed bytes, and UTF-8 tells when a character is whole. Other decoders look at neighbours;
for those a short window of ids is decoded again, cut where the text is whole.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

__all__ = ["BytePieces", "IncrementalDetokenizer", "PieceDecoder", "PieceStream", "WindowPieces", "piece_decoder"]

REPLACEMENT = "\ufffd"
# A character is at most four bytes, so at most four tokens; a longer tail of replacement characters is no character at all.
_WINDOW_TAIL_TOKENS = 8


class PieceDecoder(Protocol):
    """What a tokenizer's ids mean, shared by all its answers."""

    def stream(self) -> PieceStream: ...


class PieceStream(Protocol):
    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class IncrementalDetokenizer:
    """Of one answer. All that `push` returned, and then `flush`, is the decoded whole.

    Exact for any ids of a byte-level tokenizer. Of a byte-fallback tokenizer, bytes that are no UTF-8 become one U+FFFD per
    malformed part, while a full decode spoils every byte next to them too; what a tokenizer encoded is always exact.
    """

    def __init__(self, decoder: PieceDecoder) -> None:
        self._stream = decoder.stream()

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that is final after these tokens; an unfinished character waits for its rest."""
        push = self._stream.push
        return "".join([push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What waits at the end of the answer: an unfinished character becomes U+FFFD. Nothing may be pushed after."""
        return self._stream.flush()


@dataclass(frozen=True, slots=True)
class BytePieces:
    """pieces: bytes of each id; unknown and special ids have none. strip: characters `" "` taken from the very beginning."""

    pieces: Sequence[bytes]
    strip: int = 0

    def stream(self) -> PieceStream:
        return _ByteStream(self.pieces, self.strip)


class _ByteStream:
    def __init__(self, pieces: Sequence[bytes], strip: int) -> None:
        self._pieces = pieces
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < len(self._pieces):
            return ""
        return self._without_prefix(self._utf8.decode(self._pieces[token_id]))

    def flush(self) -> str:
        return self._without_prefix(self._utf8.decode(b"", final=True))

    def _without_prefix(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


@dataclass(frozen=True, slots=True)
class WindowPieces:
    """For decoders whose text of a token depends on its neighbours."""

    backend: Backend

    def stream(self) -> PieceStream:
        return _WindowStream(self.backend)


class _WindowStream:
    """`ids[:emitted]` has been delivered and stays as context; the rest is decoded again until it ends in a whole character."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text, before = self._decode(self._ids), self._decode(self._ids[: self._emitted])
        if (text.endswith(REPLACEMENT) or len(text) <= len(before)) and len(self._ids) - self._emitted < _WINDOW_TAIL_TOKENS:
            return ""
        self._ids, self._emitted = self._ids[self._emitted :], len(self._ids) - self._emitted
        return text[len(before) :]

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._emitted])) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=True))


def piece_decoder(backend: Backend) -> PieceDecoder:
    """The cheapest exact way to decode this tokenizer's ids one by one."""
    decoder = json.loads(backend.to_str())["decoder"] or {}
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    kinds = [step.get("type") for step in steps]
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    vocabulary = {
        token_id: text for text, token_id in backend.get_vocab(with_added_tokens=True).items() if token_id not in special
    }
    if kinds == ["ByteLevel"]:
        return BytePieces(_table({token_id: _byte_level(text) for token_id, text in vocabulary.items()}))
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strip = sum(int(step["start"]) for step in steps if step["type"] == "Strip" and step["content"] == " ")
        return BytePieces(_table({token_id: _byte_fallback(text, steps) for token_id, text in vocabulary.items()}), strip)
    return WindowPieces(backend)


def _table(pieces: dict[int, bytes]) -> list[bytes]:
    return [pieces.get(token_id, b"") for token_id in range(max(pieces, default=-1) + 1)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(text: str) -> bytes:
    """A token outside the alphabet, as added tokens can be, is its own text."""
    try:
        return bytes([_BYTES[character] for character in text])
    except KeyError:
        return text.encode()


def _byte_fallback(text: str, steps: Sequence[dict[str, Any]]) -> bytes:
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", text):
        return bytes([int(match[1], 16)])
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            text = text.replace(step["pattern"]["String"], step["content"])
    return text.encode()

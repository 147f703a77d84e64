"""The one model that a router serves, and what it needs from that model's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.detokenizer import IncrementalDetokenizer
from tandem.tokenizer import ChatPrompt

__all__ = ["ModelInfo", "ServedModel", "TokenizerLike"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Identity and limits that all workers must agree on. tokenizer_path: its folder, as the worker sees it."""

    name: str
    fingerprint: str
    max_context_tokens: int
    block_size_tokens: int
    vocab_size: int
    tokenizer_path: str = ""

    def differences(self, other: ModelInfo) -> list[str]:
        """Names and values of what may not differ between the workers of one router; empty: they fit."""
        names = ("fingerprint", "max_context_tokens", "block_size_tokens", "vocab_size")
        pairs = [(name, getattr(other, name), getattr(self, name)) for name in names]
        return [f"{name} {theirs} instead of {ours}" for name, theirs, ours in pairs if theirs != ours]


class TokenizerLike(Protocol):
    """What the router uses of `tandem.tokenizer.Tokenizer`."""

    eos_ids: frozenset[int]

    def encode(self, text: str, enough: int = ...) -> list[int]: ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] = ...,
        enough: int = ...,
    ) -> ChatPrompt: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def detokenizer(self) -> IncrementalDetokenizer: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: TokenizerLike

"""Answers that follow a JSON schema, a regular expression or a list of choices, with llguidance.

A grammar travels as llguidance's own text. Where an answer stands in it is a function of the tokens so far, so a worker that
takes an answer over rebuilds that from them. llguidance is imported where it is needed: who does not use it pays nothing.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from tandem.errors import InvalidRequest
from tandem.request import Request
from tandem.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

__all__ = ["GrammarState", "Grammars", "check_grammar", "grammar_of_choices", "grammar_of_regex", "grammar_of_schema"]

MAX_GRAMMAR_BYTES = 256 * 1024
_KEPT = 64
_NOTHING_FITS = "NoExtensionBias"  # llguidance's word for a grammar without any text


def grammar_of_schema(schema: str) -> str:
    """schema: JSON text; `{"type": "object"}` for any object."""
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_json_schema(schema))


def grammar_of_regex(regex: str) -> str:
    from llguidance import LLMatcher

    return str(LLMatcher.grammar_from_regex(regex))


def grammar_of_choices(choices: Sequence[str]) -> str:
    from llguidance import LLMatcher

    return str(
        LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices))
    )


def check_grammar(grammar: str, field: str) -> None:
    """
    Raises:
        InvalidRequest: with the compiler's reason.
    """
    from llguidance import LLMatcher

    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(field, f"is larger than {MAX_GRAMMAR_BYTES} bytes")
    matcher = LLMatcher(_byte_tokenizer(), grammar, log_level=0, limits=_limits())
    if matcher.is_error():
        raise InvalidRequest(field, f"cannot be compiled: {_one_line(matcher.get_error())}")
    # What is too large shows only when it is used: two steps over single bytes.
    first = next((byte for byte, bits in enumerate(_bits(matcher.compute_bitmask())) if bits), None)
    if not matcher.is_error() and first is not None and matcher.consume_token(first):
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = _one_line(matcher.get_error())
        raise InvalidRequest(field, "no answer fits it" if reason == _NOTHING_FITS else f"is too complex: {reason}")


def _bits(mask: bytes) -> Iterator[bool]:
    return (bool(byte >> bit & 1) for byte in mask for bit in range(8))


def _one_line(reason: str) -> str:
    """The compiler draws where the fault is, over several lines."""
    return " ".join(reason.replace("<non-verbose/>", "").split())


@cache
def _byte_tokenizer() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


@cache
def _limits() -> LLParserLimits:
    """A fifth of the library's fuel: a grammar may take 0.1 s at its start and 5 ms a step, beside the sequences of others."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=200_000, step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=50_000, verbose_errors=False
    )


class Grammars:
    """Of one worker: grammars compiled lately, ready to be started. For one thread.

    tokenizer: gives the model's, when a grammar is first asked for. vocab_size: the model's, padding included.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer], vocab_size: Callable[[], int]) -> None:
        self._make_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._ends: list[int] = []
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def start(self, request: Request) -> GrammarState | None:
        """Where `request`'s answer stands after its `generated` tokens. None: it follows no grammar.

        Raises:
            InvalidRequest: the grammar cannot be compiled, which the router would have refused.
        """
        if not request.grammar:
            return None
        compiled = self._compiled.pop(request.grammar, None) or self._compile(request.grammar)
        self._compiled[request.grammar] = compiled
        while len(self._compiled) > _KEPT:
            self._compiled.popitem(last=False)
        state = GrammarState(compiled.deep_copy(), self._vocab_size(), self._ends, request.grammar_after)
        for token in request.generated:
            state.append(token)
        return state

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            source, vocab_size = self._make_tokenizer(), self._vocab_size()
            self._ends = sorted(token for token in source.eos_ids if 0 <= token < vocab_size)
            self._tokenizer = LLTokenizer(source.to_json(), n_vocab=vocab_size, eos_token=self._ends)
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_limits())
        if compiled.is_error():
            raise InvalidRequest("grammar", f"cannot be compiled: {_one_line(compiled.get_error())}")
        return compiled


class GrammarState:
    """Where one answer stands. ends: the model's end tokens. after: the grammar holds for what follows these tokens; empty:
    from the beginning."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int], after: Sequence[int] = ()) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._after = list(after)
        self._recent: list[int] = []

    def append(self, token: int) -> None:
        if not self._after:
            self._matcher.consume_token(token)
            return
        self._recent = [*self._recent, token][-len(self._after) :]
        if self._recent == self._after:
            self._after = []

    def allowed_V(self) -> torch.Tensor | None:
        """bool `[V]`: which tokens may come next. None: all may. Where the grammar is complete, only an end token may.

        Raises:
            InvalidRequest: the grammar has come to the limits of its own memory or time; nothing unbound may follow.
        """
        if self._after:
            return None
        import torch

        # Not with llguidance.torch, whose import sets torch's compiler up.
        bytes_U = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits_U8 = (bytes_U.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed_V: torch.Tensor = bits_U8.flatten()[: self._vocab_size].bool()
        if self._matcher.is_error():
            raise InvalidRequest("grammar", f"is too complex to go on: {_one_line(self._matcher.get_error())}")
        if not bool(allowed_V.any()):
            allowed_V = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed_V[self._ends] = True
        return allowed_V

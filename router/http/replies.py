"""What the pipeline gives, in OpenAI's shapes: whole, or chunk by chunk. Pure but for what it has collected."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from router.answer import Delta
from router.job import Outcome
from tandem.chat_parser import ToolCall
from tandem.request import FinishReason, TokenLogprobs

__all__ = ["ChatReply", "CompletionReply", "Envelope", "Reply", "timings_of", "token_text"]

Json = dict[str, Any]
TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every message of a reply says. created: seconds since 1970."""

    id: str
    created: int
    model: str

    def wrap(self, kind: str, choices: Sequence[Json], **more: object) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


class Reply(Protocol):
    """place: which of several prompts the item answers."""

    def add(self, place: int, item: Delta | Outcome) -> None: ...

    def whole(self) -> Json:
        """After the last `add`."""
        ...

    def chunks(self, place: int, item: Delta | Outcome) -> Iterator[Json]:
        """For a stream, instead of `add`."""
        ...

    def usage_chunk(self) -> Json: ...


@dataclass(slots=True)
class _Usage:
    """Prompts count once, however many answers they have."""

    prompts: dict[int, Outcome] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, place: int, outcome: Outcome) -> None:
        self.prompts.setdefault(place, outcome)
        self.completion_tokens += outcome.completion_tokens

    def as_json(self) -> Json:
        prompt_tokens = sum(outcome.prompt_tokens for outcome in self.prompts.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(outcome.cached_tokens for outcome in self.prompts.values())},
        }

    def timings(self) -> Json | None:
        return timings_of(self.prompts[0]) if 0 in self.prompts else None


@dataclass(slots=True)
class CompletionReply:
    """tells_logprobs: the client asked for them. num_answers: to each prompt."""

    envelope: Envelope
    token_bytes: TokenBytes
    num_answers: int
    tells_logprobs: bool
    tells_usage: bool = False
    usage: _Usage = field(default_factory=_Usage)
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _choices: dict[int, Json] = field(default_factory=dict)

    KIND = "text_completion"

    def add(self, place: int, item: Delta | Outcome) -> None:
        new = self._choice(place, item)
        choice = self._choices.setdefault(new["index"], new)
        if choice is new:
            return
        choice["text"] += new["text"]
        choice["finish_reason"] = new["finish_reason"]
        for name, values in (new["logprobs"] or {}).items():
            choice["logprobs"] = choice["logprobs"] or {}
            choice["logprobs"].setdefault(name, []).extend(values)

    def whole(self) -> Json:
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self.envelope.wrap(self.KIND, choices, usage=self.usage.as_json(), timings=self.usage.timings())

    def chunks(self, place: int, item: Delta | Outcome) -> Iterator[Json]:
        more = {"usage": None} if self.tells_usage else {}
        yield self.envelope.wrap(self.KIND, [self._choice(place, item)], **more)

    def usage_chunk(self) -> Json:
        return self.envelope.wrap(self.KIND, [], usage=self.usage.as_json(), timings=self.usage.timings())

    def _choice(self, place: int, item: Delta | Outcome) -> Json:
        index = place * self.num_answers + item.index
        if isinstance(item, Outcome):
            self.usage.add(place, item)
            return {"index": index, "text": "", "logprobs": None, "finish_reason": item.finish_reason.value}
        told: list[tuple[int, TokenLogprobs | None]] = []
        text = item.text
        if item.prompt is not None:
            text = item.prompt.text + text
            told += zip(item.prompt.token_ids, (None, *item.prompt.logprobs), strict=False)
        told += zip(item.token_ids, item.logprobs, strict=False)
        logprobs = self._logprobs(index, told) if self.tells_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, index: int, told: Sequence[tuple[int, TokenLogprobs | None]]) -> Json:
        offsets = []
        texts = [token_text(self.token_bytes(token)) for token, _ in told]
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob if entry else None for _, entry in told],
            "top_logprobs": [self._top(entry) if entry and entry.top else None for _, entry in told],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {token_text(self.token_bytes(token)): logprob for token, logprob in entry.top}


@dataclass(slots=True)
class ChatReply:
    envelope: Envelope
    token_bytes: TokenBytes
    tells_logprobs: bool
    tells_usage: bool = False
    usage: _Usage = field(default_factory=_Usage)
    _choices: dict[int, Json] = field(default_factory=dict)
    _num_calls: dict[int, int] = field(default_factory=dict)

    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def add(self, place: int, item: Delta | Outcome) -> None:
        choice = self._choices.setdefault(item.index, self._empty(item.index))
        message = choice["message"]
        if isinstance(item, Outcome):
            self.usage.add(place, item)
            choice["finish_reason"] = _finish_reason(item, bool(message.get("tool_calls")))
            if message.get("tool_calls") and not message["content"]:
                message["content"] = None
            return
        message["content"] += item.text
        if item.reasoning:
            message["reasoning_content"] = message.get("reasoning_content", "") + item.reasoning
        for call in item.tool_calls:
            message.setdefault("tool_calls", []).append(_call(call))
        if self.tells_logprobs:
            choice["logprobs"]["content"] += self._logprobs(item)

    def whole(self) -> Json:
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self.envelope.wrap(self.KIND, choices, usage=self.usage.as_json(), timings=self.usage.timings())

    def chunks(self, place: int, item: Delta | Outcome) -> Iterator[Json]:
        if item.index not in self._num_calls:
            self._num_calls[item.index] = 0
            yield self._chunk(item.index, {"role": "assistant", "content": ""})
        if isinstance(item, Outcome):
            self.usage.add(place, item)
            yield self._chunk(item.index, {}, finish_reason=_finish_reason(item, self._num_calls[item.index] > 0))
            return
        if delta := self._delta(item):
            logprobs = {"content": self._logprobs(item), "refusal": None} if self.tells_logprobs else None
            yield self._chunk(item.index, delta, logprobs=logprobs)

    def _delta(self, item: Delta) -> Json:
        """Empty: there is nothing to tell."""
        delta: Json = {"content": item.text} if item.text or self.tells_logprobs else {}
        if item.reasoning:
            delta["reasoning_content"] = item.reasoning
        if item.tool_calls:
            first = self._num_calls[item.index]
            self._num_calls[item.index] += len(item.tool_calls)
            delta["tool_calls"] = [{"index": place, **_call(call)} for place, call in enumerate(item.tool_calls, first)]
        return delta

    def usage_chunk(self) -> Json:
        return self.envelope.wrap(self.CHUNK, [], usage=self.usage.as_json(), timings=self.usage.timings())

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        more = {"usage": None} if self.tells_usage else {}
        return self.envelope.wrap(self.CHUNK, [choice], **more)

    def _empty(self, index: int) -> Json:
        logprobs: Json | None = {"content": [], "refusal": None} if self.tells_logprobs else None
        message = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, delta: Delta) -> list[Json]:
        return [
            {**self._one(token, entry.logprob), "top_logprobs": [self._one(*pair) for pair in entry.top]}
            for token, entry in zip(delta.token_ids, delta.logprobs, strict=False)
        ]

    def _one(self, token: int, logprob: float) -> Json:
        raw = self.token_bytes(token)
        return {"token": token_text(raw), "logprob": logprob, "bytes": list(raw)}


def _call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _finish_reason(outcome: Outcome, has_calls: bool) -> str:
    return "tool_calls" if has_calls and outcome.finish_reason is FinishReason.STOP else outcome.finish_reason.value


def token_text(raw: bytes) -> str:
    """A token's text; one that is part of a character only is spelt in bytes, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def timings_of(outcome: Outcome) -> Json:
    """Of one answer, beside OpenAI's fields: seconds, and who served it."""
    moments = outcome.timings
    decoded = moments.decode_started > 0
    return {
        "queue": moments.prefill_started - moments.received,
        "prefill": moments.first_token - moments.prefill_started,
        "handoff_exposed": outcome.handoff_exposed_s,
        "ttft": moments.first_token - moments.received,
        "decode": moments.finished - moments.decode_started if decoded else 0.0,
        "total": moments.finished - moments.received,
        "prefill_worker": outcome.prefill_worker,
        "decode_worker": outcome.decode_worker,
        "attempts": outcome.attempts,
    }

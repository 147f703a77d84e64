"""A chat answer's text taken apart while it comes: reasoning, content, tool calls, as the Qwen family writes them.

::

    <think> reasoning </think>  content  <tool_call> {"name": …, "arguments": {…}} </tool_call>  …
                                   or    <tool_call> <function=NAME> <parameter=KEY> … </parameter> … </function> </tool_call>

What may be the beginning of a mark is held until it is one or cannot become one, so how the text is cut changes nothing. A tool
call comes whole, once it is closed; one that cannot be read stays what it is: text.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ChatFormat", "ChatParser", "ChatParts", "ToolCall"]

_THINK, _END_THINK = "<think>", "</think>"
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>\s*)?\Z", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """arguments: a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """What to look for. begins_in_reasoning: the prompt has opened the first `<think>`. tools: as the client sent them, in
    OpenAI's form; empty: no calls are looked for."""

    reasoning: bool = False
    begins_in_reasoning: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class ChatParts:
    """What has come since the last time."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


class _State(enum.Enum):
    START = "nothing but space so far"
    REASONING = "inside <think>"
    CONTENT = "content"
    CALL = "inside <tool_call>"


class ChatParser:
    """Of one answer. `push` text as it comes; `flush` at its end."""

    def __init__(self, form: ChatFormat) -> None:
        self._form = form
        self._types = {name: properties for name, properties in map(_signature, form.tools) if name}
        self._state = _State.REASONING if form.begins_in_reasoning else _State.START
        self._held = ""
        self._strip = form.begins_in_reasoning  # newlines after a mark belong to it
        self._searched = 0  # so many characters of a call have no end in them

    def push(self, text: str) -> ChatParts:
        self._held += text
        parts = ChatParts()
        while self._step(parts):
            pass
        return parts

    def flush(self) -> ChatParts:
        """What was held, at the end of the answer. A call that was not closed is read as far as it came."""
        parts = ChatParts()
        held, self._held = self._held, ""
        if self._state is _State.CALL:
            self._call(held, parts, closed=False)
        elif self._state is _State.REASONING:
            parts.reasoning = self._take(held)
        else:
            parts.content = self._take(held)
        return parts

    def _step(self, parts: ChatParts) -> bool:
        """Take one piece off what is held. False: nothing can be decided before more text comes."""
        match self._state:
            case _State.START:
                return self._start()
            case _State.REASONING:
                text, ended = self._until(_END_THINK)
                parts.reasoning += self._take(text)
                return ended and self._enter(_State.CONTENT)
            case _State.CONTENT if self._form.tools:
                text, ended = self._until(_CALL)
                parts.content += self._take(text)
                return ended and self._enter(_State.CALL)
            case _State.CONTENT:
                text, self._held = self._held, ""
                parts.content += self._take(text)
                return False
            case _State.CALL:
                return self._collect(parts)

    def _start(self) -> bool:
        seen = self._held.lstrip()
        if self._form.reasoning and seen.startswith(_THINK):
            self._held = seen[len(_THINK) :]
            return self._enter(_State.REASONING)
        if self._form.reasoning and _THINK.startswith(seen):
            return False
        self._state = _State.CONTENT
        return True

    def _enter(self, state: _State) -> bool:
        self._state, self._strip, self._searched = state, True, 0
        return True

    def _until(self, mark: str) -> tuple[str, bool]:
        """Text that is surely before `mark`, without the newlines next to it, taken off what is held; whether it was there."""
        place = self._held.find(mark)
        if place >= 0:
            text, self._held = self._held[:place].rstrip("\n"), self._held[place + len(mark) :]
            return text, True
        cut = len(self._held) - _held_back(self._held, mark)
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _take(self, text: str) -> str:
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        return text

    def _collect(self, parts: ChatParts) -> bool:
        place = self._held.find(_END_CALL, self._searched)
        if place < 0:
            self._searched = max(0, len(self._held) - len(_END_CALL))
            return False
        body, self._held = self._held[:place], self._held[place + len(_END_CALL) :]
        self._call(body, parts, closed=True)
        return self._enter(_State.CONTENT)

    def _call(self, body: str, parts: ChatParts, *, closed: bool) -> None:
        if (call := self._read(body.strip())) is not None:
            parts.tool_calls.append(call)
        else:
            parts.content += _CALL + body + (_END_CALL if closed else "")

    def _read(self, body: str) -> ToolCall | None:
        if body.startswith("{"):
            return _read_json(body)
        if (function := _FUNCTION.match(body)) is None:
            return None
        name = function[1].strip()
        types = self._types.get(name, {})
        arguments = {key.strip(): _value(text, types.get(key.strip())) for key, text in _PARAMETER.findall(function[2])}
        return ToolCall(name, _dump(arguments))


def _held_back(text: str, mark: str) -> int:
    """Characters at the end that may belong to `mark`, newlines before it included."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length + _newlines(text[: len(text) - length])
    return _newlines(text)


def _newlines(text: str) -> int:
    return len(text) - len(text.rstrip("\n"))


def _read_json(body: str) -> ToolCall | None:
    data = _load(body, None)
    if not isinstance(data, dict) or not isinstance(data.get("name"), str) or not _is_text(data["name"]):
        return None
    arguments = data.get("arguments", data.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _load(arguments, None)
    return ToolCall(data["name"], _dump(arguments)) if isinstance(arguments, dict) else None


def _load(text: str, otherwise: object) -> Any:
    """JSON's value, if it is one that JSON can spell again: no NaN, and nothing nested too deeply."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return otherwise


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _dump(value: object) -> str:
    """Half of a surrogate pair stays escaped: as a character it could not be sent."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _signature(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A function's name, and the schemas of its parameters."""
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return "", {}
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return str(function.get("name") or ""), dict(properties) if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> object:
    """A parameter is text; its schema says whether it spells something else. Where that may be text or not, it is text unless
    it spells one of the others. Without a schema, it is what it spells."""
    allowed = _types_of(schema)
    if allowed == {"string"}:
        return text
    value = _load(_SPELLINGS.get(text, text) if allowed & {"boolean", "null"} else text, text)
    return text if "string" in allowed and _type_of(value) not in allowed else value


# As templates write them that print a Python value.
_SPELLINGS = {"True": "true", "False": "false", "None": "null"}
_TYPES: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", list: "array"}


def _types_of(schema: object) -> set[str]:
    """Names of JSON's types that a schema allows, itself or in its alternatives; empty: it does not say. Clients write schemas
    as they like, so nothing of their form is believed."""
    parts = [schema, *_list_in(schema, "anyOf"), *_list_in(schema, "oneOf")]
    found = {name for part in parts for name in (_type_in(part), *_list_in(part, "type")) if isinstance(name, str)}
    found = found or {_type_of(value) for value in _list_in(schema, "enum")}
    return found | {"integer"} if "number" in found else found


def _type_in(schema: object) -> object:
    return schema.get("type") if isinstance(schema, Mapping) else None


def _list_in(schema: object, key: str) -> Sequence[object]:
    value = schema.get(key) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


def _type_of(value: object) -> str:
    return "null" if value is None else _TYPES[type(value)]

"""A chat as clients send it becomes what a chat template takes. Pure."""

from __future__ import annotations

from typing import Any

from router.json_text import parse_json
from router.model import ServedModel
from tandem.errors import InvalidRequest
from tandem.tokenizer import ChatPrompt
from tandem.v1 import inference_pb2 as pb

__all__ = ["ROLES", "encode_conversation"]

ROLES = ("system", "user", "assistant", "tool")
MAX_TOOLS = 128


def encode_conversation(chat: pb.ChatMessages, model: ServedModel, enough: int) -> ChatPrompt:
    """enough: with more tokens than that, it does not matter how many.

    Raises:
        InvalidRequest: names the field; or the model's template refuses it.
    """
    if not chat.messages:
        raise InvalidRequest("chat", "has no messages")
    messages = [_message(message, place) for place, message in enumerate(chat.messages)]
    options = _json(chat.template_options, "chat.template_options", dict)
    return model.tokenizer.encode_chat(messages, _tools(chat.tools), options, enough)


def _message(message: pb.ChatMessage, place: int) -> dict[str, Any]:
    name = f"chat.messages[{place}]"
    if message.role not in ROLES:
        raise InvalidRequest(f"{name}.role", f"{message.role!r} is unknown; known are {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    for field, key in (("reasoning", "reasoning_content"), ("tool_call_id", "tool_call_id"), ("name", "name")):
        if value := getattr(message, field):
            out[key] = value
    if message.tool_calls:
        out["tool_calls"] = [_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls)]
    return out


def _call(call: pb.ToolCall, name: str) -> dict[str, Any]:
    """Templates of this family go through the arguments one by one."""
    arguments = _json(call.arguments, f"{name}.arguments", dict)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tools(text: str) -> list[dict[str, Any]]:
    tools: list[dict[str, Any]] = _json(text, "chat.tools", list)
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"at most {MAX_TOOLS} are allowed, not {len(tools)}")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"chat.tools[{place}]", "must be an object with a function that has a name")
    return tools


def _json(text: str, name: str, kind: type[Any]) -> Any:
    """Empty text is an empty list or object."""
    if not text:
        return kind()
    data = parse_json(text, name)
    if not isinstance(data, kind):
        raise InvalidRequest(name, f"must be a JSON {'list' if kind is list else 'object'}")
    return data

"""`/v1/chat/completions`: OpenAI's JSON to the pipeline's request. Pure."""

from __future__ import annotations

import json
from typing import Any

from router.http.completions import Asked, fill_common
from router.http.fields import Fields, utf8
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb

__all__ = ["read_chat"]

_ROLES = {"developer": "system"}


def read_chat(body: dict[str, Any]) -> Asked:
    """
    Raises:
        InvalidRequest: names the parameter as OpenAI does.
    """
    fields = Fields(body)
    message = pb.GenerateRequest()
    stream, include_usage = fill_common(fields, message)
    limits = [fields.integer(name) for name in ("max_completion_tokens", "max_tokens")]
    if (limit := next((value for value in limits if value is not None), None)) is not None:
        message.max_new_tokens = limit
    _logprobs(fields, message)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "must be a list of at least one message")
    for place, each in enumerate(messages):
        if not isinstance(each, dict):
            raise InvalidRequest(f"messages[{place}]", "must be an object")
        message.chat.messages.append(_message(Fields(each, f"messages[{place}].")))
    _tools(fields, message.chat)
    if fields.inner("chat_template_kwargs") is not None:
        message.chat.template_options = json.dumps(fields.get("chat_template_kwargs"))
    fields.only("modalities", ["text"])
    fields.only("audio")
    fields.done()
    return Asked((message,), message.n if message.HasField("n") else 1, stream, include_usage)


def _logprobs(fields: Fields, message: pb.GenerateRequest) -> None:
    wanted, alternatives = fields.flag("logprobs"), fields.integer("top_logprobs")
    if alternatives is not None and not wanted:
        raise InvalidRequest("top_logprobs", "needs logprobs to be true")
    if wanted:
        message.logprobs = alternatives or 0


def _message(fields: Fields) -> pb.ChatMessage:
    role = fields.text("role") or ""
    content = _content(fields)
    message = pb.ChatMessage(
        role=_ROLES.get(role, role),
        content=content or "",
        reasoning=_reasoning(fields),
        tool_call_id=fields.text("tool_call_id") or "",
        name=fields.text("name") or "",
        tool_calls=_calls(fields),
    )
    if content is None and not (message.tool_calls or message.reasoning):
        raise InvalidRequest(fields.name("content"), "is missing")
    fields.ignore("refusal", "annotations", "audio", "function_call")
    fields.done()
    return message


def _reasoning(fields: Fields) -> str:
    """Under either of the names that servers give it."""
    named = [fields.text(name) for name in ("reasoning_content", "reasoning")]
    return next(filter(None, named), "")


def _calls(fields: Fields) -> list[pb.ToolCall]:
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list):
        raise InvalidRequest(fields.name("tool_calls"), "must be a list")
    out = []
    for place, call in enumerate(calls):
        where = f"{fields.name('tool_calls')}[{place}]"
        if not isinstance(call, dict):
            raise InvalidRequest(where, "must be an object")
        outer = Fields(call, f"{where}.")
        function = outer.inner("function") or Fields({}, f"{where}.function.")
        out.append(
            pb.ToolCall(id=outer.text("id") or "", name=function.text("name") or "", arguments=function.text("arguments") or "")
        )
    return out


def _tools(fields: Fields, chat: pb.ChatMessages) -> None:
    """Which tools the model sees. What it answers is not forced, so `required` and named tools are refused."""
    tools, choice = fields.get("tools"), fields.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise InvalidRequest("tool_choice", f"{choice!r} is not supported; use auto or none")
    fields.only("parallel_tool_calls", True)
    if tools is None or choice == "none":
        return
    try:
        chat.tools = json.dumps(tools, ensure_ascii=False)
    except ValueError as error:
        raise InvalidRequest("tools", "holds half of a surrogate pair, which is no text") from error


def _content(fields: Fields) -> str | None:
    """Text, or parts of text. None: neither, as in a message that only calls tools."""
    content, name = fields.get("content"), fields.name("content")
    if content is None:
        return None
    if isinstance(content, str):
        return utf8(content, name)
    if not isinstance(content, list):
        raise InvalidRequest(name, "must be a string or a list of parts")
    texts = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(
                f"{name}[{place}]", f"is of type {kind!r}; only text is served here: no images, audio or files"
            )
        text = Fields(part, f"{name}[{place}].").text("text")
        if text is None:
            raise InvalidRequest(f"{name}[{place}].text", "is missing")
        texts.append(text)
    return "".join(texts)

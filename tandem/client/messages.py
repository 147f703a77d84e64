"""Between a client's own types and the public protos."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack

import grpc

from tandem.errors import Cancelled, InvalidRequest, Overloaded, TandemError, Unavailable
from tandem.request import TokenLogprobs
from tandem.v1 import inference_pb2 as pb

__all__ = ["Answer", "Message", "Options", "Part", "Prompt", "Tool", "answers_of", "error_of", "part_of", "request_of"]

Tool = Mapping[str, Any]
"""In OpenAI's form: {"type": "function", "function": {"name": …, "parameters": …}}."""


class Message(TypedDict):
    """Of a chat. role: system, user, assistant or tool."""

    role: str
    content: str


Prompt = str | Sequence[int] | Sequence[Message]
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
)


_PLAIN = ("model", "max_new_tokens", "min_new_tokens", "ignore_eos", "n", "logprobs", "prompt_logprobs", "echo", "regex")


class Options(TypedDict, total=False):
    """Defaults and ranges: docs/api.md. timeout_s: the deadline, which the cluster keeps too."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    max_new_tokens: int
    min_new_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    echo: bool
    batch: bool
    tools: Sequence[Tool]
    template_options: Mapping[str, Any]
    json_schema: Mapping[str, Any]
    json_object: bool
    regex: str
    choice: Sequence[str]
    timeout_s: float
    request_id: str


@dataclass(frozen=True, slots=True)
class Part:
    """What came since the last part, of the answer with this index. finished: set in an answer's last part, which has no text.
    prompt: when it was asked for, in an answer's first part."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[pb.ToolCall, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt: pb.Prompt | None = None
    finished: pb.Finished | None = None


@dataclass(slots=True)
class Answer:
    """A whole one. finished: why it ended, usage, timings in seconds, who served it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[pb.ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt: pb.Prompt | None = None
    finished: pb.Finished = field(default_factory=pb.Finished)

    @property
    def finish_reason(self) -> str:
        return self.finished.finish_reason


def request_of(prompt: Prompt, **options: Unpack[Options]) -> pb.GenerateRequest:
    """
    Raises:
        InvalidRequest: something that the proto cannot carry.
    """
    given: dict[str, Any] = dict(options)
    try:
        message = pb.GenerateRequest(sampling=pb.Sampling(**{key: given[key] for key in _SAMPLING if key in given}))
        for key in _PLAIN:
            if key in given:
                setattr(message, key, given[key])
        message.stop.extend(given.get("stop", ()))
        message.stop_token_ids.extend(given.get("stop_token_ids", ()))
        message.service_class = pb.SERVICE_CLASS_BATCH if given.get("batch") else pb.SERVICE_CLASS_INTERACTIVE
        if "json_schema" in given:
            message.json_schema = json.dumps(given["json_schema"])
        if given.get("json_object"):
            message.json_object = True
        if "choice" in given:
            message.choice.texts.extend(given["choice"])
        _fill_prompt(message, prompt, given)
    except (ValueError, TypeError) as error:
        raise InvalidRequest("request", f"an argument is out of range or of the wrong type: {error}") from error
    return message


def _fill_prompt(message: pb.GenerateRequest, prompt: Prompt, given: Mapping[str, Any]) -> None:
    if isinstance(prompt, str):
        message.text = prompt
        return
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], Mapping):
        for item in items:
            calls = [pb.ToolCall(**call) for call in item.get("tool_calls", ())]
            message.chat.messages.add(**{**item, "tool_calls": calls})
        if given.get("tools"):
            message.chat.tools = json.dumps(list(given["tools"]))
        if given.get("template_options"):
            message.chat.template_options = json.dumps(dict(given["template_options"]))
    else:
        message.token_ids.ids.extend(items)
        message.token_ids.SetInParent()


def part_of(response: pb.GenerateResponse) -> Part:
    return Part(
        index=response.index,
        text=response.text,
        token_ids=tuple(response.token_ids),
        reasoning=response.reasoning,
        tool_calls=tuple(response.tool_calls),
        logprobs=tuple(
            TokenLogprobs(entry.token.logprob, tuple((top.token_id, top.logprob) for top in entry.top))
            for entry in response.logprobs
        ),
        prompt=response.prompt if response.HasField("prompt") else None,
        finished=response.finished if response.HasField("finished") else None,
    )


def answers_of(parts: Iterable[Part]) -> list[Answer]:
    """Each whole, in order of their indices."""
    answers: dict[int, Answer] = {}
    for part in parts:
        answer = answers.setdefault(part.index, Answer(part.index))
        answer.text += part.text
        answer.token_ids += part.token_ids
        answer.reasoning += part.reasoning
        answer.tool_calls += part.tool_calls
        answer.logprobs += part.logprobs
        answer.prompt = part.prompt or answer.prompt
        answer.finished = part.finished or answer.finished
    return [answers[index] for index in sorted(answers)]


def error_of(error: grpc.RpcError, address: str) -> Exception:
    """A status as an exception of `tandem.errors`, or TimeoutError."""
    details = error.details() or error.code().name
    trailers = dict(error.trailing_metadata() or ())
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            name, _, reason = details.partition(": ")
            return InvalidRequest(name, reason)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(details, int(trailers.get("retry-after-ms", 1000)) / 1000)
        case grpc.StatusCode.UNAVAILABLE if "x-request-id" not in trailers:
            return Unavailable(f"no router answers at {address}, or it was lost in the middle: {details}")
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(details)
        case grpc.StatusCode.CANCELLED:
            return Cancelled(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return TimeoutError(details)
        case code:
            return TandemError(f"the router at {address} answers {code.name}: {details}")

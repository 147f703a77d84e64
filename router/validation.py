"""A client's GenerateRequest becomes a `Request`, or an error that names the field to change. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.model import ServedModel
from tandem.errors import InvalidRequest
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tandem.v1 import inference_pb2 as pb

__all__ = ["ROLES", "ValidRequest", "validate", "validate_request_id"]

ROLES = ("system", "user", "assistant", "tool")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_TEMPERATURE = 100.0
MAX_REQUEST_ID_CHARS = 128

_CLASSES = {
    pb.SERVICE_CLASS_UNSPECIFIED: ServiceClass.INTERACTIVE,
    pb.SERVICE_CLASS_INTERACTIVE: ServiceClass.INTERACTIVE,
    pb.SERVICE_CLASS_BATCH: ServiceClass.BATCH,
}


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """stop_strings stay with the router, since only it has text."""

    request: Request
    stop_strings: tuple[str, ...]


def validate(
    message: pb.GenerateRequest,
    request_id: str,
    model: ServedModel,
    max_new_tokens_default: int,
    draw_seed: Callable[[], int],
) -> ValidRequest:
    """
    Raises:
        InvalidRequest: names the field of the proto.
    """
    if message.model not in ("", model.info.name):
        raise InvalidRequest("model", f"{message.model!r} is not served here; this is {model.info.name!r}")
    if message.service_class not in _CLASSES:
        raise InvalidRequest("service_class", f"{message.service_class} is unknown")
    sampling = _sampling(message.sampling, draw_seed)
    stop_strings = _stop_strings(message)
    stop_token_ids = _stop_token_ids(message, model)
    prompt = _prompt(message, model)
    limit = model.info.max_context_tokens
    max_new_tokens = _max_new_tokens(message, len(prompt), limit, max_new_tokens_default)
    request = Request(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        stop=StopRules(max_new_tokens, stop_token_ids),
        service_class=_CLASSES[message.service_class],
    )
    return ValidRequest(request, stop_strings)


def validate_request_id(request_id: str) -> str:
    """
    Raises:
        InvalidRequest: empty, too long, or with characters that logs and metadata cannot carry.
    """
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or not all(" " <= character <= "~" for character in request_id):
        raise InvalidRequest("x-request-id", f"must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return request_id


def _sampling(sampling: pb.Sampling, draw_seed: Callable[[], int]) -> SamplingParams:
    temperature, top_p, top_k = sampling.temperature, sampling.top_p if sampling.HasField("top_p") else 1.0, sampling.top_k
    if not math.isfinite(temperature) or not 0 <= temperature <= MAX_TEMPERATURE:
        raise InvalidRequest("sampling.temperature", f"must be from 0 to {MAX_TEMPERATURE:g}, not {temperature:g}")
    if not 0 < top_p <= 1:  # false for NaN too
        raise InvalidRequest("sampling.top_p", f"must be above 0 and at most 1, not {top_p:g}")
    if top_k < 0:
        raise InvalidRequest("sampling.top_k", f"must be 0 (all) or more, not {top_k}")
    return SamplingParams(temperature, top_p, top_k, sampling.seed if sampling.HasField("seed") else draw_seed())


def _stop_strings(message: pb.GenerateRequest) -> tuple[str, ...]:
    if len(message.stop) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} stop strings are allowed, not {len(message.stop)}")
    for stop in message.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise InvalidRequest("stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters, not {len(stop)}")
    return tuple(message.stop)


def _stop_token_ids(message: pb.GenerateRequest, model: ServedModel) -> frozenset[int]:
    own = message.stop_token_ids
    if len(own) > MAX_STOP_TOKENS:
        raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_TOKENS} are allowed, not {len(own)}")
    _check_ids("stop_token_ids", own, model.info.vocab_size)
    eos = () if message.ignore_eos else (i for i in model.tokenizer.eos_ids if 0 <= i < model.info.vocab_size)
    return frozenset((*own, *eos))


def _prompt(message: pb.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "is missing; set one of text, token_ids and chat")
    ids: Sequence[int]
    if kind == "text":
        ids = model.tokenizer.encode(message.text) if message.text else []
    elif kind == "token_ids":
        ids = message.token_ids.ids  # not copied before its length is known
    else:
        ids = model.tokenizer.encode_chat(_conversation(message.chat))
    if not ids:
        raise InvalidRequest(kind, "is empty; at least one token is needed")
    longest = model.info.max_context_tokens - 1
    if len(ids) > longest:
        raise InvalidRequest(
            kind, f"the prompt has {len(ids)} tokens; with one token of answer at most {longest} fit the context"
        )
    _check_ids(kind, ids, model.info.vocab_size)
    return tuple(ids)


def _conversation(chat: pb.ChatMessages) -> list[tuple[str, str]]:
    if not chat.messages:
        raise InvalidRequest("chat", "has no messages")
    for place, message in enumerate(chat.messages):
        if message.role not in ROLES:
            raise InvalidRequest(f"chat.messages[{place}].role", f"{message.role!r} is unknown; known are {', '.join(ROLES)}")
    return [(message.role, message.content) for message in chat.messages]


def _max_new_tokens(message: pb.GenerateRequest, num_prompt: int, limit: int, default: int) -> int:
    if not message.HasField("max_new_tokens"):
        return min(default, limit - num_prompt)
    wanted = message.max_new_tokens
    if wanted < 1:
        raise InvalidRequest("max_new_tokens", f"must be at least 1, not {wanted}")
    if num_prompt + wanted > limit:
        raise InvalidRequest(
            "max_new_tokens",
            f"{num_prompt} of prompt and {wanted} of answer exceed the context of {limit} tokens; {limit - num_prompt} fit",
        )
    return wanted


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"token id {token_id} is outside 0 … {vocab_size - 1}")

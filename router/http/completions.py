"""`/v1/completions`: OpenAI's JSON to the pipeline's requests. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from router.http.fields import Fields, is_tokens, utf8
from tandem.errors import InvalidRequest
from tandem.v1 import inference_pb2 as pb

__all__ = ["CLASSES", "Asked", "fill_common", "read_completion"]

MAX_PROMPTS = 16
_DEFAULT_MAX_TOKENS = 16  # OpenAI's
# Of OpenAI's own, accepted and without a meaning here.
IGNORED = ("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
CLASSES = {
    "auto": pb.SERVICE_CLASS_INTERACTIVE,
    "default": pb.SERVICE_CLASS_INTERACTIVE,
    "priority": pb.SERVICE_CLASS_INTERACTIVE,
    "flex": pb.SERVICE_CLASS_BATCH,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asked for. messages: one for each prompt; num_answers: to each of them."""

    messages: tuple[pb.GenerateRequest, ...]
    num_answers: int
    stream: bool
    include_usage: bool


def read_completion(body: dict[str, Any]) -> Asked:
    """
    Raises:
        InvalidRequest: names the parameter as OpenAI does.
    """
    fields = Fields(body)
    message = pb.GenerateRequest()
    stream, include_usage = fill_common(fields, message)
    max_tokens = fields.integer("max_tokens")
    message.max_new_tokens = _DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    message.echo = bool(fields.flag("echo"))
    logprobs = fields.integer("logprobs")
    if logprobs is not None:
        message.logprobs = logprobs
        if message.echo:
            message.prompt_logprobs = logprobs
    num_answers = message.n if message.HasField("n") else 1
    fields.only("best_of", num_answers)
    fields.only("suffix", "")
    messages = _prompts(fields, message)
    fields.done()
    return Asked(messages, num_answers, stream, include_usage)


def fill_common(fields: Fields, message: pb.GenerateRequest) -> tuple[bool, bool]:
    """What completions and chat completions share. Returns whether to stream, and whether the usage is to come at the end."""
    message.model = fields.text("model") or ""
    sampling = message.sampling
    temperature = fields.number("temperature")
    sampling.temperature = 1.0 if temperature is None else temperature  # OpenAI's default
    for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        if (value := fields.number(name)) is not None:
            setattr(sampling, name, value)
    if (top_k := fields.integer("top_k")) is not None:
        sampling.top_k = max(top_k, 0) if top_k >= -1 else top_k  # -1 means all to some clients
    seed = fields.get("seed")
    if seed is not None:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise InvalidRequest("seed", "must be an integer")
        sampling.seed = seed % 2**64
    _logit_bias(fields, sampling)
    if (n := fields.integer("n")) is not None:
        message.n = n
    if (min_tokens := fields.integer("min_tokens")) is not None:
        message.min_new_tokens = min_tokens
    message.stop.extend(fields.strings("stop"))
    message.stop_token_ids.extend(fields.integers("stop_token_ids"))
    message.ignore_eos = bool(fields.flag("ignore_eos"))
    tier = fields.text("service_tier") or "auto"
    if tier not in CLASSES:
        raise InvalidRequest("service_tier", f"{tier!r} is unknown; known are {', '.join(CLASSES)}")
    message.service_class = CLASSES[tier]
    _constraint(fields, message)
    fields.ignore(*IGNORED)
    return bool(fields.flag("stream")), _include_usage(fields)


def _constraint(fields: Fields, message: pb.GenerateRequest) -> None:
    """OpenAI's `response_format`, or vLLM's `structured_outputs`."""
    response_format, structured = fields.inner("response_format"), fields.inner("structured_outputs")
    if response_format is not None and structured is not None:
        raise InvalidRequest("structured_outputs", "cannot be given beside response_format")
    if response_format is not None:
        _response_format(response_format, message)
    if structured is not None:
        _structured(structured, message)


def _response_format(fields: Fields, message: pb.GenerateRequest) -> None:
    kind = fields.text("type")
    if kind == "json_object":
        message.json_object = True
    elif kind == "json_schema":
        described = fields.inner("json_schema")
        if described is None or described.inner("schema") is None:
            raise InvalidRequest(fields.name("json_schema"), "needs a schema")
        message.json_schema = json.dumps(described.get("schema"))
        described.ignore("name", "description", "strict")
        described.done()
    elif kind != "text":
        raise InvalidRequest(fields.name("type"), f"{kind!r} is unknown; known are text, json_object and json_schema")
    fields.done()


def _structured(fields: Fields, message: pb.GenerateRequest) -> None:
    given = [key for key in ("json", "regex", "choice", "json_object") if fields.get(key) not in (None, False)]
    if len(given) != 1:
        raise InvalidRequest("structured_outputs", "needs exactly one of json, regex, choice and json_object")
    if given == ["json"]:
        schema = fields.get("json")
        message.json_schema = utf8(schema, "structured_outputs.json") if isinstance(schema, str) else json.dumps(schema)
    elif given == ["regex"]:
        message.regex = fields.text("regex") or ""
    elif given == ["choice"]:
        message.choice.texts.extend(fields.strings("choice"))
    else:
        message.json_object = bool(fields.flag("json_object"))
    fields.done()


def _include_usage(fields: Fields) -> bool:
    options = fields.inner("stream_options")
    if options is None:
        return False
    options.ignore("include_obfuscation")
    wanted = bool(options.flag("include_usage"))
    options.done()
    return wanted


def _logit_bias(fields: Fields, sampling: pb.Sampling) -> None:
    biases = fields.inner("logit_bias")
    if biases is None:
        return
    for key in list(fields.get("logit_bias")):
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise InvalidRequest("logit_bias", f"{key!r} is no token id")
        sampling.logit_bias[int(key)] = biases.number(key) or 0.0


def _prompts(fields: Fields, message: pb.GenerateRequest) -> tuple[pb.GenerateRequest, ...]:
    """One message for each prompt: a text, texts, tokens, or lists of tokens."""
    prompt = fields.get("prompt")
    if prompt is None:
        raise InvalidRequest("prompt", "is missing")
    several = isinstance(prompt, list) and prompt and all(isinstance(item, str | list) for item in prompt)
    prompts = prompt if several else [prompt]
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"at most {MAX_PROMPTS} prompts are allowed, not {len(prompts)}")
    messages = []
    for each in prompts:
        one = pb.GenerateRequest()
        one.CopyFrom(message)
        if isinstance(each, str):
            one.text = utf8(each, "prompt")
        elif is_tokens(each):
            one.token_ids.ids.extend(each)
            one.token_ids.SetInParent()
        else:
            raise InvalidRequest("prompt", "must be a string, a list of token ids, or a list of either")
        messages.append(one)
    return tuple(messages)

"""A client's GenerateRequest becomes a `Request`, or an error that names the field to change. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.answer import Prompt
from router.conversation import encode_conversation
from router.json_text import parse_json
from router.model import ServedModel
from tandem.chat_parser import ChatFormat
from tandem.errors import InvalidRequest, UnknownModel
from tandem.grammar import check_grammar, grammar_of_choices, grammar_of_regex, grammar_of_schema
from tandem.request import MAX_ALTERNATIVES, OutputOptions, Request, SamplingParams, ServiceClass, StopRules
from tandem.v1 import inference_pb2 as pb

__all__ = ["ValidRequest", "validate", "validate_request_id"]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_TEMPERATURE = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MIN_REPETITION_PENALTY = 0.01  # below, logits outgrow fp32 and mean nothing
MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_ANSWERS = 16
MAX_CHOICES = 256
MAX_REQUEST_ID_CHARS = 128

# Odd, so that no two answers share a seed.
_SEED_STEP = 0xD1342543DE82EF95

_CLASSES = {
    pb.SERVICE_CLASS_UNSPECIFIED: ServiceClass.INTERACTIVE,
    pb.SERVICE_CLASS_INTERACTIVE: ServiceClass.INTERACTIVE,
    pb.SERVICE_CLASS_BATCH: ServiceClass.BATCH,
}


@dataclass(frozen=True, slots=True)
class ValidRequest:
    """stop_strings stay with the router, since only it has text. num_answers: to the same prompt. prompt: what the client wants
    back of it. chat_format: how answers to a chat are taken apart."""

    request: Request
    stop_strings: tuple[str, ...]
    num_answers: int = 1
    prompt: Prompt | None = None
    chat_format: ChatFormat | None = None

    def answer_request(self, index: int) -> Request:
        """Of the answer with this index. Each has a seed of its own, the first one the client's."""
        sampling = self.request.sampling
        seed = (sampling.seed + index * _SEED_STEP) % 2**64
        return replace(self.request, sampling=replace(sampling, seed=seed))


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
        # What a client sent goes back in a status, whose size is bounded: never whole.
        raise UnknownModel(f"{message.model[:64]!r} is not served here; this is {model.info.name!r}")
    if message.service_class not in _CLASSES:
        raise InvalidRequest("service_class", f"{message.service_class} is unknown")
    sampling = _sampling(message.sampling, model.info.vocab_size, draw_seed)
    output = OutputOptions(_alternatives(message, "logprobs"), _alternatives(message, "prompt_logprobs"))
    num_answers = message.n if message.HasField("n") else 1
    _require(1 <= num_answers <= MAX_ANSWERS, "n", f"must be from 1 to {MAX_ANSWERS}, not {num_answers}")
    stop_strings = _stop_strings(message)
    stop_token_ids = _stop_token_ids(message, model)
    prompt, chat_format = _prompt(message, model)
    limit = model.info.max_context_tokens
    max_new_tokens = _max_new_tokens(message, len(prompt), limit, max_new_tokens_default)
    request = Request(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        stop=StopRules(max_new_tokens, stop_token_ids, _min_new_tokens(message, max_new_tokens)),
        service_class=_CLASSES[message.service_class],
        output=output,
    )
    request = replace(request, **_grammar(message, model, chat_format))
    return ValidRequest(request, stop_strings, num_answers, _prompt_back(message, prompt, model), chat_format)


def validate_request_id(request_id: str) -> str:
    """
    Raises:
        InvalidRequest: empty, too long, or with characters that logs and metadata cannot carry.
    """
    if not 1 <= len(request_id) <= MAX_REQUEST_ID_CHARS or not all(" " <= character <= "~" for character in request_id):
        raise InvalidRequest("x-request-id", f"must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters")
    return request_id


def _sampling(sampling: pb.Sampling, vocab_size: int, draw_seed: Callable[[], int]) -> SamplingParams:
    def within(name: str, default: float, low: float, high: float) -> float:
        value: float = getattr(sampling, name) if sampling.HasField(name) else default  # type: ignore[arg-type]
        # Written so that NaN fails too.
        _require(low <= value <= high, f"sampling.{name}", f"must be from {low:g} to {high:g}, not {value:g}")
        return value

    top_p = sampling.top_p if sampling.HasField("top_p") else 1.0
    _require(0 < top_p <= 1, "sampling.top_p", f"must be above 0 and at most 1, not {top_p:g}")
    _require(sampling.top_k >= 0, "sampling.top_k", f"must be 0 (all) or more, not {sampling.top_k}")
    return SamplingParams(
        temperature=within("temperature", 0.0, 0, MAX_TEMPERATURE),
        top_p=top_p,
        top_k=sampling.top_k,
        seed=sampling.seed if sampling.HasField("seed") else draw_seed(),
        min_p=within("min_p", 0.0, 0, 1),
        presence_penalty=within("presence_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=within("frequency_penalty", 0.0, -MAX_PENALTY, MAX_PENALTY),
        repetition_penalty=within("repetition_penalty", 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
        logit_bias=_logit_bias(sampling, vocab_size),
    )


def _logit_bias(sampling: pb.Sampling, vocab_size: int) -> tuple[tuple[int, float], ...]:
    name, biases = "sampling.logit_bias", sampling.logit_bias
    _require(len(biases) <= MAX_BIASES, name, f"at most {MAX_BIASES} are allowed, not {len(biases)}")
    _check_ids(name, biases, vocab_size)
    for bias in biases.values():
        _require(-MAX_BIAS <= bias <= MAX_BIAS, name, f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, not {bias:g}")
    return tuple(sorted(biases.items()))


def _alternatives(message: pb.GenerateRequest, name: str) -> int | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    count: int = getattr(message, name)
    _require(0 <= count <= MAX_ALTERNATIVES, name, f"must be from 0 to {MAX_ALTERNATIVES}, not {count}")
    return count


def _prompt_back(message: pb.GenerateRequest, prompt: tuple[int, ...], model: ServedModel) -> Prompt | None:
    if not message.echo:
        return Prompt(prompt, "") if message.HasField("prompt_logprobs") else None
    return Prompt(prompt, message.text if message.WhichOneof("prompt") == "text" else model.tokenizer.decode(prompt))


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


def _prompt(message: pb.GenerateRequest, model: ServedModel) -> tuple[tuple[int, ...], ChatFormat | None]:
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "is missing; set one of text, token_ids and chat")
    ids: Sequence[int]
    chat_format = None
    longest = model.info.max_context_tokens - 1
    if kind == "text":
        ids = model.tokenizer.encode(message.text, longest) if message.text else []
    elif kind == "token_ids":
        ids = message.token_ids.ids  # not copied before its length is known
    else:
        chat = encode_conversation(message.chat, model, longest)
        ids, chat_format = chat.token_ids, chat.form
    if not ids:
        raise InvalidRequest(kind, "is empty; at least one token is needed")
    if len(ids) > longest:
        raise InvalidRequest(
            kind, f"the prompt has at least {len(ids)} tokens; with one token of answer at most {longest} fit the context"
        )
    _check_ids(kind, ids, model.info.vocab_size)
    return tuple(ids), chat_format


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


def _grammar(message: pb.GenerateRequest, model: ServedModel, chat_format: ChatFormat | None) -> dict[str, Any]:
    """What of the request says how the answer is bound; checked by the compiler itself."""
    kind = message.WhichOneof("constraint")
    if kind is None or (kind == "json_object" and not message.json_object):
        return {}
    _require(not message.ignore_eos, "ignore_eos", f"cannot be set beside {kind}: the answer ends where that does")
    _require(not message.min_new_tokens, "min_new_tokens", f"cannot be set beside {kind}: the answer ends where that does")
    if kind == "choice":
        texts = message.choice.texts
        _require(1 <= len(texts) <= MAX_CHOICES, kind, f"must have 1 to {MAX_CHOICES} texts, not {len(texts)}")
        _require(all(texts), kind, "has an empty text")
        grammar = grammar_of_choices(texts)
    elif kind == "regex":
        grammar = grammar_of_regex(message.regex)
    else:
        grammar = grammar_of_schema(_schema(message.json_schema) if kind == "json_schema" else '{"type": "object"}')
    check_grammar(grammar, kind)
    reasons = chat_format is not None and chat_format.begins_in_reasoning
    return {"grammar": grammar, "grammar_after": tuple(model.tokenizer.encode("</think>")) if reasons else ()}


def _schema(text: str) -> str:
    _require(isinstance(parse_json(text, "json_schema"), dict | bool), "json_schema", "must be a JSON object")
    return text


def _min_new_tokens(message: pb.GenerateRequest, max_new_tokens: int) -> int:
    wanted = message.min_new_tokens
    _require(wanted >= 0, "min_new_tokens", f"must be 0 or more, not {wanted}")
    _require(
        wanted <= max_new_tokens, "min_new_tokens", f"{wanted} is more than the {max_new_tokens} tokens of the longest answer"
    )
    return wanted


def _check_ids(field: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"token id {token_id} is outside 0 … {vocab_size - 1}")


def _require(condition: bool, field: str, reason: str) -> None:
    if not condition:
        raise InvalidRequest(field, reason)

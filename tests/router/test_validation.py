"""A request that cannot be served is refused with the name of the field to change."""

import math

import pytest

from router.model import ServedModel
from router.validation import validate, validate_request_id
from tandem.errors import InvalidRequest
from tandem.request import Request, SamplingParams, ServiceClass
from tandem.v1 import inference_pb2 as pb
from tests.router.tools import EOS, MODEL, SERVED, ByteTokenizer, prompt

LIMIT = MODEL.max_context_tokens


def check(message: pb.GenerateRequest, model: ServedModel = SERVED) -> Request:
    return validate(message, "r", model, 128, draw_seed=lambda: 77).request


def sampled(**fields: float) -> pb.GenerateRequest:
    return prompt(sampling=pb.Sampling(**fields))


def tokens(*ids: int, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), **fields)


def chat(*roles: str, **fields: str) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content="x") for role in roles]
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=messages, **fields))


REFUSED = {
    "no prompt": (pb.GenerateRequest(), "prompt"),
    "empty text": (prompt(""), "text"),
    "no token": (tokens(), "token_ids"),
    "negative token": (tokens(1, -1), "token_ids"),
    "token beyond the vocabulary": (tokens(1, 256), "token_ids"),
    "no messages": (chat(), "chat"),
    "unknown role": (chat("user", "boss"), r"chat\.messages\[1\]\.role"),
    "template refuses": (
        pb.GenerateRequest(chat=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="never")])),
        "chat",
    ),
    "tools that are no JSON": (chat("user", tools="["), r"chat\.tools"),
    "tools without a function": (chat("user", tools='[{"type": "function"}]'), r"chat\.tools\[0\]"),
    "options that are no object": (chat("user", template_options="[]"), r"chat\.template_options"),
    "arguments that are no object": (
        pb.GenerateRequest(
            chat=pb.ChatMessages(messages=[pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(arguments="3")])])
        ),
        r"chat\.messages\[0\]\.tool_calls\[0\]\.arguments",
    ),
    "text beyond the context": (prompt("x" * LIMIT), "text"),
    "tokens beyond the context": (tokens(*[1] * LIMIT), "token_ids"),
    "no new tokens": (prompt(max_new_tokens=0), "max_new_tokens"),
    "negative new tokens": (prompt(max_new_tokens=-5), "max_new_tokens"),
    "one token too many": (prompt("x" * 12, max_new_tokens=LIMIT - 11), "max_new_tokens"),
    "as many as an int holds": (prompt(max_new_tokens=2**31 - 1), "max_new_tokens"),
    "temperature NaN": (sampled(temperature=math.nan), r"sampling\.temperature"),
    "temperature infinite": (sampled(temperature=math.inf), r"sampling\.temperature"),
    "temperature negative": (sampled(temperature=-0.1), r"sampling\.temperature"),
    "temperature too high": (sampled(temperature=100.5), r"sampling\.temperature"),
    "top_p zero": (sampled(top_p=0), r"sampling\.top_p"),
    "top_p above one": (sampled(top_p=1.01), r"sampling\.top_p"),
    "top_p NaN": (sampled(top_p=math.nan), r"sampling\.top_p"),
    "top_k negative": (sampled(top_k=-1), r"sampling\.top_k"),
    "min_p above one": (sampled(min_p=1.01), r"sampling\.min_p"),
    "min_p NaN": (sampled(min_p=math.nan), r"sampling\.min_p"),
    "presence_penalty too high": (sampled(presence_penalty=2.1), r"sampling\.presence_penalty"),
    "frequency_penalty NaN": (sampled(frequency_penalty=math.nan), r"sampling\.frequency_penalty"),
    "repetition_penalty zero": (sampled(repetition_penalty=0), r"sampling\.repetition_penalty"),
    "repetition_penalty that leaves no number": (sampled(repetition_penalty=1e-40), r"sampling\.repetition_penalty"),
    "repetition_penalty too high": (sampled(repetition_penalty=11), r"sampling\.repetition_penalty"),
    "bias of no token": (prompt(sampling=pb.Sampling(logit_bias={256: 1.0})), r"sampling\.logit_bias"),
    "bias too high": (prompt(sampling=pb.Sampling(logit_bias={1: 101.0})), r"sampling\.logit_bias"),
    "bias NaN": (prompt(sampling=pb.Sampling(logit_bias={1: math.nan})), r"sampling\.logit_bias"),
    "no answers": (prompt(n=0), "n"),
    "too many answers": (prompt(n=17), "n"),
    "too many alternatives": (prompt(logprobs=21), "logprobs"),
    "negative alternatives": (prompt(prompt_logprobs=-1), "prompt_logprobs"),
    "negative least length": (prompt(min_new_tokens=-1), "min_new_tokens"),
    "least length above the longest": (prompt(min_new_tokens=5, max_new_tokens=4), "min_new_tokens"),
    "schema that is no JSON": (prompt(json_schema="{"), "json_schema"),
    "schema that is a list": (prompt(json_schema="[]"), "json_schema"),
    "schema of an unknown type": (prompt(json_schema='{"type": "nonsense"}'), "json_schema"),
    "schema that is too large": (prompt(json_schema='{"const": "' + "x" * 300_000 + '"}'), "json_schema"),
    "regex that is none": (prompt(regex="(ab|"), "regex"),
    "no choice": (prompt(choice=pb.Choices()), "choice"),
    "empty choice": (prompt(choice=pb.Choices(texts=["a", ""])), "choice"),
    "too many choices": (prompt(choice=pb.Choices(texts=["a"] * 257)), "choice"),
    "endless beside a schema": (prompt(json_object=True, ignore_eos=True), "ignore_eos"),
    "least length beside a schema": (prompt(json_object=True, min_new_tokens=1), "min_new_tokens"),
    "unknown model": (prompt(model="other"), "model"),
    "unknown class": (prompt(service_class=9), "service_class"),
    "too many stops": (prompt(stop=["x"] * 17), "stop"),
    "empty stop": (prompt(stop=["ok", ""]), "stop"),
    "long stop": (prompt(stop=["x" * 257]), "stop"),
    "too many stop tokens": (prompt(stop_token_ids=[1] * 65), "stop_token_ids"),
    "stop token beyond the vocabulary": (prompt(stop_token_ids=[256]), "stop_token_ids"),
}


@pytest.mark.parametrize(("message", "field"), REFUSED.values(), ids=REFUSED)
def test_a_bad_request_is_refused_by_field(message: pb.GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^{field}: "):
        check(message)


def test_defaults() -> None:
    request = check(prompt("hi"))
    assert request.prompt == (ord("h"), ord("i"))
    assert request.sampling == SamplingParams(0.0, 1.0, 0, 77)
    assert request.stop.max_new_tokens == 128
    assert request.stop.stop_token_ids == {EOS}
    assert request.service_class is ServiceClass.INTERACTIVE


@pytest.mark.parametrize(
    "message", [prompt(model="bytes"), sampled(temperature=100, top_p=1, top_k=10_000), sampled(temperature=0)]
)
def test_what_is_allowed_passes(message: pb.GenerateRequest) -> None:
    check(message)


def test_the_default_length_is_what_fits() -> None:
    assert check(prompt("x" * (LIMIT - 3))).stop.max_new_tokens == 3
    assert check(prompt("x" * (LIMIT - 1))).stop.max_new_tokens == 1


def test_an_answer_may_fill_the_context_exactly() -> None:
    assert check(prompt("x" * 12, max_new_tokens=LIMIT - 12)).max_total_tokens == LIMIT - 1


def test_a_given_seed_is_kept_even_zero() -> None:
    assert check(sampled(seed=0)).sampling.seed == 0
    assert check(sampled(seed=2**64 - 1)).sampling.seed == 2**64 - 1


def test_end_tokens_of_model_and_client_are_merged_or_the_models_ignored() -> None:
    assert check(prompt(stop_token_ids=[5])).stop.stop_token_ids == {EOS, 5}
    assert check(prompt(stop_token_ids=[5], ignore_eos=True)).stop.stop_token_ids == {5}


def test_end_tokens_that_the_model_cannot_say_are_dropped() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset({EOS, 9_999})  # type: ignore[misc]
    assert check(prompt(), ServedModel(MODEL, tokenizer)).stop.stop_token_ids == {EOS}


def test_each_answer_has_its_own_seed_and_the_first_the_clients() -> None:
    valid = validate(prompt(n=16, sampling=pb.Sampling(seed=2**64 - 1)), "r", SERVED, 128, draw_seed=lambda: 77)
    seeds = [valid.answer_request(index).sampling.seed for index in range(valid.num_answers)]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 16


def test_a_constraint_becomes_a_grammar_that_waits_for_the_end_of_reasoning() -> None:
    assert check(prompt()).grammar == check(prompt(json_object=False)).grammar == ""
    assert "yes" in check(prompt(choice=pb.Choices(texts=["yes"]))).grammar
    reasoning = chat("user", template_options='{"thinking": true}')
    reasoning.regex = "a+"
    assert check(reasoning).grammar_after == tuple(b"</think>")
    plain = chat("user")
    plain.regex = "a+"
    assert check(plain).grammar_after == ()


def test_batch_is_batch() -> None:
    assert check(prompt(service_class=pb.SERVICE_CLASS_BATCH)).service_class is ServiceClass.BATCH


@pytest.mark.parametrize("request_id", ["", "x" * 129, "a\nb", "ä", "\x7f"])
def test_a_request_id_that_logs_cannot_carry_is_refused(request_id: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^x-request-id: "):
        validate_request_id(request_id)


def test_a_plain_request_id_is_kept() -> None:
    assert validate_request_id("a b-1/~") == "a b-1/~"


def test_a_long_model_name_does_not_come_back_whole() -> None:
    with pytest.raises(InvalidRequest) as refused:
        check(pb.GenerateRequest(model="m" * 200_000, text="a"))
    assert len(str(refused.value)) < 300

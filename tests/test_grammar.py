"""Answers follow their grammar to its end, on one worker or several, and what cannot be compiled is refused with the reason."""

import json
import time
from pathlib import Path

import pytest
import torch

from tandem.colocated import ColocatedEngine
from tandem.config import CacheConfig
from tandem.errors import InvalidRequest
from tandem.grammar import Grammars, check_grammar, grammar_of_choices, grammar_of_regex, grammar_of_schema
from tandem.model.load import LoadedModel, load_model
from tandem.request import Request, SamplingParams, StopRules
from tandem.tokenizer import Tokenizer
from tests.local_cluster import RANDOM

EOS = frozenset({256, 258})
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "maximum": 99}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
SCHEMAS = {
    "schema": grammar_of_schema(SCHEMA),
    "regex": grammar_of_regex("[a-c]{3}-[0-9]+x"),
    "choice": grammar_of_choices(["yes", "no"]),
}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model(RANDOM)


@pytest.fixture(scope="module")
def grammars(loaded: LoadedModel) -> Grammars:
    return Grammars(lambda: Tokenizer.load(loaded.folder), lambda: loaded.config.vocab_size)


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> ColocatedEngine:
    return ColocatedEngine(loaded, CacheConfig(block_size_tokens=16), chunk_tokens=64, max_batch=4)


def request(grammar: str, generated: tuple[int, ...] = (), **sampling: float) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request("r", tuple(b"say it: "), params, StopRules(120, EOS), generated=generated, grammar=grammar)


def check(kind: str, text: str) -> None:
    if kind == "schema":
        data = json.loads(text)
        assert set(data) == {"name", "n"}
        assert len(data["name"]) <= 8
        assert data["n"] <= 99
    elif kind == "regex":
        head, tail = text.split("-")
        assert set(head) <= set("abc")
        assert tail[:-1].isdigit()
        assert tail[-1] == "x"
    else:
        assert text in ("yes", "no")


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_answer_follows_to_its_end_beside_free_ones(engine: ColocatedEngine, kind: str, temperature: float) -> None:
    bound = request(SCHEMAS[kind], temperature=temperature, seed=3)
    free = request("", temperature=1.0, seed=4)
    answer = engine.generate([bound, free])[0]
    assert answer == engine.generate([bound])[0]
    assert answer[-1] in EOS or len(answer) == 120
    if answer[-1] in EOS:
        check(kind, bytes(answer[:-1]).decode())


def test_a_resumed_answer_goes_on_where_it_was(engine: ColocatedEngine) -> None:
    whole = engine.generate([request(SCHEMAS["schema"], temperature=1.0, seed=9)])[0]
    for cut in (1, len(whole) // 2, len(whole) - 1):
        rest = engine.generate([request(SCHEMAS["schema"], tuple(whole[:cut]), temperature=1.0, seed=9)])[0]
        assert whole[:cut] + rest == whole


def test_the_grammar_begins_after_the_reasoning(grammars: Grammars) -> None:
    wanted = Request("r", (1,), SamplingParams(), StopRules(9, EOS), grammar=SCHEMAS["choice"], grammar_after=(7, 7, 8))
    state = grammars.start(wanted)
    assert state is not None
    for token in (7, 7, 7, 8):
        assert state.allowed_V() is None
        state.append(token)
    allowed = state.allowed_V()
    assert allowed is not None
    assert set(torch.nonzero(allowed).flatten().tolist()) == {ord("y"), ord("n")}


def test_only_an_end_token_follows_a_complete_answer(grammars: Grammars) -> None:
    state = grammars.start(request(SCHEMAS["choice"], tuple(b"no")))
    assert state is not None
    allowed = state.allowed_V()
    assert allowed is not None
    assert set(torch.nonzero(allowed).flatten().tolist()) == EOS


def test_states_of_one_grammar_do_not_mix(grammars: Grammars) -> None:
    one, two = (grammars.start(request(SCHEMAS["choice"])) for _ in range(2))
    assert one is not None
    assert two is not None
    one.append(ord("y"))
    allowed = two.allowed_V()
    assert allowed is not None
    assert allowed[ord("n")]


@pytest.mark.parametrize(
    "grammar",
    [grammar_of_schema('{"type": "nonsense"}'), grammar_of_regex("(ab|"), grammar_of_regex("(?=x)y"), "{", "start: nope"],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(grammar: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^regex: cannot be compiled: .+"):
        check_grammar(grammar, "regex")


@pytest.mark.parametrize("regex", ["((a{1000}){1000}){1000}", "(a{1000}){1000}"])
def test_a_grammar_that_could_not_be_followed_is_refused_quickly(regex: str) -> None:
    begin_s = time.process_time()
    with pytest.raises(InvalidRequest, match=r"^regex: is too complex: .+"):
        check_grammar(grammar_of_regex(regex), "regex")
    assert time.process_time() - begin_s < 1.0


def test_reasons_of_the_compiler_are_one_line() -> None:
    with pytest.raises(InvalidRequest) as error:
        check_grammar(grammar_of_regex("(ab|"), "regex")
    assert "\n" not in str(error.value)
    assert "unclosed group" in str(error.value)


def test_an_answer_whose_grammar_comes_to_its_limits_fails_and_does_not_go_on_unbound(grammars: Grammars) -> None:
    state = grammars.start(request(grammar_of_regex("(a{1000}){1000}")))
    assert state is not None
    state.allowed_V()
    state.append(ord("a"))
    with pytest.raises(InvalidRequest, match=r"^grammar: is too complex to go on: .+"):
        state.allowed_V()


@pytest.mark.parametrize("texts", [["a"], ["\n\t\"quoted\" \\ 'x'", "🤝 ünï"], ["/x/", "#", "%"]])
def test_any_text_can_be_a_choice(texts: list[str], grammars: Grammars) -> None:
    grammar = grammar_of_choices(texts)
    check_grammar(grammar, "choice")
    for text in texts:
        state = grammars.start(request(grammar))
        assert state is not None
        for byte in text.encode():
            allowed = state.allowed_V()
            assert allowed is not None
            assert allowed[byte]
            state.append(byte)


def test_nothing_is_read_until_somebody_asks(tmp_path: Path) -> None:
    grammars = Grammars(lambda: Tokenizer.load(tmp_path), lambda: 5)
    assert grammars.start(request("")) is None


def test_a_schema_that_nothing_fits_is_refused_in_words_of_ours() -> None:
    with pytest.raises(InvalidRequest, match=r"^json_schema: no answer fits it$"):
        check_grammar(grammar_of_schema('{"$ref": "#"}'), "json_schema")

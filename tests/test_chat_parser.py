"""Reasoning, content and tool calls come apart the same however the text is cut, and nothing of it is lost."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.chat_parser import ChatFormat, ChatParser, ChatParts, ToolCall

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
PARAMETERS = "<parameter=city>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>"
XML = f"<tool_call>\n<function=weather>\n{PARAMETERS}\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>'
BOTH = ChatFormat(reasoning=True, tools=TOOLS)


def parse(text: str, form: ChatFormat, cuts: tuple[int, ...] = ()) -> ChatParts:
    parser, whole = ChatParser(form), ChatParts()
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    for parts in (*(parser.push(text[a:b]) for a, b in itertools.pairwise(edges)), parser.flush()):
        whole.content += parts.content
        whole.reasoning += parts.reasoning
        whole.tool_calls += parts.tool_calls
    return whole


CASES = {
    "plain": ("hi there", BOTH, ChatParts("hi there")),
    "reasoning": ("<think>\nhm\n</think>\n\nhi", BOTH, ChatParts("hi", "hm")),
    "begun by the prompt": ("hm\nso\n</think>\n\nhi", ChatFormat(True, True), ChatParts("hi", "hm\nso")),
    "empty reasoning": ("<think>\n\n</think>\n\nhi", BOTH, ChatParts("hi")),
    "reasoning without end": ("<think>\nhm <", BOTH, ChatParts("", "hm <")),
    "no reasoning asked for": ("<think>x</think>y", ChatFormat(), ChatParts("<think>x</think>y")),
    "almost a mark": ("<thin", BOTH, ChatParts("<thin")),
    "a call in XML": (XML, BOTH, ChatParts(tool_calls=[ToolCall("weather", '{"city": "12", "days": 3}')])),
    "a call in JSON": (JSON, BOTH, ChatParts(tool_calls=[ToolCall("weather", '{"city": "Köln", "days": 2}')])),
    "all": (
        f"<think>\na\n</think>\n\nlook:\n\n{XML}\n{JSON}",
        BOTH,
        ChatParts(
            "look:", "a", [ToolCall("weather", '{"city": "12", "days": 3}'), ToolCall("weather", '{"city": "Köln", "days": 2}')]
        ),
    ),
    "a call that is none": ("<tool_call>what?</tool_call>!", BOTH, ChatParts("<tool_call>what?</tool_call>!")),
    "a call cut off": ("a<tool_call>\n<function=weather>\n<para", BOTH, ChatParts("a", "", [ToolCall("weather", "{}")])),
    "JSON cut off": ('a<tool_call>{"na', BOTH, ChatParts('a<tool_call>{"na')),
    "no tools, no calls": (JSON, ChatFormat(True), ChatParts(JSON)),
    "newlines stay inside": ("a\n\nb\n", BOTH, ChatParts("a\n\nb\n")),
}


def called_with(schema: object, text: str) -> object:
    """What a parameter of this schema becomes."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": schema}}}}
    call = f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>"
    (parsed,) = parse(call, ChatFormat(tools=[tool])).tool_calls
    return json.loads(parsed.arguments, parse_constant=pytest.fail)["x"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "12", 12),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "[1]", "[1]"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"type": "number"}, "2", 2),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "object"}, '{"a": [1, "é"]}', {"a": [1, "é"]}),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "integer"}, "no number", "no number"),
        ({}, "12", 12),
        (None, "a\n\nb\n", "a\n\nb\n"),
        ({"type": 5, "anyOf": 7, "oneOf": [3], "enum": "x"}, "12", 12),
    ],
)
def test_a_parameter_is_what_its_schema_says_it_spells(schema: object, text: str, value: object) -> None:
    assert called_with(schema, text) == value


@pytest.mark.parametrize("arguments", ['"no object"', "[1]", '{"a": NaN}', "7", '"[]"'])
def test_arguments_that_are_no_json_object_stay_text(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parse(text, BOTH) == ChatParts(text)


def test_half_a_surrogate_pair_in_a_call_can_still_be_sent() -> None:
    (call,) = parse('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', BOTH).tool_calls
    assert json.loads(call.arguments.encode()) == {"a": "\ud800"}
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert parse(text, BOTH) == ChatParts(text)


@pytest.mark.parametrize(("text", "form", "expected"), CASES.values(), ids=CASES)
def test_each_part_finds_its_field(text: str, form: ChatFormat, expected: ChatParts) -> None:
    assert parse(text, form) == expected


@given(st.sampled_from(list(CASES.values())), st.lists(st.integers(0, 400), max_size=30).map(tuple))
def test_cuts_change_nothing(case: tuple[str, ChatFormat, ChatParts], cuts: tuple[int, ...]) -> None:
    text, form, expected = case
    assert parse(text, form, cuts) == expected


MARKS = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "\n", "{", "a", "<function=x>", " "])


@given(st.lists(MARKS, max_size=20).map("".join), st.lists(st.integers(0, 400), max_size=9).map(tuple), st.booleans())
def test_any_text_is_taken_without_error_and_alike_however_cut(text: str, cuts: tuple[int, ...], begins: bool) -> None:
    form = ChatFormat(True, begins, TOOLS)
    assert parse(text, form, cuts) == parse(text, form)
    for call in parse(text, form).tool_calls:
        json.loads(call.arguments)


def test_what_is_no_mark_comes_at_once() -> None:
    parser = ChatParser(BOTH)
    assert parser.push("hello").content == "hello"
    assert parser.push(" wor<").content == " wor"
    assert parser.push("ld").content == "<ld"

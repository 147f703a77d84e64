"""Conversations in the forms of the Qwen3 family: what a template renders, an answer in that form is taken apart into again.

The templates here are written for these tests; they lay a conversation out as the checkpoints' own do:

- Qwen3: calls are JSON; the model opens `<think>` itself, and `enable_thinking=False` puts an empty pair into the prompt;
- Qwen3.5: calls are `<function=…>`; the prompt opens `<think>`, or with `enable_thinking=False` has an empty pair;
- both: reasoning of turns before the user's last question is dropped; tools' answers stand together in a turn of the user's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tandem.chat_parser import ChatParser, ChatParts, ToolCall
from tandem.tokenizer import ChatPrompt, Tokenizer
from tests.test_tokenizer import byte_level

Message = dict[str, Any]

_TOP = """
{%- set at = namespace(question=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set at.question = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' + tool | tojson }}{% endfor %}
    {{- '\n</tools>' }}
    {%- if messages[0].role == 'system' %}{{- '\n\n' + messages[0].content | trim }}{% endif %}
    {{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content | trim + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}
    {%- elif m.role == 'user' %}
        {{- '<|im_start|>user\n' + m.content | trim + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > at.question and KEEPS_REASONING %}
            {{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content | trim }}
        {%- for call in m.tool_calls or [] %}
            {{- SEPARATOR }}
"""
_BOTTOM = """
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking else OPENING }}
{%- endif %}
"""
_JSON_CALL = """
            {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
"""
_XML_CALL = """
            {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\n' + (value if value is string else value | tojson) + '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
"""


def template(call: str, keeps_reasoning: str, separator: str, opening: str) -> str:
    text = _TOP + call + _BOTTOM
    for name, value in (("KEEPS_REASONING", keeps_reasoning), ("SEPARATOR", separator), ("OPENING", opening)):
        text = text.replace(name, value)
    return text


QWEN3 = template(_JSON_CALL, "(loop.last or m.reasoning_content)", "'\n' if m.content or not loop.first else ''", "''")
QWEN3_5 = template(_XML_CALL, "true", "('\n\n' if m.content else '') if loop.first else '\n'", "'<think>\n'")
TEMPLATES = {"Qwen3": QWEN3, "Qwen3.5": QWEN3_5}

TOOLS: list[Message] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "exact": {"type": "boolean"},
                    "unit": {"type": ["string", "null"]},
                    "place": {"type": "object"},
                    "hours": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
ASK: Message = {"role": "user", "content": "How is the weather in Köln?"}


def call(name: str, **arguments: Any) -> Message:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str = "", reasoning: str = "", *calls: Message) -> Message:
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": list(calls)} if calls else message


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Marks are tokens of their own, those of a turn special, as the family's tokenizers have them."""
    made = {}
    for name, text in TEMPLATES.items():
        folder = tmp_path_factory.mktemp("qwen")
        backend = byte_level()
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
        backend.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
        made[name] = Tokenizer.load(folder)
    return made


@pytest.fixture(params=list(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


def shown(tokenizer: Tokenizer, prompt: ChatPrompt) -> str:
    return b"".join(map(tokenizer.token_bytes, prompt.token_ids)).decode()


def rendered(tokenizer: Tokenizer, messages: list[Message], **options: Any) -> str:
    return shown(tokenizer, tokenizer.encode_chat(messages, TOOLS, options))


def taken_apart(tokenizer: Tokenizer, messages: list[Message], **options: Any) -> ChatParts:
    """The last message as the model would write it after the others, token by token, and read as an answer is."""
    prompt = tokenizer.encode_chat(messages[:-1], TOOLS, options)
    whole = tokenizer.encode_chat(messages, TOOLS, {**options, "add_generation_prompt": False})
    num_prompt = len(prompt.token_ids)
    assert whole.token_ids[:num_prompt] == prompt.token_ids
    written = whole.token_ids[num_prompt:]
    end = next(place for place, token in enumerate(written) if token in tokenizer.eos_ids)
    detokenizer, parser, parts = tokenizer.detokenizer(), ChatParser(prompt.form), ChatParts()
    pieces = [detokenizer.push((token,)) for token in written[:end]] + [detokenizer.flush()]
    for piece in [*map(parser.push, pieces), parser.flush()]:
        parts.content += piece.content
        parts.reasoning += piece.reasoning
        parts.tool_calls += piece.tool_calls
    return parts


def expected(message: Message) -> ChatParts:
    calls = [each["function"] for each in message.get("tool_calls", ())]
    return ChatParts(
        message["content"],
        message.get("reasoning_content", ""),
        [ToolCall(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in calls],
    )


SEVERAL = answer(
    "I look.",
    "Two things to know.\n\nFirst the time.",
    call("now"),
    call("weather", city="12", days=3, exact=True, unit=None, place={"lat": 50.9, "names": ["Köln", "Cologne"]}, hours=[6, 18]),
)


@pytest.mark.parametrize(
    "last",
    [
        answer("Fine."),
        answer("Fine.", "Let me think.\n\nHm."),
        answer("", "", call("weather", city="Köln", days=2)),
        answer("", "I should ask.", call("now")),
        answer("First\n\nthis", "", call("weather", city="two\nlines\n\nand a third", unit="12")),
        SEVERAL,
    ],
    ids=["content", "reasoning", "a call", "reasoning and a call", "content and a call", "all of them"],
)
def test_an_answer_comes_apart_into_what_it_was_made_of(tokenizer: Tokenizer, last: Message) -> None:
    assert taken_apart(tokenizer, [{"role": "system", "content": "be brief"}, ASK, last]) == expected(last)


@pytest.mark.parametrize(
    "last", [answer("Fine."), answer("Look:", "", call("now"), call("weather", city="x"))], ids=["text", "calls"]
)
def test_without_thinking_the_prompt_closes_it_and_the_answer_has_none(tokenizer: Tokenizer, last: Message) -> None:
    prompt = tokenizer.encode_chat([ASK], TOOLS, {"enable_thinking": False})
    assert shown(tokenizer, prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not prompt.form.begins_in_reasoning
    assert taken_apart(tokenizer, [ASK, last], enable_thinking=False) == expected(last)


def test_who_opens_the_reasoning_is_the_templates_choice(tokenizers: dict[str, Tokenizer]) -> None:
    assert not tokenizers["Qwen3"].encode_chat([ASK]).form.begins_in_reasoning
    assert tokenizers["Qwen3.5"].encode_chat([ASK]).form.begins_in_reasoning


def test_reasoning_of_earlier_turns_is_dropped_and_that_of_this_turns_calls_kept(tokenizer: Tokenizer) -> None:
    tool = {"role": "tool", "tool_call_id": "1", "content": "rain"}
    turn = [ASK, SEVERAL, tool, {**tool, "content": "12:00"}]
    during = rendered(tokenizer, turn)
    assert "First the time." in during
    assert (
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\n12:00\n</tool_response><|im_end|>\n"
        in during
    )
    after = rendered(tokenizer, [*turn, answer("It rains.", "That is clear."), {"role": "user", "content": "And now?"}])
    assert "First the time." not in after
    assert "That is clear." not in after
    assert "It rains." in after
    assert after.count("<tool_call>") == 2


def test_a_conversation_goes_on_where_the_answer_ended(tokenizer: Tokenizer) -> None:
    """What a client sends back is what was taken apart: the tool's answer is read by a model that sees its own call again."""
    parts = taken_apart(tokenizer, [ASK, SEVERAL])
    calls = [call(each.name, **json.loads(each.arguments)) for each in parts.tool_calls]
    again = [ASK, answer(parts.content, parts.reasoning, *calls), {"role": "tool", "content": "rain"}]
    assert rendered(tokenizer, again) == rendered(tokenizer, [ASK, SEVERAL, {"role": "tool", "content": "rain"}])


# What no text can hold without being a mark, and what templates trim away.
PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=30)
TRIMMED = PLAIN.map(str.strip)
ARGUMENTS = st.fixed_dictionaries(
    {"city": PLAIN},
    optional={
        "days": st.integers(-(2**60), 2**60),
        "exact": st.booleans(),
        "unit": st.none() | st.sampled_from(["12", "[1]", "true"]),
        "place": st.dictionaries(PLAIN, PLAIN | st.integers(0, 9) | st.none(), max_size=2),
        "hours": st.lists(st.integers(0, 23) | st.lists(PLAIN, max_size=2), max_size=3),
    },
)
CALLS = st.lists(ARGUMENTS.map(lambda arguments: call("weather", **arguments)), max_size=3)


@settings(max_examples=150, deadline=None)
@given(TRIMMED, TRIMMED, CALLS, st.sampled_from(list(TEMPLATES)), st.booleans())
def test_any_answer_comes_apart_into_what_it_was_made_of(
    tokenizers: dict[str, Tokenizer], content: str, reasoning: str, calls: list[Message], name: str, thinking: bool
) -> None:
    last = answer(content, reasoning if thinking else "", *calls)
    assert taken_apart(tokenizers[name], [ASK, last], enable_thinking=thinking) == expected(last)

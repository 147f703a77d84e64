"""Tokens come out once and in order, whatever order and cut their messages have."""

from hypothesis import given
from hypothesis import strategies as st

from router.assembly import TokenAssembler
from tandem.request import FinishReason


@given(st.integers(1, 30), st.integers(0, 5), st.data())
def test_any_order_and_any_overlap_give_each_token_once(length: int, start: int, data: st.DataObject) -> None:
    answer = list(range(100, 100 + start + length))
    spans = st.tuples(st.integers(0, len(answer) - 1), st.integers(1, 4))
    extra = data.draw(st.lists(spans, max_size=10))
    messages = data.draw(st.permutations([*((i, 1) for i in range(start, len(answer))), *extra]))
    assembler = TokenAssembler(start)
    out: list[int] = []
    for index, size in messages:
        assert assembler.finish_reason is None or out == answer[start:]
        tokens = answer[index : index + size]
        ends = index + len(tokens) == len(answer)
        out += assembler.add(index, tokens, FinishReason.STOP if ends else None)
    assert out == answer[start:]
    assert assembler.finish_reason is FinishReason.STOP


def test_an_end_that_comes_early_waits_for_the_gap() -> None:
    assembler = TokenAssembler(0)
    assert assembler.add(1, [11, 12], FinishReason.LENGTH) == []
    assert assembler.finish_reason is None
    assert assembler.add(0, [10]) == [10, 11, 12]
    assert assembler.finish_reason is FinishReason.LENGTH


def test_tokens_behind_the_end_are_dropped() -> None:
    assembler = TokenAssembler(0)
    assert assembler.add(0, [10], FinishReason.STOP) == [10]
    assert assembler.add(1, [11]) == []

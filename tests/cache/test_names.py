"""Names of prefixes: a chain, however it is computed."""

from hypothesis import given
from hypothesis import strategies as st

from tandem.cache.names import Prefix, child_name, child_names, root_name, short

BLOCK = 3
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(TOKENS)
def test_a_name_is_that_of_the_blocks_before_followed_by_its_own_tokens(tokens: list[int]) -> None:
    prefix = Prefix.of("model", BLOCK, tokens)
    names, name = [], root_name("model", BLOCK)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        name = child_name(name, tokens[start : start + BLOCK])
        names.append(name)
    assert list(prefix.names) == names
    assert prefix.shorts == tuple(short(prefix.name_of(count)) for count in range(len(names) + 1))


@given(TOKENS, st.data())
def test_names_of_several_lengths_are_those_of_each(tokens: list[int], data: st.DataObject) -> None:
    lengths = sorted(data.draw(st.sets(st.integers(0, len(tokens)))))
    parent = root_name("model", BLOCK)
    assert list(child_names(parent, tokens, lengths)) == [(length, child_name(parent, tokens[:length])) for length in lengths]

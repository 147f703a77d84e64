"""Two workers that would mean different things by the same bytes, or hold different lengths, are not paired."""

import pytest

from tandem.description import check_same_model
from tandem.errors import PeerRefused
from tandem.v1 import worker_pb2 as pb

OURS = pb.ModelIdentity(
    name="m", fingerprint="f1", max_context_tokens=8192, block_size_tokens=32, vocab_size=1000, tokenizer_path="/here"
)


@pytest.mark.parametrize(
    ("field", "value"), [("fingerprint", "f2"), ("block_size_tokens", 16), ("max_context_tokens", 4096), ("vocab_size", 999)]
)
def test_the_first_difference_is_named_with_both_values(field: str, value: str | int) -> None:
    theirs = pb.ModelIdentity()
    theirs.CopyFrom(OURS)
    setattr(theirs, field, value)
    with pytest.raises(PeerRefused, match=f"{field} differs: {getattr(OURS, field)} here, {value} at the peer"):
        check_same_model(OURS, theirs)


def test_names_and_folders_may_differ_between_machines() -> None:
    theirs = pb.ModelIdentity()
    theirs.CopyFrom(OURS)
    theirs.name, theirs.tokenizer_path = "another", "/there"
    check_same_model(OURS, theirs)

"""A router finds the tokenizer where the workers' folder is not."""

import pytest

from router.tokenizers import tokenizer_loader
from tandem.errors import CheckpointError
from tandem.model.embedded import embedded_checkpoint
from tandem.model.random_checkpoint import random_checkpoint
from tandem.tokenizer import Tokenizer


def test_the_workers_folder_comes_first() -> None:
    assert tokenizer_loader("nowhere/at-all")(str(random_checkpoint())).encode("a") == [97]


def test_a_folder_of_the_routers_own_stands_in() -> None:
    assert tokenizer_loader(str(random_checkpoint()))("/not/here").encode("a") == [97]


def test_no_name_is_the_embedded_models_tokenizer() -> None:
    tokenizer = tokenizer_loader("")("/not/here")
    assert tokenizer.encode("Anna has") == Tokenizer.load(embedded_checkpoint()).encode("Anna has")


def test_what_the_hub_cannot_give_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*arguments: object, **options: object) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr("router.tokenizers.snapshot_download", no_hub)
    with pytest.raises(CheckpointError, match="the tokenizer of a/b is neither here nor to be had from the hub: no route"):
        tokenizer_loader("a/b")("/not/here")

"""A router finds the tokenizer where the workers' folder is not."""

from pathlib import Path

import pytest

from router.tokenizers import tokenizer_loader
from tandem.errors import CheckpointError
from tandem.model.embedded import embedded_checkpoint


def test_the_workers_folder_comes_first() -> None:
    folder = str(embedded_checkpoint())
    assert tokenizer_loader("nowhere/at-all")(folder).encode("a") == [97]


def test_a_folder_of_the_routers_own_stands_in() -> None:
    assert tokenizer_loader(str(embedded_checkpoint()))("/not/here").encode("a") == [97]


@pytest.mark.slow
def test_the_embedded_model_is_made_where_it_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))
    assert tokenizer_loader("")("/not/here").encode("a") == [97]
    assert list(tmp_path.iterdir())


def test_what_the_hub_cannot_give_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hub(*arguments: object, **options: object) -> str:
        raise OSError("no route to the hub")

    monkeypatch.setattr("router.tokenizers.snapshot_download", no_hub)
    with pytest.raises(CheckpointError, match="the tokenizer of a/b is neither here nor to be had from the hub: no route"):
        tokenizer_loader("a/b")("/not/here")

from __future__ import annotations

from tandem.config import ModelSource
from tandem.model.embedded import EMBEDDED_NAME, embedded_checkpoint
from tandem.model.load import load_model


def test_an_empty_source_is_the_embedded_model() -> None:
    loaded = load_model(ModelSource())
    assert (loaded.name, loaded.folder) == (EMBEDDED_NAME, embedded_checkpoint())

"""The embedded model: what is served where no other is named. It is the random checkpoint, so its text means nothing."""

from __future__ import annotations

from pathlib import Path

from tandem.model.random_checkpoint import random_checkpoint

__all__ = ["EMBEDDED_NAME", "embedded_checkpoint"]

EMBEDDED_NAME = "tandem-embedded"


def embedded_checkpoint() -> Path:
    """The folder of the embedded model, made now if it does not exist.

    Raises:
        CheckpointError: the cache folder cannot be written.
    """
    return random_checkpoint()

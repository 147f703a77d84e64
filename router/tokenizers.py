"""Where a router finds the tokenizer of the model that workers serve.

On the workers' own host that is their folder. On another one the folder may be missing, and the router takes the same
checkpoint by the name that the workers were given.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from tandem.errors import CheckpointError, first_line
from tandem.model.embedded import embedded_checkpoint
from tandem.tokenizer import Tokenizer

__all__ = ["tokenizer_loader"]

_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer*"]  # all but the weights


def tokenizer_loader(model: str) -> Callable[[str], Tokenizer]:
    """Loads the tokenizer from the folder that a worker names, if it is here, else from `model`: a folder, a hub id, or empty
    for the embedded model. What the loader returns or raises (CheckpointError): see `Tokenizer.load`."""

    def load(folder: str) -> Tokenizer:
        return Tokenizer.load(folder if Path(folder).is_dir() else _own_folder(model))

    return load


def _own_folder(model: str) -> str:
    if not model:
        return str(embedded_checkpoint())
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser())
    try:
        return snapshot_download(model, allow_patterns=_PATTERNS)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the tokenizer of {model} is neither here nor to be had from the hub: {first_line(error)}"
        ) from error

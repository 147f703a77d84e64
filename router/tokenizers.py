"""Where a router finds the tokenizer of the model that workers serve.

On the workers' own host that is their folder. On another one the folder may be missing, and the router takes the same
checkpoint by the name that the workers were given.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from tandem.errors import CheckpointError
from tandem.tokenizer import Tokenizer

__all__ = ["tokenizer_loader"]

_PATTERNS = ["*.json", "*.jinja", "*.txt", "tokenizer*"]  # all but the weights
_EMBEDDED = "from tandem.model.embedded import embedded_checkpoint; print(embedded_checkpoint())"
_MAKE_S = 120.0


def tokenizer_loader(model: str) -> Callable[[str], Tokenizer]:
    """Loads the tokenizer from the folder that a worker names, if it is here, else from `model`: a folder, a hub id, or empty
    for the embedded model. What the loader returns or raises (CheckpointError): see `Tokenizer.load`."""

    def load(folder: str) -> Tokenizer:
        return Tokenizer.load(folder if Path(folder).is_dir() else _own_folder(model))

    return load


def _own_folder(model: str) -> str:
    if not model:
        return _make_embedded()
    if Path(model).expanduser().is_dir():
        return str(Path(model).expanduser())
    try:
        return snapshot_download(model, allow_patterns=_PATTERNS)
    except (HfHubHTTPError, OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"the tokenizer of {model} is neither here nor to be had from the hub: {reason}") from error


def _make_embedded() -> str:
    """In a process of its own: making the model takes torch, of which a router has no use afterwards."""
    try:
        done = subprocess.run([sys.executable, "-c", _EMBEDDED], capture_output=True, text=True, timeout=_MAKE_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = (said.strip().splitlines() or [type(error).__name__])[-1]
        raise CheckpointError(f"the embedded model's tokenizer could not be made: {reason}") from error
    return done.stdout.strip()

"""The embedded model: a small trained checkpoint that comes with the package, served where no other is named.

It answers questions about what the prompt tells (its model card is the README.md beside its weights), so that a first run
shows meaning cross from one worker to the other, without a download.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from tandem.errors import CheckpointError

__all__ = ["EMBEDDED_DTYPE", "EMBEDDED_NAME", "embedded_checkpoint", "verify_checksums"]

EMBEDDED_NAME = "tandem-embedded"
EMBEDDED_DTYPE = "float32"
"""What "auto" serves it in. It is stored in bf16 to be small; in fp32 an answer does not depend on how a prompt was cut."""

_FOLDER = Path(__file__).parent.parent / "embedded"
_SUMS = "SHA256SUMS"


def embedded_checkpoint() -> Path:
    """The folder of the embedded model, once each of its files was found to be what was shipped.

    Raises:
        CheckpointError: a file is missing or was changed; names it.
    """
    verify_checksums(_FOLDER)
    return _FOLDER


def verify_checksums(folder: Path) -> None:
    """Compare every file that `folder`/SHA256SUMS lists with its sum.

    Raises:
        CheckpointError: a file, or the list, is missing or was changed; names it.
    """
    advice = "install tandem again, or name another checkpoint with --model"
    try:
        for line in (folder / _SUMS).read_text(encoding="ascii").splitlines():
            expected, _, name = line.partition("  ")
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                raise CheckpointError(f"{folder / name} is not the file that tandem shipped: {advice}")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"the embedded model is not whole: {error}; {advice}") from error

"""The command line of a Python process of ours that this one starts."""

from __future__ import annotations

import sys

__all__ = ["module_command"]


def module_command(module: str, *words: str) -> list[str]:
    """`python -m module words…` with this interpreter, and without the current folder on its search path: a file of the user's
    that is named as one of ours must not run in its place."""
    return [sys.executable, "-P", "-m", module, *words]

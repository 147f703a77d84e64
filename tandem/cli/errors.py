"""How an error ends a command: one sentence on stderr and an exit code.

::

    0    done
    1    the operation failed: CheckpointError, CapacityError, Unavailable, and every other TandemError
    2    the arguments or the configuration were wrong: a plain ConfigError (argparse also exits with 2)
    130  Ctrl-C, without a word
"""

from __future__ import annotations

import sys

from tandem.errors import CapacityError, CheckpointError, ConfigError, TandemError

__all__ = ["EXIT_FAILED", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_USAGE", "exit_code", "report"]

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def exit_code(error: TandemError) -> int:
    """The exit code that `error` ends a command with."""
    if isinstance(error, ConfigError) and not isinstance(error, CheckpointError | CapacityError):
        return EXIT_USAGE
    return EXIT_FAILED


def report(error: TandemError) -> int:
    """Print the error as one line on stderr; returns the exit code."""
    print("tandem: " + " ".join(str(error).split()), file=sys.stderr)
    return exit_code(error)

"""`tandem`: picks the command and imports only that one's module, so that `tandem --help` is quick.

A command is a module with `add_parser(subparsers) -> None`, which adds a parser of the command's name, and
`run(args) -> int`, which returns the exit code and raises `TandemError` for what the user must know.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, report
from tandem.errors import TandemError

__all__ = ["COMMANDS", "Command", "build_parser", "main"]


@dataclass(frozen=True, slots=True)
class Command:
    """module: where it lives. help: its line in `tandem --help`; empty hides it."""

    module: str
    help: str


COMMANDS = {
    "up": Command("tandem.cli.up", "start a local cluster in the foreground"),
    "generate": Command("tandem.cli.generate", "stream one completion"),
    "chat": Command("tandem.cli.chat", "a conversation in the terminal"),
    "status": Command("tandem.cli.status", "pools, workers, load, leases"),
    "scale": Command("tandem.cli.scale", "change how many workers are wanted"),
    "drain": Command("tandem.cli.drain", "end one worker without breaking a stream"),
    "replace": Command("tandem.cli.replace", "replace a pool's workers one after another"),
    "verify": Command("tandem.cli.verify", "parity self-test: one process against the cluster, token for token"),
    "router": Command("tandem.cli.router", ""),
    "head": Command("tandem.cli.head", ""),
    "node": Command("tandem.cli.node", ""),
    "probe": Command("tandem.cli.probe", ""),
    "leave": Command("tandem.cli.leave", ""),
}


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """The whole parser with the details of `command` only; the other commands are names with a line of help."""
    parser = argparse.ArgumentParser(
        prog="tandem",
        description="Disaggregated serving for hybrid language models: prefill here, decode there, over NIXL.",
        epilog="`tandem COMMAND --help` shows the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, entry in COMMANDS.items():
        if name == command:
            importlib.import_module(entry.module).add_parser(subparsers)
        elif entry.help:
            subparsers.add_parser(name, help=entry.help)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors of users are one sentence, see `tandem.cli.errors`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    try:
        parser = build_parser(command)
        args = parser.parse_args(arguments)
        if args.version:
            print(f"tandem {_version()}")
            return 0
        if args.command is None:
            parser.print_help()
            return 0
        code = importlib.import_module(COMMANDS[args.command].module).run(args)
        sys.stdout.flush()
    except TandemError as error:
        return report(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away, as `head` does. Nothing more may be flushed to it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return int(code)


def _version() -> str:
    from importlib.metadata import version

    return version("tandem")


if __name__ == "__main__":
    sys.exit(main())

"""`tandem probe`: exit code 0 when the router can serve. For probes that cannot speak its TLS themselves."""

from __future__ import annotations

import argparse

from tandem.cli.client_tls import add_router_options, certificates_of
from tandem.cli.errors import EXIT_OK
from tandem.cli.health import is_serving
from tandem.errors import Unavailable

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "probe", description="Exit code 0 when the router can serve: workers of both pools are ready and connected."
    )
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    if not is_serving(args.address, certificates_of(args)):
        raise Unavailable(f"the router at {args.address} cannot serve, or none answers there")
    return EXIT_OK

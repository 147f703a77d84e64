"""`tandem leave`: asks the node of this machine to let its worker finish and to end. Kubernetes calls it before it stops a
pod."""

from __future__ import annotations

import argparse
import http.client

from tandem.cli.seconds import require_seconds
from tandem.errors import TandemError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "leave",
        description="Ask the `tandem node` of this machine to take no new work, wait until what its worker runs has finished "
        "or moved on to another worker, and end it.",
    )
    parser.add_argument("--probe-port", type=int, default=8082, metavar="PORT", help="of the node (default %(default)s)")
    parser.add_argument(
        "--timeout-s", type=float, default=360.0, metavar="S", help="how long to wait for it (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    require_seconds("--timeout-s", args.timeout_s)
    connection = http.client.HTTPConnection("127.0.0.1", args.probe_port, timeout=args.timeout_s)
    try:
        connection.request("POST", "/leave")
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TandemError(f"no `tandem node` answers on port {args.probe_port} of this machine: {reason}") from error
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise TandemError(f"the node does not leave: {text}")
    print(text)
    return 0

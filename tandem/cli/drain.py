"""`tandem drain`: end one worker without breaking a stream."""

from __future__ import annotations

import argparse

from tandem.cli.client_tls import add_router_options
from tandem.cli.operations import ask, get_status, wait_for
from tandem.errors import ConfigError
from tandem.v1 import operations_pb2

__all__ = ["add_parser", "run"]

_MORE_S = 60.0
_DEFAULT_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="end one worker without breaking a stream",
        description="The worker takes no more work, finishes what it has, and ends. What still runs after the timeout goes "
        "on elsewhere, unseen by its client. The pool keeps its size: another worker takes the place. To have fewer, scale.",
    )
    parser.add_argument("worker", metavar="WORKER", help="its id, as `tandem status` shows it")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="for what runs there (default: the cluster's drain_s, 5 min)"
    )
    parser.add_argument("--no-wait", action="store_true", help="return as soon as it has begun")
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.timeout is not None and not 0 <= args.timeout <= 86_400:
        raise ConfigError(f"--timeout must be from 0 to 86400 seconds, not {args.timeout}")
    request = operations_pb2.DrainRequest(worker_id=args.worker, timeout_s=args.timeout)
    ask(args, lambda stub: stub.Drain(request))
    if args.no_wait:
        print(f"{args.worker} drains")
        return 0
    bound_s = (_DEFAULT_S if args.timeout is None else args.timeout) + _MORE_S

    def gone(status: operations_pb2.Status) -> bool:
        return args.worker not in {worker.id for worker in status.workers}

    wait_for(args, gone, bound_s, f"draining {args.worker}")
    print(_last_word(args))
    return 0


def _last_word(args: argparse.Namespace) -> str:
    events = [event for event in get_status(args).events if event.subject == args.worker]
    told = [event.text for event in events if event.kind in ("drained", "lost")]
    return told[-1] if told else f"{args.worker} has ended"

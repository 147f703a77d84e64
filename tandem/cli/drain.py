"""`tandem drain`: end one worker, or all on one host, without breaking a stream."""

from __future__ import annotations

import argparse

from tandem.cli.client_tls import add_router_options
from tandem.cli.operations import ask, get_status, wait_for
from tandem.cli.seconds import require_seconds
from tandem.errors import ConfigError
from tandem.v1 import operations_pb2

__all__ = ["add_parser", "run"]

_MORE_S = 60.0
_DEFAULT_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "drain",
        help="end one worker, or all of a host, without breaking a stream",
        description="The worker takes no more work, finishes what it has, and ends. What still runs after the timeout goes "
        "on elsewhere, unseen by its client. The pool keeps its size: another worker takes the place. To have fewer, scale. "
        "With --node the same for all workers of a host, which gets no others until --undo.",
    )
    parser.add_argument("worker", nargs="?", default="", metavar="WORKER", help="its id, as `tandem status` shows it")
    parser.add_argument("--node", default="", metavar="HOST", help="address or name of a host, instead of a worker")
    parser.add_argument("--undo", action="store_true", help="the host of --node may have workers again")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="for what runs there (default: the cluster's drain_s, 5 min)"
    )
    parser.add_argument("--no-wait", action="store_true", help="return as soon as it has begun")
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    request = operations_pb2.DrainRequest(worker_id=args.worker, timeout_s=args.timeout, node=args.node, uncordon=args.undo)
    leaving = set(ask(args, lambda stub: stub.Drain(request)).worker_ids)
    if args.undo:
        print(f"{args.node} may have workers again")
        return 0
    if args.no_wait or not leaving:
        print(", ".join(sorted(leaving)) + " drains" if leaving else f"{args.node} has no workers, and gets none")
        return 0
    bound_s = (_DEFAULT_S if args.timeout is None else args.timeout) + _MORE_S

    def gone(status: operations_pb2.Status) -> bool:
        return not leaving & {worker.id for worker in status.workers}

    wait_for(args, gone, bound_s, f"draining {args.worker or args.node}")
    for worker_id in sorted(leaving):
        print(_last_word(args, worker_id))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError: the options do not fit together."""
    if bool(args.worker) == bool(args.node):
        raise ConfigError("name a worker, or a host with --node")
    if args.undo and not args.node:
        raise ConfigError("--undo is for --node: a worker that drains ends")
    require_seconds("--timeout", args.timeout)


def _last_word(args: argparse.Namespace, worker_id: str) -> str:
    events = [event for event in get_status(args).events if event.subject == worker_id]
    told = [event.text for event in events if event.kind in ("drained", "lost")]
    return told[-1] if told else f"{worker_id} has ended"

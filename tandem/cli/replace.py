"""`tandem replace`: a new worker in the place of every one of a pool, without breaking a stream."""

from __future__ import annotations

import argparse

from tandem.cli.client_tls import add_router_options
from tandem.cli.operations import ask, wait_for
from tandem.cli.scale import POOLS, pool_line
from tandem.cli.seconds import require_seconds
from tandem.v1 import operations_pb2

__all__ = ["add_parser", "run"]

_DEFAULT_WAIT_S = 3600.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "replace",
        help="replace a pool's workers one after another",
        description="Each worker that the pool has now is replaced by a new one, one after another: where a unit is free the "
        "new one is ready before the old one drains.",
    )
    parser.add_argument("pool", choices=POOLS)
    parser.add_argument("--no-wait", action="store_true", help="return as soon as it has begun")
    parser.add_argument(
        "--wait", type=float, default=_DEFAULT_WAIT_S, metavar="S", help="for so long at most (default %(default).0f)"
    )
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    require_seconds("--wait", args.wait)
    reply = ask(args, lambda stub: stub.Replace(operations_pb2.ReplaceRequest(pool=args.pool)))
    old = set(reply.worker_ids)
    if args.no_wait or not old:
        print(f"{len(old)} {args.pool} workers are replaced" if old else f"the {args.pool} pool has no ready worker to replace")
        return 0

    def done(status: operations_pb2.Status) -> bool:
        pool = status.pools[args.pool]
        is_full = pool.ready == pool.wanted and not pool.reason
        return not old & {worker.id for worker in status.workers} and is_full

    status = wait_for(args, done, args.wait, f"replacing the {args.pool} pool")
    print(pool_line(args.pool, status.pools[args.pool]))
    return 0

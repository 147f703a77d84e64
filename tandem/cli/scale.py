"""`tandem scale`: how many workers each pool shall have."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from tandem.cli.client_tls import add_router_options
from tandem.cli.operations import ask, wait_for
from tandem.cli.seconds import require_seconds
from tandem.errors import ConfigError
from tandem.v1 import operations_pb2

__all__ = ["add_parser", "pool_line", "run", "wishes_of"]

POOLS = ("prefill", "decode")
_ALL = "all"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "scale",
        help="change how many workers are wanted",
        description="Change how many workers each pool shall have. Streams on workers that go finish first, or go on "
        "elsewhere.",
    )
    parser.add_argument("wishes", nargs="+", metavar="POOL=N", help="such as prefill=3 decode=1, or decode=all")
    parser.add_argument(
        "--wait", type=float, default=0.0, metavar="S", help="until it is so, for so long (default: return at once)"
    )
    add_router_options(parser)


def wishes_of(words: list[str]) -> dict[str, int | None]:
    """None: all that nodes offer. Raises ConfigError: a word is no POOL=N, or names a pool twice."""
    wishes: dict[str, int | None] = {}
    for word in words:
        pool, equals, number = word.partition("=")
        is_number = number.isascii() and number.isdigit() and len(number) <= 9
        if not equals or pool not in POOLS or not (is_number or number == _ALL):
            raise ConfigError(f"{word!r} is none of {', '.join(f'{name}=N' for name in POOLS)}")
        if pool in wishes:
            raise ConfigError(f"{pool} is given twice")
        wishes[pool] = None if number == _ALL else int(number)
    return wishes


def run(args: argparse.Namespace) -> int:
    require_seconds("--wait", args.wait)
    wishes = wishes_of(args.wishes)
    numbers = {role: wanted for role, wanted in wishes.items() if wanted is not None}
    request = operations_pb2.ScaleRequest(wanted=numbers, all=[role for role in wishes if role not in numbers])
    reply = ask(args, lambda stub: stub.Scale(request))
    pools: Mapping[str, operations_pb2.PoolSize] = reply.pools
    if args.wait > 0:
        pools = wait_for(args, lambda status: _is_so(status, wishes), args.wait, "scaling").pools
    for role in wishes:
        print(pool_line(role, pools[role]))
    return 0


def _is_so(status: operations_pb2.Status, wishes: Mapping[str, int | None]) -> bool:
    """As wished, and nothing of it still under way."""
    pools = [(status.pools[role], wanted) for role, wanted in wishes.items()]
    return all(
        pool.wanted == (pool.offered if wanted is None else wanted) == pool.ready and not pool.reason for pool, wanted in pools
    )


def pool_line(role: str, pool: operations_pb2.PoolSize) -> str:
    """Such as `decode    1 of 3 ready  (2 starting)`."""
    return f"{role:<9} {pool.ready} of {pool.wanted} ready" + (f"  ({pool.reason})" if pool.reason else "")

"""What `tandem scale`, `drain`, `replace` and `status` share: calls of a router's Operations service."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from tandem.cli.client_tls import channel_to
from tandem.errors import ConfigError, TandemError, Unavailable
from tandem.v1 import operations_pb2, operations_pb2_grpc

__all__ = ["ask", "get_status", "wait_for"]

_ANSWER_S = 15.0
_LOOK_S = 0.5
_NOBODY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_WRONG = (grpc.StatusCode.INVALID_ARGUMENT,)

Reply = TypeVar("Reply")


def ask(args: argparse.Namespace, call: Callable[[operations_pb2_grpc.OperationsStub], Awaitable[Reply]]) -> Reply:
    """One call; `args` are those of `add_router_options`.

    Raises:
        ConfigError: the router says that the arguments are wrong. Unavailable: nobody answers. TandemError: it refuses.
    """
    return asyncio.run(_ask(args, call))


async def _ask(args: argparse.Namespace, call: Callable[[operations_pb2_grpc.OperationsStub], Awaitable[Reply]]) -> Reply:
    async with channel_to(args.address, args) as channel:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await call(operations_pb2_grpc.OperationsStub(channel))
        except grpc.aio.AioRpcError as error:
            raise _told(args.address, error) from error
        except TimeoutError:
            raise Unavailable(f"the router at {args.address} does not answer") from None


def _told(address: str, error: grpc.aio.AioRpcError) -> TandemError:
    details = error.details() or ""
    if error.code() in _WRONG:
        return ConfigError(details)
    if error.code() in _NOBODY and "controller" in details:
        return Unavailable(details)
    if error.code() in _NOBODY:
        return Unavailable(f"no router answers at {address}: start a cluster with `tandem up`, or name its --address")
    return TandemError(f"the router at {address} answers {error.code().name}: {details}")


def get_status(args: argparse.Namespace) -> operations_pb2.Status:
    status: operations_pb2.Status = ask(args, lambda stub: stub.GetStatus(operations_pb2.GetStatusRequest()))
    return status


def wait_for(
    args: argparse.Namespace, done: Callable[[operations_pb2.Status], bool], timeout_s: float, what: str
) -> operations_pb2.Status:
    """Look until it is so. A router that does not answer meanwhile is asked again.

    Raises:
        TandemError: it is not after `timeout_s`; or a pool gave up starting, with its reason.
    """
    deadline_s = time.monotonic() + timeout_s
    reasons = ""
    while True:
        if (status := _status_by(args, deadline_s)) is not None:
            if done(status):
                return status
            reasons = "; ".join(f"{role}: {pool.reason}" for role, pool in status.pools.items() if pool.reason)
            if any("gave up" in pool.reason for pool in status.pools.values()):
                raise TandemError(f"{what}: {reasons}")
        if time.monotonic() > deadline_s:
            raise TandemError(f"{what} takes longer than {timeout_s:.0f} s ({reasons or 'no reason is told'})")
        time.sleep(_LOOK_S)


def _status_by(args: argparse.Namespace, deadline_s: float) -> operations_pb2.Status | None:
    """None: nobody answers now, and there is time to ask again. Raises as `ask` does when there is none."""
    try:
        return get_status(args)
    except Unavailable:
        if time.monotonic() > deadline_s:
            raise
        return None

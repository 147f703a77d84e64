"""How answers go out over gRPC: at the client's pace, up to a bound."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from tandem.errors import Cancelled

__all__ = ["write"]


async def write(context: grpc.aio.ServicerContext, message: Any, wait_s: float) -> None:
    """Returns when the connection has taken the message, which its flow control delays until the client has read enough.

    Raises:
        Cancelled: the client has read nothing for `wait_s`.
    """
    try:
        async with asyncio.timeout(wait_s):
            await context.write(message)
    except TimeoutError as error:
        raise Cancelled(f"nothing of the answer was read for {wait_s:g} s") from error

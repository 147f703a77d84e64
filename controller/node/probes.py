"""The small HTTP server of a node: liveness and readiness for Kubernetes, and the request to leave, from this machine only.

It knows nothing secret and changes nothing for callers from elsewhere: probes come from outside the pod.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from controller.node.place import NodePhase

__all__ = ["probe_app"]


def probe_app(phase: Callable[[], NodePhase], text: Callable[[], str], leave: Callable[[], Awaitable[None]]) -> Starlette:
    """phase: of the node now. text: the same for people. leave: drain the worker; returns when it is gone."""

    async def alive(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text() + "\n")

    async def ready(request: Request) -> PlainTextResponse:
        return PlainTextResponse(text() + "\n", 200 if phase() is NodePhase.SERVING else 503)

    async def drain(request: Request) -> PlainTextResponse:
        if request.client is None or not ipaddress.ip_address(request.client.host).is_loopback:
            return PlainTextResponse("only this machine may ask its node to leave\n", 403)
        await leave()
        return PlainTextResponse(text() + "\n")

    return Starlette(
        routes=[
            Route("/healthz", alive, methods=["GET"]),
            Route("/readyz", ready, methods=["GET"]),
            Route("/leave", drain, methods=["POST"]),
        ]
    )

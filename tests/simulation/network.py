"""gRPC between processes of a `World`: what a channel does on a network that delays, breaks and cuts.

Messages of one stream keep their order; between streams and calls there is none. A cut holds everything up: what was sent
arrives when it heals, unless it lasted longer than the keepalive allows, or somebody resets the connection: then both ends
hear that it broke, and what was under way is gone. A stopped process answers no ping either.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import grpc

from tests.simulation.rpc import Rpc, rpc_error
from tests.simulation.world import Condition, Process, World

__all__ = ["Channel", "Network"]


class Network:
    """delay_s: bounds of what one message takes. keepalive_s: the longest silence that a connection survives."""

    def __init__(self, world: World, delay_s: tuple[float, float], keepalive_s: float) -> None:
        self.world = world
        self.keepalive_s = keepalive_s
        self.delay_s = delay_s
        self._random: random.Random = world.random("network")
        self._servers: dict[str, tuple[Process, dict[str, Any]]] = {}
        self._rpcs: dict[Rpc, None] = {}
        self._cuts: dict[frozenset[str], int] = {}
        self._num_cuts = 0
        self._known: set[Process] = set()

    def serve(self, address: str, process: Process, servicer: object, service: Any) -> None:
        """service: its descriptor."""
        handlers = {f"/{service.full_name}/{method.name}": getattr(servicer, method.name) for method in service.methods}
        self._servers[address] = (process, handlers)
        self._know(process)

    def channel(self, process: Process, address: str) -> Channel:
        self._know(process)
        return Channel(self, process, address)

    def _know(self, process: Process) -> None:
        """The connections of a process end with it."""
        if process not in self._known:
            self._known.add(process)
            process.on_death.append(lambda: self._died(process))

    def _died(self, process: Process) -> None:
        """Its kernel closes its connections: what it had sent may still arrive, before the news or not at all."""
        for rpc in [rpc for rpc in self._rpcs if process in (rpc.client, rpc.server)]:
            rpc.break_off(process if self._random.random() < 0.5 else None)

    def handler(self, address: str, path: str) -> tuple[Process, Any] | None:
        """None: nobody listens there (any more)."""
        server = self._servers.get(address)
        if server is None or server[0].condition is Condition.DEAD:
            return None
        return server[0], server[1][path]

    def delay(self) -> float:
        return self._random.uniform(*self.delay_s)

    # ---- what happens to it ----

    def is_cut(self, link: frozenset[str]) -> bool:
        return link in self._cuts

    def cut(self, link: frozenset[str]) -> None:
        self._num_cuts += 1
        number = self._cuts.setdefault(link, self._num_cuts)

        def look() -> None:
            if self._cuts.get(link) == number:
                self.reset(lambda rpc: rpc.link == link)

        self.world.at(self.world.now + self.keepalive_s, look)

    def heal(self, link: frozenset[str]) -> None:
        if self._cuts.pop(link, None) is not None:
            for rpc in [rpc for rpc in self._rpcs if rpc.link == link]:
                rpc.pump()

    def stopped(self, process: Process) -> None:
        """The process was stopped; if it still is when the keepalive ends, its connections break."""
        number = process.num_stops

        def look() -> None:
            if process.condition is Condition.STOPPED and process.num_stops == number:
                self.reset(lambda rpc: process in (rpc.client, rpc.server))

        self.world.at(self.world.now + self.keepalive_s, look)

    def reset(self, which: Callable[[Rpc], bool]) -> None:
        for rpc in [rpc for rpc in self._rpcs if which(rpc)]:
            rpc.break_off()

    def begun(self, rpc: Rpc) -> None:
        self._rpcs[rpc] = None

    def over(self, rpc: Rpc) -> None:
        self._rpcs.pop(rpc, None)


class Channel:
    """As `grpc.aio.Channel`, as far as the generated stubs use it. Belongs to the process in which it was made."""

    def __init__(self, network: Network, process: Process, address: str) -> None:
        self._network = network
        self._process = process
        self._address = address

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        pass

    def _begin(self, path: str) -> Rpc:
        return Rpc(self._network, self._process, self._address, path)

    def unary_unary(self, path: str, **_: object) -> Callable[..., Any]:
        async def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:  # noqa: ASYNC109  gRPC's name
            rpc = self._begin(path)
            rpc.begin(is_request_stream=False, is_reply_stream=False)
            rpc.send(request)
            try:
                async with asyncio.timeout(timeout):
                    return await rpc.read()
            except TimeoutError:
                raise rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded") from None
            finally:
                rpc.cancel()

        return call

    def unary_stream(self, path: str, **_: object) -> Callable[..., Rpc]:
        def call(request: Any, metadata: Any = None) -> Rpc:
            rpc = self._begin(path)
            rpc.begin(is_request_stream=False, is_reply_stream=True)
            rpc.send(request)
            return rpc

        return call

    def stream_stream(self, path: str, **_: object) -> Callable[[], Rpc]:
        def call(metadata: Any = None) -> Rpc:
            rpc = self._begin(path)
            rpc.begin(is_request_stream=True, is_reply_stream=True)
            return rpc

        return call

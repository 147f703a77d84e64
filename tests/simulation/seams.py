"""Where the simulation takes the place of what tandem takes from its process: time, chance, gRPC channels, the log."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import random
import secrets
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import router.placement
import tandem.rpc
from decode_worker import worker as decode_module
from prefill_worker import worker as prefill_module
from tandem.metrics import MEASURED, POOLS
from tests.simulation.network import Channel, Network
from tests.simulation.world import AsyncGenerators, Process, World

__all__ = ["patched"]

_ROOMS = ("tandem", "transfer", "router", "controller", "prefill_worker", "decode_worker")
_EXPECTED = "scripted failure of a step"
_LOCAL_PART = 0.7


@contextlib.contextmanager
def patched(world: World, network: Network, tell: Callable[[str], None] | None) -> Iterator[None]:
    """While it holds, everything that tandem does is a function of the world's seed. tell: gets what is logged."""

    def create_channel(address: str, *_: object, **__: object) -> Channel:
        process = asyncio.get_running_loop()
        assert isinstance(process, Process)
        return network.channel(process, address)

    with (
        AsyncGenerators(),
        mock.patch.object(tandem.rpc, "create_channel", create_channel),
        mock.patch.object(prefill_module, "MonotonicClock", return_value=world.clock),
        mock.patch.object(decode_module, "MonotonicClock", return_value=world.clock),
        mock.patch.object(POOLS, "_sources", []),
        mock.patch.object(MEASURED, "_sources", []),
        mock.patch.object(router.placement, "is_local_better", _by_chance(world.random("places"))),
        _seeded_secrets(world.random("secrets")),
        _errors_are_violations(world, tell),
        _no_collection(),
    ):
        yield


def _by_chance(chance: random.Random) -> Callable[[object, object], bool]:
    """Steps take no virtual time here, so there is nothing to compare."""
    return lambda shipped, local: chance.random() < _LOCAL_PART


@contextlib.contextmanager
def _seeded_secrets(chance: random.Random) -> Iterator[None]:
    with (
        mock.patch.object(secrets, "token_hex", lambda size: chance.randbytes(size).hex()),
        mock.patch.object(secrets, "token_bytes", lambda size: chance.randbytes(size)),
        mock.patch.object(secrets, "randbits", chance.getrandbits),
    ):
        yield


class _Ears(logging.Handler):
    def __init__(self, world: World, tell: Callable[[str], None] | None) -> None:
        super().__init__()
        self._world = world
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if self._tell is not None:
            process = getattr(asyncio._get_running_loop(), "name", "-")
            self._tell(f"{self._world.now:8.3f} {process:16} {record.getMessage()}")
        if record.levelno < logging.ERROR:
            return
        error = record.exc_info[1] if record.exc_info else None
        if _EXPECTED not in str(error):
            self._world.complain(f"logged by {record.name}: {record.getMessage()} {error!r}")


@contextlib.contextmanager
def _errors_are_violations(world: World, tell: Callable[[str], None] | None) -> Iterator[None]:
    """What a room logs as an error is a bug; what it logs below costs time and tells nothing here."""
    ears = _Ears(world, tell)
    before: list[tuple[Any, Any, Any]] = []
    for room in _ROOMS:
        logger = logging.getLogger(room)
        before.append((logger, logger.level, logger.propagate))
        logger.addHandler(ears)
        logger.propagate = False
        if tell is not None:
            logger.setLevel(logging.DEBUG)
    disabled = logging.root.manager.disable
    logging.disable(logging.NOTSET if tell else logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        for logger, level, propagate in before:
            logger.removeHandler(ears)
            logger.setLevel(level)
            logger.propagate = propagate


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Generators in cycles are not closed at a moment that depends on what ran before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()

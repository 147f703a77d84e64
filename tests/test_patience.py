"""Silence of others, told from a pause of one's own."""

import asyncio
import time

import pytest

from tandem.patience import Patience
from tests.standstill import stand_still

LIMIT_S = 0.2


async def test_who_hears_nothing_waits_for_so_long_and_not_much_longer() -> None:
    began_s = time.monotonic()
    with pytest.raises(TimeoutError):
        async with Patience(LIMIT_S):
            await asyncio.Event().wait()
    assert LIMIT_S <= time.monotonic() - began_s < LIMIT_S + 1.0


async def test_what_is_heard_begins_the_wait_anew() -> None:
    async with Patience(LIMIT_S) as patience:
        for _ in range(8):
            await asyncio.sleep(LIMIT_S / 2)
            patience.heard()


async def test_a_pause_of_this_process_is_nobodys_silence() -> None:
    async with Patience(LIMIT_S) as patience:
        for _ in range(3):
            await asyncio.sleep(LIMIT_S / 4)
            stand_still(3 * LIMIT_S)
            await asyncio.sleep(LIMIT_S / 4)  # what others said meanwhile is heard now
            patience.heard()


async def test_silence_after_a_pause_counts() -> None:
    async def pause_and_wait() -> None:
        async with Patience(LIMIT_S):
            await asyncio.sleep(LIMIT_S / 4)
            stand_still(3 * LIMIT_S)
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await pause_and_wait()


async def test_a_cancelled_wait_is_cancelled() -> None:
    async def wait() -> None:
        async with Patience(LIMIT_S):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(asyncio.all_tasks()) == 1 or await _ended()


async def _ended() -> bool:
    await asyncio.sleep(0)
    return len(asyncio.all_tasks()) == 1

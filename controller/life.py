"""The bounded waits in a worker's life: a start that must get on, and a ready worker that must answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.launcher import WorkerDied, WorkerHandle
from tandem.patience import Patience

__all__ = ["Timing", "bury", "start_bounded", "stop_bounded", "until_end"]


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the controller waits, in seconds.

    look_s: how often it looks at nodes and retries. progress_s: how often a starting worker is asked how far it is.
    stall_s: a start that loads nothing for so long has failed. ping_s: how often a ready worker is asked whether it lives.
    answer_s: one that does not answer for so long is replaced. connect_s: for pairing two workers.
    stop_s: for stopping in good order; more than a worker's `drain_s`. margin_s: so much more, where a drain has a bound of its
    own. shutdown_s: for stopping when everything ends, since then no stream is left. kill_s: after so long without certainty
    that a killed process is gone, people are told, and it goes on being tried.
    """

    look_s: float = 2.0
    progress_s: float = 0.25
    stall_s: float = 300.0
    ping_s: float = 2.0
    answer_s: float = 5.0
    connect_s: float = 30.0
    stop_s: float = 310.0
    margin_s: float = 10.0
    shutdown_s: float = 10.0
    kill_s: float = 10.0


async def start_bounded(handle: WorkerHandle, timing: Timing, on_progress: Callable[[int, int], None]) -> bytes:
    """`handle.start()`, with progress reported while it runs.

    Raises:
        WorkerDied: the process is gone, or nothing was loaded for `stall_s`.
        ConfigError: see `WorkerHandle.start`.
    """
    patience = Patience(timing.stall_s)

    async def report() -> None:
        last = (0, 0)
        while True:
            now = await handle.progress()
            if now != last:
                last = now
                patience.heard()
                on_progress(*now)
            await asyncio.sleep(timing.progress_s)

    start, reporter = asyncio.ensure_future(handle.start()), asyncio.ensure_future(report())
    try:
        async with patience:
            await asyncio.wait({start})
    except TimeoutError:
        raise WorkerDied(f"it loaded nothing for {timing.stall_s:.0f} s") from None
    else:
        return start.result()
    finally:
        await _discard(reporter)
        await _discard(start)


async def until_end(handle: WorkerHandle, timing: Timing) -> str:
    """Returns why a ready worker is to be replaced: it ended, died, or does not answer."""
    ended = asyncio.ensure_future(handle.wait_stopped())
    try:
        while True:
            await asyncio.wait({ended}, timeout=timing.ping_s)
            if ended.done():
                return ended.result()
            async with Patience(timing.answer_s):
                await handle.progress()
    except WorkerDied as error:
        return str(error)
    except TimeoutError:
        return f"it did not answer for {timing.answer_s:.0f} s"
    finally:
        await _discard(ended)


async def stop_bounded(handle: WorkerHandle, timeout_s: float, drain_s: float | None = None) -> bool:
    """Ask a worker to end in good order; `bury` follows, whether it did or not. Returns whether it did."""
    with contextlib.suppress(WorkerDied, TimeoutError):
        async with asyncio.timeout(timeout_s):
            await handle.stop(drain_s)
            return True
    return False


async def bury(handle: WorkerHandle, timing: Timing) -> bool:
    """Whether the process is gone for certain. Time alone makes nothing certain: call it again."""
    try:
        async with asyncio.timeout(timing.kill_s):
            await handle.kill()
    except WorkerDied:
        return True
    except TimeoutError:
        return False
    return True


async def _discard(task: asyncio.Future[Any]) -> None:
    """End a task whose outcome matters no more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # read, so that it is not reported as lost

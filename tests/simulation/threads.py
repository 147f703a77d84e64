"""A worker's threads on virtual time: each is a timer of its process, so it stops and dies with it."""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from tandem.mailbox import Inbox
from tests.simulation.world import Process

__all__ = ["LooperThread", "StepThread", "Turning"]

T = TypeVar("T")

_IDLE_S = 1.0
_WATCHING_S = 0.05
_SOON_S = 0.002


class _Timed:
    """Something that is due at one moment; `wake` brings it forward. It ends with the first exception, as a thread does."""

    def __init__(self, process: Process, chance: random.Random, name: str) -> None:
        self.process = process
        self.chance = chance
        self.name = name
        self.alive = False
        self._timer: asyncio.TimerHandle | None = None
        self._stalled_until = 0.0

    def start(self) -> None:
        self.alive = True
        self._due_in(0.0)

    def stall(self, for_s: float) -> None:
        """It hangs in something for so long."""
        self._stalled_until = self.process.time() + for_s

    def is_alive(self) -> bool:
        return self.alive

    def join(self, timeout: float | None = None) -> None:
        """Its last turn is now."""
        if self.alive:
            self._once()
        self.alive = False

    def wake(self) -> None:
        self.wake_at(self.process.time())

    def wake_at(self, when: float) -> None:
        when += self.chance.uniform(0.0, _SOON_S)
        if self.alive and self._timer is not None and when < self._timer.when():
            self._timer.cancel()
            self._due_in(when - self.process.time())

    def _due_in(self, seconds: float) -> None:
        self._timer = self.process.call_later(seconds, self._run)

    def _run(self) -> None:
        self._timer = None
        if not self.alive:
            return
        if self.process.time() < self._stalled_until:
            self._due_in(self._stalled_until - self.process.time())
            return
        try:
            seconds = self._once()
        except Exception:  # noqa: BLE001  a thread ends here, and that is a violation
            self.alive = False
            self.process.world.complain(f"{self.process.name}: the thread {self.name} ended: {traceback.format_exc(limit=-4)}")
            return
        self._due_in(seconds)

    def _once(self) -> float:
        """Returns the seconds until the next time."""
        raise NotImplementedError


class Turning(Protocol):
    inbox: Any

    def turn(self, wait_s: float) -> None: ...


class _WakingInbox(Inbox[T]):
    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__()
        self._wake = wake
        self.num_waiting = 0

    def put(self, item: T) -> None:
        super().put(item)
        self.num_waiting += 1
        self._wake()

    def take(self, wait_s: float) -> list[T]:
        self.num_waiting = 0
        return super().take(0.0)  # time is virtual: nothing comes while one waits


class StepThread(_Timed):
    """A step loop. step_s: bounds of what one step with work takes. is_busy: the next step follows at once."""

    def __init__(
        self, process: Process, chance: random.Random, loop: Turning, step_s: tuple[float, float], is_busy: Callable[[], bool]
    ) -> None:
        super().__init__(process, chance, "steps")
        self._loop = loop
        self._step_s = step_s
        self._is_busy = is_busy
        self._is_idle = True
        loop.inbox = self._inbox = _WakingInbox(self._on_message)

    def _on_message(self) -> None:
        if self._is_idle:
            self.wake()

    def _once(self) -> float:
        self._loop.turn(0.0)
        self._is_idle = not self._is_busy()
        if self._inbox.num_waiting or not self._is_idle:
            return self.chance.uniform(*self._step_s)
        return _IDLE_S


class LooperThread(_Timed):
    """As `transfer.looper.Looper`, but it looks seldom, since the fabric says when something is due. soon_s: what `step`
    returns while something is in flight."""

    def __init__(self, process: Process, chance: random.Random, name: str, step: Callable[[], float], soon_s: float) -> None:
        super().__init__(process, chance, name)
        self._step = step
        self._soon_s = soon_s

    def stop(self) -> None:
        self.alive = False

    def _once(self) -> float:
        return _WATCHING_S if self._step() <= self._soon_s else _IDLE_S / 2

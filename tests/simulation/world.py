"""Virtual time, and the processes that live in it.

Each process is an event loop of its own: its callbacks, timers and threads of work run one at a time, in an order that
depends on nothing but the seed. A process can be stopped (what it would have done happens when it goes on) and killed
(it does nothing any more, and nobody hears a word of why).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import heapq
import inspect
import itertools
import random
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context
from typing import Any

__all__ = ["AsyncGenerators", "Condition", "Process", "World"]

Callback = Callable[..., object]


class Condition(enum.Enum):
    RUNNING = "running"
    STOPPED = "stopped"
    DEAD = "dead"


class _Clock:
    """As `tandem.clock.Clock`. Set, not advanced: sums of differences would miss a moment by a rounding."""

    def __init__(self) -> None:
        self.moment = 0.0

    def now(self) -> float:
        return self.moment


class World:
    """The clock, one queue of everything that will happen, and what went wrong."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.clock = _Clock()
        self.violations: list[str] = []
        self.num_events = 0
        self.processes: list[Process] = []
        self._queue: list[tuple[float, int, Process | None, asyncio.Handle | Callable[[], object]]] = []
        self._numbers = itertools.count()

    @property
    def now(self) -> float:
        return self.clock.moment

    def random(self, purpose: str) -> random.Random:
        """Chance for one purpose, apart from all others."""
        return random.Random(f"{self.seed}/{purpose}")

    def process(self, name: str) -> Process:
        process = Process(self, name)
        self.processes.append(process)
        return process

    def at(self, when: float, happening: Callable[[], object]) -> None:
        """Something that no process does: the network's, or the script's."""
        heapq.heappush(self._queue, (max(when, self.now), next(self._numbers), None, happening))

    def push(self, when: float, process: Process, handle: asyncio.Handle) -> None:
        now = self.clock.moment
        heapq.heappush(self._queue, (when if when > now else now, next(self._numbers), process, handle))

    def complain(self, violation: str) -> None:
        self.violations.append(f"{self.now:.3f} s: {violation}")

    def run_until(self, until: float) -> None:
        """Let everything happen that is due up to `until`."""
        queue, clock = self._queue, self.clock
        while queue and queue[0][0] <= until:
            when, _, process, happening = heapq.heappop(queue)
            clock.moment = when
            self.num_events += 1
            if process is not None:
                process.run_handle(happening)  # type: ignore[arg-type]
            else:
                happening()  # type: ignore[operator]
        clock.moment = max(until, clock.moment)

    def run_while(self, going_on: Callable[[], bool], limit_s: float, look_s: float = 0.25) -> bool:
        """Until `going_on` no longer holds: True, or `limit_s` seconds have passed: False."""
        end = self.now + limit_s
        while going_on():
            if self.now >= end:
                return False
            self.run_until(min(end, self.now + look_s))
        return True

    def end(self) -> None:
        """Unwind what every process still had under way; nothing of it counts any more, and nothing else happens."""
        self._queue = [entry for entry in self._queue if entry[2] is not None]
        heapq.heapify(self._queue)
        for process in self.processes:
            process.cancel_everything()
        for _ in range(100):
            if not any(process.has_tasks for process in self.processes):
                break
            self.run_until(self.now + 0.1)
        for process in self.processes:
            process.close()
        self._queue.clear()


class Process(asyncio.BaseEventLoop):
    """An event loop on virtual time. Work in threads, as `asyncio.to_thread` does it, takes no time."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__()
        self.name = name
        self.world = world
        self.condition = Condition.RUNNING
        self.on_death: list[Callable[[], None]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._put_off: list[asyncio.Handle] = []
        self._ending = False
        self.num_stops = 0

    def __repr__(self) -> str:
        return f"<{self.name}, {self.condition.value}>"

    # ---- what happens to it ----

    def stop_short(self) -> None:
        """As SIGSTOP does."""
        if self.condition is Condition.RUNNING:
            self.condition = Condition.STOPPED
            self.num_stops += 1

    def go_on(self) -> None:
        """As SIGCONT does: what has come due meanwhile happens now, in order."""
        if self.condition is Condition.STOPPED:
            self.condition = Condition.RUNNING
            put_off, self._put_off = self._put_off, []
            for handle in put_off:
                self.world.push(self.world.now, self, handle)

    def kill(self) -> None:
        """As SIGKILL does."""
        if self.condition is Condition.DEAD:
            return
        self.condition = Condition.DEAD
        for told in self.on_death:
            told()

    def run_handle(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        if self.condition is not Condition.RUNNING and not self._ending:
            self._put_off.append(handle)  # of the dead too: in the end their tasks are unwound
            return
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)

    # ---- an event loop, as far as tandem uses one ----

    def time(self) -> float:
        return self.world.clock.moment

    def call_soon(self, callback: Callback, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self.world.push(self.world.clock.moment, self, handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(self, when: float, callback: Callback, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.push(when, self, timer)
        return timer

    def call_later(self, delay: float, callback: Callback, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        return self.call_at(self.world.now + delay, callback, *args, context=context)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: concurrent.futures.Executor | None, func: Callback, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  as an executor hands it over
            future.set_exception(error)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing in tandem may end with an exception that nobody takes."""
        if self._ending or self.condition is Condition.DEAD:
            return
        error = context.get("exception")
        trace = "".join(traceback.format_exception(error)[-4:]) if error else ""
        self.world.complain(f"{self.name}: {context.get('message')} {trace}")

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def _check_running(self) -> None:
        pass

    # ---- its end ----

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task begun from outside the process."""
        return self.create_task(coroutine)

    def cancel_everything(self) -> None:
        self._ending = True
        for handle in self._put_off:
            self.world.push(self.world.now, self, handle)
        self._put_off.clear()
        for task in self._tasks:
            coroutine = task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # its first step fell to a dead process: Python would complain that it was never awaited
            if not task.done():
                task.cancel()

    def look_for_unseen_errors(self) -> None:
        """What a task raised, and nobody asked for it."""
        for task in self._tasks:
            if self.condition is not Condition.DEAD and task.done() and not task.cancelled() and task._log_traceback:  # type: ignore[attr-defined]
                self.world.complain(f"{self.name}: {task.get_coro().__qualname__} raised {task.exception()!r}")

    @property
    def has_tasks(self) -> bool:
        self._tasks = [task for task in self._tasks if not task.done()]
        return bool(self._tasks)


class AsyncGenerators:
    """While it holds, a generator that nobody iterates any more is closed on the loop that began it, as asyncio does it."""

    def __enter__(self) -> None:
        self._before = sys.get_asyncgen_hooks()
        self._owners: dict[int, asyncio.AbstractEventLoop] = {}
        sys.set_asyncgen_hooks(self._begin, self._finalise)

    def __exit__(self, *_: object) -> None:
        sys.set_asyncgen_hooks(*self._before)

    def _begin(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._owners[id(generator)] = asyncio.get_running_loop()

    def _finalise(self, generator: AsyncGenerator[Any, Any]) -> None:
        loop = self._owners.pop(id(generator))
        if not loop.is_closed():
            loop.create_task(generator.aclose())

"""Answers, absorbed while nothing else is to be done, so that the next turn of a conversation finds them in the cache.

The decode worker has the same keys, values and state, and forgets them; here an answer's tokens are computed again, many at
once, in time that would be idle. It is the lowest of all work: any prompt comes first, and takes the memory too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from prefill_worker.chunk_step import GiveWayError
from prefill_worker.memory import PromptMemory
from prefill_worker.prompt import PrefillTask, RunningPrompt
from tandem.engine import Engine
from tandem.model.batch import SequenceChunk

__all__ = ["Absorber"]

logger = logging.getLogger(__name__)

_MOST_WAITING = 64


class Absorber:
    """For the thread of the step loop.

    chunk_tokens: of one step, and as many more as lead to the end of a tile, so that what is kept has the same bits as in a
    prompt that is computed at once. 0: nothing is absorbed. most_lost: a conversation of whose prompt the cache has lost more
    tokens is left alone."""

    def __init__(self, engine: Engine, memory: PromptMemory, chunk_tokens: int, most_lost: int) -> None:
        self._engine = engine
        self._memory = memory
        self._chunk_tokens = chunk_tokens
        self._most_lost = most_lost
        self._waiting: deque[PrefillTask] = deque(maxlen=_MOST_WAITING)
        self._now: RunningPrompt | None = None
        self._is_computing = False

    @property
    def has_work(self) -> bool:
        return self._now is not None or bool(self._waiting)

    def offer(self, task: PrefillTask) -> None:
        """task: of a request that has ended, with its answer as `generated`. The oldest is forgotten when too many wait."""
        if self._memory.keeps_states and self._chunk_tokens:
            self._waiting.append(task)

    def step(self, give_way: Callable[[], None]) -> None:
        """One chunk, if there is anything to absorb. give_way() is called several times in each layer, and may run
        prompts; memory is not given up there."""
        if self._now is None and not self._start():
            return
        prompt = self._now
        assert prompt is not None
        tile = self._engine.tile_tokens
        end = -(-(prompt.num_computed + self._chunk_tokens) // tile) * tile
        num_tokens = min(end - prompt.num_computed, prompt.num_to_stop)
        new = prompt.tokens[prompt.num_computed : prompt.num_computed + num_tokens]
        chunk = SequenceChunk(new, prompt.num_computed, prompt.memory.block_ids, prompt.memory.slot)
        self._is_computing = True
        try:
            self._engine.forward([chunk], give_way=give_way)
        except GiveWayError:
            raise
        except Exception:  # the step ends here, and with it this answer only: nobody waits for it
            logger.exception("an answer could not be absorbed")
            self._end(prompt)
            return
        finally:
            self._is_computing = False
        prompt.num_computed += num_tokens
        self._memory.computed(prompt.memory, prompt.num_computed)
        if prompt.num_remaining == 0:
            self._end(prompt)

    def give_way(self) -> bool:
        """Give up the memory of what is being absorbed, keeping what is final of it. False: there is none, or it is in use."""
        if self._now is None or self._is_computing:
            return False
        self._end(self._now)
        return True

    def clear(self) -> None:
        self._waiting.clear()
        self.give_way()

    def _start(self) -> bool:
        while self._waiting:
            task = self._waiting.popleft()
            memory = self._memory.take(task)
            if memory is None:
                continue
            self._now = RunningPrompt(task, memory, None, None, num_computed=memory.num_cached, tokens=task.request.tokens)
            if self._now.num_remaining - len(task.request.generated) <= self._most_lost:
                return True
            self._end(self._now)
        return False

    def _end(self, prompt: RunningPrompt) -> None:
        self._now = None
        self._memory.free(prompt.memory)

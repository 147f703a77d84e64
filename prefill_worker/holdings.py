"""Who held which block and slot of this worker: a short memory for the day when one is missing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from prefill_worker.prompt import Key, LocalMemory
from tandem.clock import Clock

__all__ = ["Holdings"]

_REMEMBERED = 1024


@dataclass(slots=True)
class _Holding:
    key: Key
    memory: LocalMemory
    story: list[str] = field(default_factory=list)


class Holdings:
    """The newest prompts that were given memory here. Says nothing about who may use it; only the pools do."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._holdings: deque[_Holding] = deque(maxlen=_REMEMBERED)

    def took(self, key: Key, memory: LocalMemory) -> None:
        self._holdings.append(_Holding(key, memory))
        self.note(memory, "taken")

    def note(self, memory: LocalMemory, what: str) -> None:
        """`what` happened to the prompt that holds this memory."""
        holding = next((holding for holding in reversed(self._holdings) if holding.memory is memory), None)
        if holding is not None:
            holding.story.append(f"{what} at {self._clock.now():.3f} s")

    def history(self, name: str) -> str:
        """The newest holder of "block 7" or "slot 2", and what became of it."""
        kind, index = name.split()
        for holding in reversed(self._holdings):
            if int(index) in (holding.memory.block_ids if kind == "block" else (holding.memory.slot,)):
                request_id, attempt = holding.key
                return f"last held by request {request_id}, attempt {attempt}: {', '.join(holding.story)}"
        return f"none of the last {_REMEMBERED} prompts held it"

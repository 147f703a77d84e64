"""The types a prompt passes through inside a prefill worker.

::

    PrefillTask ─▶ WaitingPrompt ──local memory──▶ ReservingPrompt ──lease granted──▶ RunningPrompt ──last chunk──▶ hand-off
     from a router  holds nothing                   decode worker asked                computed in chunks   state leaves, freed
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.cache.prefix import Holding
from tandem.request import Request, ServiceClass, TokenLogprobs
from transfer.handoff import Handoff, LeaseGrant

__all__ = ["Key", "LocalMemory", "PrefillTask", "ReservingPrompt", "RunningPrompt", "WaitingPrompt"]

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PrefillTask:
    """What a router placed here. It holds nothing yet."""

    request: Request
    attempt: int
    router_id: str
    decode_worker_id: str
    received_s: float

    @property
    def key(self) -> Key:
        return (self.request.request_id, self.attempt)

    @property
    def num_tokens(self) -> int:
        return len(self.request.tokens)

    @property
    def is_interactive(self) -> bool:
        return self.request.service_class is ServiceClass.INTERACTIVE

    @property
    def needs_handoff(self) -> bool:
        """False when the first token is also the last: nothing travels then."""
        return len(self.request.generated) + 1 < self.request.stop.max_new_tokens


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """Blocks for the prompt and one slot of this worker; freed when the hand-off has ended, never before.

    num_cached: leading positions that the caches hold already. checkpoints: positions where the state is to be kept, ascending.
    """

    holding: Holding
    slot: int
    num_cached: int = 0
    checkpoints: tuple[int, ...] = ()

    @property
    def block_ids(self) -> tuple[int, ...]:
        return self.holding.block_ids


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """came_at: how many tokens the worker had computed, for all prompts, when this one came."""

    task: PrefillTask
    came_at: int
    num_computed: int = 0

    @property
    def num_remaining(self) -> int:
        """At most: what the caches hold of it shows only when it takes memory."""
        return self.task.num_tokens

    @property
    def num_to_stop(self) -> int:
        return self.num_remaining


@dataclass(slots=True)
class ReservingPrompt:
    """Local memory is held, the decode worker has been asked. `cancelled`: free everything when it answers."""

    task: PrefillTask
    memory: LocalMemory
    asked_s: float
    came_at: int = 0
    cancelled: bool = False

    @property
    def num_computed(self) -> int:
        return self.memory.num_cached

    @property
    def num_remaining(self) -> int:
        return self.task.num_tokens - self.memory.num_cached

    @property
    def num_to_stop(self) -> int:
        return self.num_remaining


@dataclass(slots=True)
class RunningPrompt:
    """A prompt that may be computed: both sides hold memory for it.

    num_computed: positions in the caches. num_pushed_blocks: leading KV blocks already given to the sender.
    aborting: the sender has been told to stop; memory is freed when it reports quiet. prompt_logprobs: of the computed part, of
    all positions but the first, when the client asked.
    """

    task: PrefillTask
    memory: LocalMemory
    grant: LeaseGrant | None
    handoff: Handoff | None
    came_at: int = 0
    started_s: float = 0.0
    num_computed: int = 0
    num_pushed_blocks: int = 0
    aborting: bool = False
    tokens: tuple[int, ...] = field(default=())
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def num_remaining(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_to_stop(self) -> int:
        """Tokens up to where the next chunk must end at the latest, so that the state can be kept there."""
        stop = next((place for place in self.memory.checkpoints if place > self.num_computed), len(self.tokens))
        return stop - self.num_computed

    def push_complete_blocks(self, block_size_tokens: int) -> None:
        """Let the blocks travel that are full since the last time."""
        num_complete = self.num_computed // block_size_tokens
        if self.handoff is not None and num_complete > self.num_pushed_blocks:
            self.handoff.push_kv(self.num_pushed_blocks, num_complete)
            self.num_pushed_blocks = num_complete

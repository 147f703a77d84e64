"""How large chunks are, from what the hand-offs of this worker have lately cost. The decision is pure.

What a client feels of a transfer is what is left of it when the last chunk has been computed. Two things leave something:

- the *state* leaves layer by layer during the last chunk alone. A last chunk that is computed in less time than that takes
  exposes the rest. So a prompt is cut so that its last chunk is long enough; no step more is needed for it.
- *keys and values* of a chunk leave while later ones are computed. Where the link needs longer for them than the computation
  takes, everything waits for the link, which could have begun when the first chunk was done: so chunks become smaller.

Smaller chunks cost computation, so they grow again as soon as the link has time to spare. Between the two thresholds nothing
changes, and neither does anything before some hand-offs were seen. Several decode workers on links of several speeds are taken
together.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from prefill_worker.scheduler import PrefillPolicy
from tandem.rate import Rate
from transfer.handoff import HandoffResult

__all__ = ["ChunkLimits", "ChunkSizer", "ChunkSizes", "Pace", "adapt"]

# Of the time to compute a token, what its keys and values may take on the link before chunks shrink, and before they grow.
_LINK_IS_BEHIND = 1.0
_LINK_HAS_TIME = 0.5
# What the link cannot take of a last chunk's time, however busy it is with keys and values.
_LEAST_TIME_FOR_STATE = 0.1
_SEEN_BEFORE_ADAPTING = 8


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. compute_s, kv_s: to compute one prompt token, and to send its keys and values. state_s: to send one state."""

    compute_s: float
    kv_s: float
    state_s: float


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Of tokens. least, most: of a step. tile_tokens: chunks end at multiples of it."""

    least: int
    most: int
    tile_tokens: int = 1


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """step_tokens: most tokens of a step. last_tokens: least of a prompt's last chunk, if the prompt has so many."""

    step_tokens: int
    last_tokens: int = 0


def adapt(now: ChunkSizes, pace: Pace, limits: ChunkLimits) -> ChunkSizes:
    """The sizes to use from now on; the same ones unless the pace calls for clearly other ones."""
    step = now.step_tokens
    if pace.kv_s > _LINK_IS_BEHIND * pace.compute_s:
        step //= 2
    elif pace.kv_s < _LINK_HAS_TIME * pace.compute_s:
        step *= 2
    step = min(limits.most, max(limits.least, step))
    return ChunkSizes(step, _last_tokens(now.last_tokens, pace, most=max(0, step - limits.tile_tokens)))


def _last_tokens(now: int, pace: Pace, most: int) -> int:
    """So many that the link can send one state, besides their keys and values, while they are computed. `most`: the cut before
    them is at a tile's end, and they still must fit one step."""
    time_s = max(pace.compute_s - pace.kv_s, _LEAST_TIME_FOR_STATE * pace.compute_s)
    wanted = -int(-pace.state_s // time_s)
    return min(most, now if now / 2 <= wanted <= now else wanted)


@dataclass(slots=True)
class ChunkSizer:
    """Keeps a policy's sizes. For the thread of the step loop. policy: the newest one. kv_token_bytes: of one position, in all
    attention layers; 0: there are none."""

    policy: PrefillPolicy
    limits: ChunkLimits
    kv_token_bytes: float
    _tokens: Rate = field(default_factory=lambda: Rate(0.0))
    _kv_bytes: Rate = field(default_factory=lambda: Rate(0.0))
    _states: Rate = field(default_factory=lambda: Rate(0.0))
    _num_seen: int = 0

    @classmethod
    def of(cls, policy: PrefillPolicy, kv_token_bytes: float) -> ChunkSizer:
        """Between a quarter of the policy's chunk, or a tile if that is more, and all of it."""
        least = min(policy.chunk_tokens, max(policy.tile_tokens, policy.chunk_tokens // 4))
        return cls(policy, ChunkLimits(least, policy.chunk_tokens, policy.tile_tokens), kv_token_bytes)

    @property
    def compute_s(self) -> float:
        """Of one prompt token, lately; 0.0: none was computed."""
        return self._tokens.seconds

    def computed(self, num_tokens: int, seconds: float) -> None:
        """One step."""
        self._tokens.note(num_tokens, seconds)

    def handed_off(self, result: HandoffResult) -> None:
        if result.kv_bytes:
            self._kv_bytes.note(result.kv_bytes, result.kv_seconds)
        self._states.note(1, result.state_seconds)
        self._num_seen += 1
        if self._num_seen >= _SEEN_BEFORE_ADAPTING and (pace := self._pace()) is not None:
            sizes = adapt(ChunkSizes(self.policy.chunk_tokens, self.policy.last_tokens), pace, self.limits)
            self.policy = replace(self.policy, chunk_tokens=sizes.step_tokens, last_tokens=sizes.last_tokens)

    def _pace(self) -> Pace | None:
        """None: something of it was never seen."""
        tokens, kv, states = self._tokens.per_s, self._kv_bytes.per_s, self._states.per_s
        if not (tokens and states and (kv or not self.kv_token_bytes)):
            return None
        return Pace(1 / tokens, self.kv_token_bytes / kv if kv else 0.0, 1 / states)

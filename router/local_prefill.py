"""Whether a short prompt is computed on its decode worker, where its state is wanted, or on a prefill worker, from where the
state must travel. A pure decision over what the two workers and the router have lately measured.

Compared are the seconds until decode may go on:

- shipped: half of the step that a prefill worker is in, the step that computes the prompt, which others fill up, the
  reservation, and what is exposed of the hand-off. A short prompt is next there, so a longer queue makes no difference.
- local: what waits there already and the prompt. While sequences run it gets but a share of the time, see
  `decode_worker.local_prefill`; and the time that it takes from each of them is counted as its own.

What is not known of the usual way counts as nothing, and of the local way as much as it can be: so the usual way is the one
that is taken until something else is known to be clearly quicker. Only while others are computed over there, and where nothing
runs or waits and nothing was computed lately, a prompt is computed to see.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LocalWay", "ShippedWay", "is_local_better"]

# Two measurements that are nearer to each other say nothing: the usual way is taken.
_CLEARLY = 0.8
# Where no hand-off was timed lately, or none can be, since the workers' clocks are those of two machines.
_LINK_BYTES_PER_S = 10e9


@dataclass(frozen=True, slots=True)
class ShippedWay:
    """num_tokens: to be computed there. queue_tokens: that stand there already and do not give way. token_s: for each, lately;
    0: not known. step_tokens: of a step at most. reserve_s: from asking for a reservation to its answer. handoff_s: exposed of
    a hand-off at least; 0: not known. num_bytes: of keys, values and state that travel; 0: the first token ends the answer."""

    num_tokens: int
    queue_tokens: int = 0
    token_s: float = 0.0
    step_tokens: int = 0
    reserve_s: float = 0.0
    handoff_s: float = 0.0
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        shared_tokens = min(self.queue_tokens + self.num_tokens, self.step_tokens)
        return self.wait_s + max(self.num_tokens, shared_tokens) * self.token_s + self._travel_s

    @property
    def wait_s(self) -> float:
        """In the mean."""
        return min(self.queue_tokens, self.step_tokens) * self.token_s / 2

    @property
    def _travel_s(self) -> float:
        if not self.num_bytes:
            return 0.0
        return self.reserve_s + (self.handoff_s or self.num_bytes / _LINK_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class LocalWay:
    """num_tokens: the whole prompt. queue_tokens: that stand there already. token_s: for each, lately; 0: not known. step_s: of
    the newest decode step, 0: there was none. num_running: sequences. share: see `DecodeConfig.local_prefill_share`."""

    num_tokens: int
    queue_tokens: int = 0
    token_s: float = 0.0
    step_s: float = 0.0
    num_running: int = 0
    share: float = 1.0

    @property
    def seconds(self) -> float:
        """At most. No prompt takes less than a decode step, which reads the same weights; and until one was seen, each of its
        tokens is taken to need as much."""
        compute_s = self._compute_s(self.queue_tokens + self.num_tokens)
        return compute_s * (1.0 + 1.0 / self.share) if self.num_running else compute_s

    @property
    def taken_s(self) -> float:
        """What the running sequences lose by it, added up."""
        return self.num_running * self._compute_s(self.num_tokens)

    def _compute_s(self, num_tokens: int) -> float:
        return max(num_tokens * (self.token_s or self.step_s), self.step_s)

    @property
    def is_untried(self) -> bool:
        """It harms nobody to compute one there, and then it is known."""
        return not (self.token_s or self.num_running or self.queue_tokens)


def is_local_better(shipped: ShippedWay, local: LocalWay) -> bool:
    if local.is_untried and shipped.wait_s > 0.0:
        return True
    is_known = bool(local.token_s or local.step_s)
    return is_known and local.seconds + local.taken_s < _CLEARLY * shipped.seconds

"""What happens in one run, as data: who asks for what, and what goes wrong when. All times in seconds from readiness."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tandem.request import FinishReason, Request, SamplingParams, StopRules
from tests.simulation.engine import BLOCK, MAX_CONTEXT, VOCAB, reference
from transfer.fake_agent import Faults

__all__ = [
    "WRITE_TIMEOUT_S",
    "Act",
    "Ask",
    "Cut",
    "FailStep",
    "Freeze",
    "Kill",
    "Reset",
    "RestartRouter",
    "Scenario",
    "Stall",
    "Terminate",
    "draw",
    "expected",
    "text_of",
]

LAST_ACT_S = 3.0
_ROOM_FOR_ONE_GIB = 600 / 2**30
WRITE_TIMEOUT_S = 1.5
"""After so long a write has failed; see `TransferConfig.timeout_s`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A client. router: which one it asks, modulo their number. leaves_after_s: it cancels so long after asking. deadline_s: as
    gRPC hands it to the router."""

    at_s: float
    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009  frozen
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    batch: bool = False
    leaves_after_s: float | None = None
    deadline_s: float | None = None
    router: int = 0

    @property
    def request(self) -> Request:
        rules = StopRules(self.max_new_tokens, frozenset(self.stop_token_ids), self.min_new_tokens)
        return Request("reference", self.prompt, self.sampling, rules)


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL. index: among the living workers of the role, modulo their number."""

    at_s: float
    role: str
    index: int


@dataclass(frozen=True, slots=True)
class Freeze:
    """SIGSTOP, and SIGCONT after `for_s` unless it was killed meanwhile. Of a router too."""

    at_s: float
    role: str
    index: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Stall:
    """One thread of the worker stands still, the others go on: "steps", or "transfer"."""

    at_s: float
    role: str
    index: int
    thread: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Nothing passes between the two for a while: router and worker, router and controller, or prefill and decode worker."""

    at_s: float
    one: tuple[str, int]
    other: tuple[str, int]
    for_s: float


@dataclass(frozen=True, slots=True)
class Reset:
    """Every gRPC connection between the two breaks, at once and for both."""

    at_s: float
    one: tuple[str, int]
    other: tuple[str, int]


@dataclass(frozen=True, slots=True)
class FailStep:
    """The next step of the worker raises."""

    at_s: float
    role: str
    index: int


@dataclass(frozen=True, slots=True)
class RestartRouter:
    """The router's process is killed; another one starts under another id."""

    at_s: float
    index: int = 0


@dataclass(frozen=True, slots=True)
class Terminate:
    """SIGTERM: the worker drains, ends and is replaced."""

    at_s: float
    role: str
    index: int


Act = Kill | Terminate | Freeze | Stall | Cut | Reset | FailStep | RestartRouter


@dataclass(frozen=True)
class Scenario:
    """seed: of all chance while it runs. blocks, slots: by role. max_queue: of a router and of a prefill worker. checkpoints:
    recurrent states that a prefill worker keeps, one every `checkpoint_every` tokens. faults hold until `faults_until_s`.
    overcommit, swap_gib: of decode workers; above 1 sequences outgrow their memory. local_prefill_tokens: longest prompt that a
    decode worker may compute itself; most of them then are."""

    seed: int
    num_prefill: int = 1
    num_decode: int = 1
    num_routers: int = 1
    blocks: dict[str, int] = field(default_factory=lambda: {"prefill": 48, "decode": 48})
    slots: dict[str, int] = field(default_factory=lambda: {"prefill": 4, "decode": 4})
    checkpoints: int = 0
    checkpoint_every: int = 8
    chunk_tokens: int = 16
    max_batch: int = 8
    max_queue: int = 64
    overlap: bool = True
    message_delay_s: tuple[float, float] = (0.0005, 0.004)
    asks: tuple[Ask, ...] = ()
    acts: tuple[Act, ...] = ()
    faults: Faults = Faults()  # noqa: RUF009  frozen
    faults_until_s: float = LAST_ACT_S
    overcommit: float = 1.0
    swap_gib: float = 1.0
    local_prefill_tokens: int = 0

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong, so nobody may be refused."""
        faults = self.faults
        wrong = (faults.write_fails, faults.write_hangs, faults.notify_lost, faults.notify_changed, faults.state_changed)
        return not self.acts and not any(wrong) and faults.delay_s[1] < WRITE_TIMEOUT_S


def expected(ask: Ask) -> tuple[list[int], str, FinishReason]:
    """The whole answer: tokens, text, and what ends it."""
    tokens: list[int] = []
    text = ""
    for token in reference(ask.request):
        tokens.append(token)
        if token in ask.stop_token_ids:
            return tokens, text, FinishReason.STOP
        text += text_of(token)
        if ended := [stop for stop in ask.stop if text.endswith(stop)]:
            return tokens, text[: -max(map(len, ended))], FinishReason.STOP
        if len(tokens) == ask.max_new_tokens:
            return tokens, text, FinishReason.LENGTH
    raise AssertionError("the reference never ends")


def text_of(token: int) -> str:
    return chr(48 + token)


def draw(chance: random.Random) -> Scenario:
    """Any scenario, from a generator of chance: a seeded one, or hypothesis's."""
    num_acts = chance.choice((0, 1, 1, 2, 2, 3, 5))
    often = _tokens(chance, MAX_CONTEXT)
    smallest = MAX_CONTEXT // BLOCK
    asks = tuple(_ask(chance, often) for _ in range(chance.choice((1, 2, 3, 4, 6))))
    drawn = Scenario(
        seed=chance.randrange(1 << 32),
        num_prefill=chance.randint(1, 3),
        num_decode=chance.randint(1, 3),
        num_routers=chance.choice((1, 1, 2)),
        blocks={role: chance.choice((smallest, smallest + 8, 2 * smallest)) for role in ("prefill", "decode")},
        slots={role: chance.choice((1, 2, 4)) for role in ("prefill", "decode")},
        checkpoints=chance.choice((0, 1, 8)),
        checkpoint_every=chance.choice((BLOCK, 7, 4 * BLOCK)),
        chunk_tokens=chance.choice((3, 4, 8, 16, 64)),
        max_batch=chance.choice((1, 2, 8)),
        max_queue=chance.choice((1, 64, 64, 64)),
        overlap=chance.random() < 0.85,
        message_delay_s=chance.choice(((0.0005, 0.004), (0.0, 0.05), (0.0, 0.3))),
        asks=asks,
        acts=tuple(sorted((_act(chance, asks) for _ in range(num_acts)), key=lambda act: act.at_s)),
        faults=_faults(chance),
        faults_until_s=chance.uniform(0.5, LAST_ACT_S),
    )
    drawn = _pressed(chance, drawn) if chance.random() < 0.15 else drawn
    return replace(drawn, local_prefill_tokens=chance.choice((0, 0, BLOCK, 3 * BLOCK, MAX_CONTEXT)))


def _pressed(chance: random.Random, drawn: Scenario) -> Scenario:
    """The same, with answers that together outgrow what decode workers have."""
    return replace(
        drawn,
        num_decode=min(2, drawn.num_decode),
        blocks={**drawn.blocks, "decode": MAX_CONTEXT // BLOCK},
        slots={**drawn.slots, "decode": 4},
        overcommit=chance.choice((3.0, 20.0)),
        swap_gib=chance.choice((1.0, _ROOM_FOR_ONE_GIB, 0.0)),
        asks=tuple(
            replace(ask, at_s=ask.at_s / 4, prompt=ask.prompt[:16], max_new_tokens=chance.choice((20, 50, 80)))
            for ask in drawn.asks
        ),
    )


def _ask(chance: random.Random, often: tuple[int, ...]) -> Ask:
    """often: what many prompts begin with."""
    length = chance.choice((1, 2, 3, BLOCK, BLOCK + 1, 2 * BLOCK, chance.randint(1, 60)))
    length = max(1, length + chance.choice((0, 0, 8, 16, 15, 17)))
    max_new_tokens = min(MAX_CONTEXT - length, chance.choice((1, 2, 3, BLOCK, chance.randint(1, 30))))
    shared = chance.choice((0, 0, length - 1, length, chance.randint(0, length)))
    stops = chance.random()
    hurry = chance.random()
    return Ask(
        at_s=chance.uniform(0.0, 2.0),
        prompt=often[:shared] + _tokens(chance, length - shared),
        max_new_tokens=max_new_tokens,
        sampling=_sampling(chance),
        stop_token_ids=tuple(sorted(set(_tokens(chance, 4)))) if stops < 0.3 else (),
        stop=tuple(text_of(token) for token in _tokens(chance, 3)) if stops > 0.85 else (),
        min_new_tokens=chance.randint(0, max_new_tokens) if stops < 0.15 else 0,
        batch=chance.random() < 0.2,
        leaves_after_s=chance.uniform(0.0, 1.5) if hurry < 0.25 else None,
        deadline_s=chance.uniform(0.05, 3.0) if 0.25 <= hurry < 0.35 else None,
        router=chance.randrange(2),
    )


def _sampling(chance: random.Random) -> SamplingParams:
    penalty = chance.choice((0.0, 0.0, 0.0, 1.0))
    if chance.random() < 0.6:
        return SamplingParams(frequency_penalty=penalty)
    seed = chance.randrange(1 << 64)
    return SamplingParams(0.8, chance.choice((1.0, 0.9)), chance.choice((0, 20)), seed, presence_penalty=penalty)


def _tokens(chance: random.Random, length: int) -> tuple[int, ...]:
    """Which they are matters little: one draw for all."""
    return tuple(random.Random(chance.randrange(1 << 32)).choices(range(VOCAB), k=length))


def _worker(chance: random.Random, role: str = "") -> tuple[str, int]:
    return role or chance.choice(("prefill", "decode")), chance.randrange(3)


def _pair(chance: random.Random) -> tuple[tuple[str, int], tuple[str, int]]:
    kind = chance.random()
    if kind < 0.5:
        return _worker(chance, "prefill"), _worker(chance, "decode")
    return _worker(chance, "router"), _worker(chance) if kind < 0.95 else ("controller", 0)


def _act(chance: random.Random, asks: tuple[Ask, ...]) -> Act:
    """Mostly soon after a client has asked: that is when there is something to break."""
    at_s = chance.uniform(0.0, LAST_ACT_S)
    if chance.random() < 0.7:
        at_s = chance.choice(asks).at_s + chance.uniform(0.0, 0.7)
    kind = chance.random()
    if kind < 0.25:
        return Kill(at_s, *_worker(chance))
    if kind < 0.45:
        who = _worker(chance, "router") if chance.random() < 0.1 else _worker(chance)
        return Freeze(at_s, *who, for_s=chance.choice((0.2, 1.0, 2.5, 3.5, 4.5, 6.0, 9.0)))
    if kind < 0.52:
        return Stall(at_s, *_worker(chance), thread=chance.choice(("steps", "transfer")), for_s=chance.choice((0.5, 2.0, 7.0)))
    if kind < 0.7:
        return Reset(at_s, *_pair(chance))
    if kind < 0.9:
        return Cut(at_s, *_pair(chance), for_s=chance.choice((0.2, 1.0, 2.0, 3.5, 5.0, 8.0)))
    if kind < 0.93:
        return FailStep(at_s, *_worker(chance))
    if kind < 0.97:
        return Terminate(at_s, *_worker(chance))
    return RestartRouter(at_s, chance.randrange(2))


def _faults(chance: random.Random) -> Faults:
    def sometimes(most: float) -> float:
        return chance.uniform(0.0, most) if chance.random() < 0.3 else 0.0

    return Faults(
        delay_s=(0.0, chance.choice((0.0, 0.01, 0.1, 0.4, 2.0))),
        write_fails=sometimes(0.2),
        write_hangs=sometimes(0.1),
        hang_s=chance.choice((2.0, 6.0)),
        late_s=chance.choice((0.0, 0.8)),
        read_early=chance.choice((0.0, 0.5)),
        notify_lost=sometimes(0.3),
        notify_doubled=sometimes(0.5),
        notify_changed=sometimes(0.2),
        state_changed=sometimes(0.2),
    )

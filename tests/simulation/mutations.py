"""Faults planted in tandem itself, one at a time: each takes away one of the rules that keep an answer right or memory safe."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import xxhash

import transfer.receiver
from decode_worker.local_prefill import LocalPrefill
from decode_worker.loop import DecodeLoop
from decode_worker.worker import DecodeWorker
from prefill_worker.endings import Endings
from prefill_worker.inbox import MemoryQuiet
from prefill_worker.loop import PrefillLoop
from prefill_worker.peers import DecodePeers
from prefill_worker.prompt import RunningPrompt
from router.answer import Answer
from router.assembly import TokenAssembler
from router.attempt import Attempt
from tandem.cache.memory import CacheMemory, SavedSequence
from tests.simulation.scenario import Ask, Cut, Kill, Reset, Scenario
from transfer.fake_agent import Faults
from transfer.handoff import Outgoing
from transfer.lease import LeaseTable
from transfer.lease_state import Lease, LeaseState
from transfer.outgoing_state import OutgoingState
from transfer.plan import TransferPlan
from transfer.record import Expectation, HandoffRecord
from transfer.sender import Sender

__all__ = ["MUTATIONS", "Mutation"]

_verify, _end, _move = transfer.receiver.verify, LeaseTable._end, LeaseTable._move


def _no_quarantine() -> AbstractContextManager[object]:
    """An aborted or expired lease frees its memory at once."""

    def move(table: LeaseTable, lease: Lease, state: LeaseState, cause: str) -> Lease:
        if state is LeaseState.QUARANTINED:
            return _end(table, lease, LeaseState.ABORTED, cause)
        return _move(table, lease, state, cause)

    return mock.patch.object(LeaseTable, "_move", move)


def _no_state_checksum() -> AbstractContextManager[object]:
    def verify(record: HandoffRecord, expected: Expectation) -> None:
        _verify(record, dataclasses.replace(expected, state_checksum=lambda: record.state_checksum))

    return mock.patch.object(transfer.receiver, "verify", verify)


def _no_record_checksum() -> AbstractContextManager[object]:
    """A record that was changed on the way is believed, unless a field is impossible."""
    decode = transfer.receiver.decode_message

    def believing(data: bytes) -> Any:
        return decode(data[:-8] + xxhash.xxh3_64_intdigest(data[:-8]).to_bytes(8, "little"))

    def verify(record: HandoffRecord, expected: Expectation) -> None:
        if record.first_token >= expected.vocab_size:
            _verify(record, expected)

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(transfer.receiver, "decode_message", believing))
    stack.enter_context(mock.patch.object(transfer.receiver, "verify", verify))
    return stack


def _attempt_numbers_ignored() -> AbstractContextManager[object]:
    """A decode worker takes every attempt of a request for the first."""
    reserve = LeaseTable.reserve

    def same(self: LeaseTable, request: Any, attempt: int, router_id: str, writer_id: str, **named: Any) -> Lease:
        return reserve(self, request, 1, router_id, writer_id, **named)

    return mock.patch.object(LeaseTable, "reserve", same)


def _prefill_frees_before_quiet() -> AbstractContextManager[object]:
    """The prefill worker takes its memory back, and tells the decode worker, without waiting for the sender."""

    def abort(self: Endings, prompt: RunningPrompt, reason: str) -> None:
        if not prompt.aborting:
            prompt.aborting = True
            assert prompt.handoff is not None
            prompt.handoff.abort(lambda: None)
            self.tell(MemoryQuiet(prompt.task.key))

    return mock.patch.object(Endings, "_abort", abort)


def _sender_quiet_while_writing() -> AbstractContextManager[object]:
    """The sender reports quiet while writes are in flight."""
    settle = Sender._settle

    def hasty(self: Sender, outgoing: Outgoing) -> bool:
        if outgoing.state is OutgoingState.ABORTED:
            outgoing.in_flight.clear()
        return settle(self, outgoing)

    return mock.patch.object(Sender, "_settle", hasty)


def _record_before_the_bytes() -> AbstractContextManager[object]:
    """The record leaves when everything was posted, not when it has arrived."""

    def complete(self: Outgoing) -> bool:
        return self.is_open and self.finish is not None and not self.pending

    return mock.patch.object(Outgoing, "is_complete", property(complete))


def _delivered_tokens_forgotten() -> AbstractContextManager[object]:
    """A retried request begins again from its prompt."""
    init = Attempt.__init__

    def forgetful(self: Attempt, request: Any, *rest: Any) -> None:
        init(self, dataclasses.replace(request, generated=()), *rest)

    return mock.patch.object(Attempt, "__init__", forgetful)


def _tokens_in_order_of_arrival() -> AbstractContextManager[object]:
    """The router believes that tokens come in order, each once."""

    def add(self: TokenAssembler, index: int, tokens: Any, finish_reason: Any = None) -> list[int]:
        self._next = index + len(tokens)
        if finish_reason is not None:
            self._end, self._reason = self._next, finish_reason
        return list(tokens)

    return mock.patch.object(TokenAssembler, "add", add)


def _deaths_not_told() -> AbstractContextManager[object]:
    """A decode worker does not hear that a writer is dead."""
    return mock.patch.object(DecodeWorker, "writer_dead")


def _the_dead_are_heard() -> AbstractContextManager[object]:
    """What a writer sent before it died is granted when it arrives after."""
    writer_dead = LeaseTable.writer_dead

    def forgetful(self: LeaseTable, writer_id: str) -> list[Lease]:
        ended = writer_dead(self, writer_id)
        self._dead_writers.clear()
        return ended

    return mock.patch.object(LeaseTable, "writer_dead", forgetful)


def _release_said_once() -> AbstractContextManager[object]:
    """The word that a writer is quiet is said once, heard or not."""

    async def release(self: DecodePeers, peer_id: str, request: Any) -> None:
        with contextlib.suppress(Exception):
            await self._links[peer_id].stub.Release(request, timeout=1.0)

    return mock.patch.object(DecodePeers, "_release", release)


def _prefill_for_nobody() -> AbstractContextManager[object]:
    """A prefill worker computes on for clients that have gone."""
    return mock.patch.object(Endings, "drop")


def _decode_for_nobody() -> AbstractContextManager[object]:
    """A decode worker goes on with answers that nobody waits for."""
    return mock.patch.object(DecodeLoop, "_drop")


def _half_full_blocks_leave() -> AbstractContextManager[object]:
    """A block is pushed although its last positions are still to come."""
    settle = PrefillLoop._settle

    def early(self: PrefillLoop, prompts: Any, plans: Any, first_tokens: Any) -> None:
        for prompt, plan in zip(prompts, plans, strict=True):
            end = prompt.num_computed + plan.num_tokens
            blocks = -(-end // self._engine.block_size_tokens)
            if not plan.is_last and prompt.handoff is not None and blocks > prompt.num_pushed_blocks:
                prompt.handoff.push_kv(prompt.num_pushed_blocks, blocks)
                prompt.num_pushed_blocks = blocks
        settle(self, prompts, plans, first_tokens)

    return mock.patch.object(PrefillLoop, "_settle", early)


def _broken_pairs_stay_broken() -> AbstractContextManager[object]:
    return mock.patch.object(DecodePeers, "broken")


def _late_tokens_after_the_end() -> AbstractContextManager[object]:
    """Workers' tokens are delivered past the end of the answer."""
    accept = Answer.accept

    def more(self: Answer, tokens: Any, finish_reason: Any = None) -> None:
        tokens = list(tokens)
        accept(self, tokens, finish_reason)
        if finish_reason is not None:
            self._unread_ids.append(self.generated[-1])

    return mock.patch.object(Answer, "accept", more)


def _states_stay_away() -> AbstractContextManager[object]:
    """What comes back from host memory finds its keys and values, and the state of whoever had the slot before."""
    restore = CacheMemory.restore

    def without_states(self: CacheMemory, saved: SavedSequence, block_ids: Any, slot: int) -> None:
        here = self.save(block_ids[:0], slot)
        restore(self, dataclasses.replace(saved, states=here.states), block_ids, slot)

    return mock.patch.object(CacheMemory, "restore", without_states)


def _growth_into_quarantine() -> AbstractContextManager[object]:
    """A sequence that needs a block takes one that a writer has yet to be silent on."""
    grow = LeaseTable.grow

    def greedy(self: LeaseTable, lease_id: str, epoch: int, num_blocks: int) -> Lease:
        for other in self.all_live():
            if other.state is LeaseState.QUARANTINED and other.block_ids:
                self._live[other.id] = dataclasses.replace(other, block_ids=other.block_ids[:-1])
                self._memory._holdings[other.id].private.discard(other.block_ids[-1])
                self._memory.blocks.free(other.block_ids[-1:])
        return grow(self, lease_id, epoch, num_blocks)

    return mock.patch.object(LeaseTable, "grow", greedy)


def _shared_before_it_is_there() -> AbstractContextManager[object]:
    """A prompt's blocks are shared as soon as they are reserved."""
    reserve = LeaseTable.reserve

    def eager(self: LeaseTable, *args: Any, **named: Any) -> Lease:
        lease = reserve(self, *args, **named)
        with self._lock:
            self._memory.keep(lease)
        return lease

    return mock.patch.object(LeaseTable, "reserve", eager)


def _held_blocks_are_written() -> AbstractContextManager[object]:
    """The writer sends what the reader holds already."""
    build = TransferPlan.build

    def whole(*args: Any) -> TransferPlan:
        return build(*args[:4])

    return mock.patch.object(TransferPlan, "build", whole)


def _evicted_forgets_its_newest_block() -> AbstractContextManager[object]:
    save = CacheMemory.save

    def short(self: CacheMemory, block_ids: Any, slot: int) -> SavedSequence:
        return save(self, (*block_ids[:-1], block_ids[0]), slot)

    return mock.patch.object(CacheMemory, "save", short)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """breaks: what of the invariants it must break, as a pattern for the violation. scenario: one in which it does, with most
    seeds or with some."""

    plant: Callable[[], AbstractContextManager[object]]
    breaks: str
    scenario: Scenario


def _early_cancels_are_forgotten() -> AbstractContextManager[object]:
    """What is cancelled before its reservation has come is reserved all the same."""
    return mock.patch.object(LeaseTable, "find_or_refuse", LeaseTable.find)


def _local_prompts_are_computed_for_nobody() -> AbstractContextManager[object]:
    """A decode worker computes prompts whose memory it has given back."""
    return mock.patch.object(LocalPrefill, "forget", return_value=set())


def _local_prompts_begin_from_what_is_there() -> AbstractContextManager[object]:
    """A prompt that is computed on the decode worker starts from the state that its slot's last owner left."""
    compute = LocalPrefill._compute

    def stale(self: LocalPrefill, lease: Lease, *rest: Any) -> Any:
        engine = self.engine
        forward = engine.forward

        def from_there(chunks: Any, *rest: Any, **named: Any) -> Any:
            return forward([dataclasses.replace(c, context_tokens=max(1, c.context_tokens)) for c in chunks], *rest, **named)

        with mock.patch.object(engine, "forward", from_there):
            return compute(self, lease, *rest)

    return mock.patch.object(LocalPrefill, "_compute", stale)


def _memory_of_a_local_prompt_is_free_too_soon() -> AbstractContextManager[object]:
    """Others get the memory of a prompt as soon as it is computed, and its answer goes on in it."""
    computed = LeaseTable.computed

    def hasty(self: LeaseTable, lease_id: str, epoch: int) -> Lease:
        lease = computed(self, lease_id, epoch)
        self._memory.free(lease)
        return lease

    return mock.patch.object(LeaseTable, "computed", hasty)


_EARLY_LEAVERS = tuple(
    Ask(0.1 * place, tuple(range(place, 12 + place)), 28, leaves_after_s=0.25 + 0.05 * place) for place in range(1, 11)
)
_MEMORY = r"landed in|granted while|which is not its prompt's"
_ANSWER = r"it got"
_LEAK = r"are in use"
_RECOVERY = r"after all had healed"
_FOR_NOBODY = r"still computes for"


def _asks(number: int, num_prompt: int = 20, max_new_tokens: int = 4, leaves_after_s: float | None = None) -> tuple[Ask, ...]:
    """A tenth of a second apart."""
    prompts = (tuple(range(place, place + num_prompt)) for place in range(number))
    return tuple(
        Ask(0.1 * place, prompt, max_new_tokens, leaves_after_s=leaves_after_s) for place, prompt in enumerate(prompts, start=1)
    )


_PREFILL, _DECODE = ("prefill", 0), ("decode", 0)
_SLOW = Faults(delay_s=(0.0, 0.5))
_SPOILT = Faults(state_changed=0.3, notify_changed=0.3)
_LEAVING = Scenario(0, asks=_asks(6, leaves_after_s=0.15), faults=_SLOW)
# The router's cancel comes later still: it would refuse them too.
_LATE_ORDERS = (Cut(0.05, _PREFILL, _DECODE, 2.0), Kill(0.6, "prefill", 0), Cut(0.55, ("router", 0), _DECODE, 2.2))
_TORN = tuple(Reset(0.1 + 0.03 * place, _PREFILL, _DECODE) for place in range(30))
_HUNG = Faults(delay_s=(0.0, 0.4), write_hangs=0.15, hang_s=4.0)
_PRESSED = Scenario(0, blocks={"prefill": 48, "decode": 24}, overcommit=20.0, asks=_asks(6, 8, 60))
_ALIKE = tuple(Ask(0.05 * place, (*range(20), place), 8) for place in range(1, 9))
_LOCAL = Scenario(0, asks=_asks(6, 10, 12), local_prefill_tokens=96)
_LOCAL_LEAVERS = tuple(dataclasses.replace(ask, at_s=0.1 + 0.001 * i, leaves_after_s=0.03) for i, ask in enumerate(_LOCAL.asks))
_TWO_DEATHS = (Kill(0.4, "prefill", 0), Kill(0.6, "prefill", 1))

MUTATIONS: dict[str, Mutation] = {
    "no quarantine": Mutation(_no_quarantine, _MEMORY, _LEAVING),
    "no checksum over the state": Mutation(_no_state_checksum, _ANSWER, Scenario(0, asks=_asks(6), faults=_SPOILT)),
    "no checks of the record": Mutation(_no_record_checksum, _ANSWER, Scenario(0, asks=_asks(6), faults=_SPOILT)),
    "attempt numbers ignored": Mutation(
        _attempt_numbers_ignored,
        _MEMORY,
        Scenario(0, chunk_tokens=4, asks=_asks(6), faults=_HUNG, faults_until_s=20.0),
    ),
    "prefill frees before quiet": Mutation(_prefill_frees_before_quiet, _MEMORY, _LEAVING),
    "quiet while writing": Mutation(_sender_quiet_while_writing, _MEMORY, _LEAVING),
    "record before the bytes": Mutation(
        _record_before_the_bytes, f"{_MEMORY}|{_ANSWER}", Scenario(0, asks=_asks(6), faults=_SLOW)
    ),
    "delivered tokens forgotten": Mutation(
        _delivered_tokens_forgotten,
        _ANSWER,
        Scenario(0, num_decode=2, asks=_asks(6, 10, 30), acts=(Kill(0.6, "decode", 0),)),
    ),
    "tokens in order of arrival": Mutation(
        _tokens_in_order_of_arrival, _ANSWER, Scenario(0, num_decode=2, message_delay_s=(0.0, 0.3), asks=_asks(6))
    ),
    "deaths not told": Mutation(
        _deaths_not_told, _LEAK, Scenario(0, num_prefill=2, asks=_asks(6), faults=_SLOW, acts=_TWO_DEATHS)
    ),
    "the dead are heard": Mutation(
        _the_dead_are_heard,
        _LEAK,
        Scenario(0, num_prefill=2, message_delay_s=(0.0, 0.02), asks=_asks(8), acts=_LATE_ORDERS),
    ),
    "early cancels are forgotten": Mutation(
        _early_cancels_are_forgotten,
        _FOR_NOBODY,
        Scenario(0, num_prefill=1, num_decode=1, message_delay_s=(0.0, 0.3), asks=_EARLY_LEAVERS),
    ),
    "release said once": Mutation(
        _release_said_once, _LEAK, Scenario(0, message_delay_s=(0.0, 0.05), asks=_asks(6), acts=_TORN)
    ),
    "prefill for nobody": Mutation(
        _prefill_for_nobody, _FOR_NOBODY, Scenario(0, chunk_tokens=3, asks=_asks(6, 50, leaves_after_s=0.2))
    ),
    "decode for nobody": Mutation(_decode_for_nobody, _FOR_NOBODY, Scenario(0, asks=_asks(6, 10, 60, leaves_after_s=0.4))),
    "half full blocks leave": Mutation(_half_full_blocks_leave, _ANSWER, Scenario(0, chunk_tokens=3, asks=_asks(6))),
    "broken pairs stay broken": Mutation(
        _broken_pairs_stay_broken, _RECOVERY, Scenario(0, asks=_asks(6), faults=Faults(write_fails=0.3))
    ),
    "states stay away": Mutation(_states_stay_away, _ANSWER, _PRESSED),
    "newest block forgotten": Mutation(_evicted_forgets_its_newest_block, _ANSWER, _PRESSED),
    "growth into quarantine": Mutation(
        _growth_into_quarantine,
        _MEMORY,
        dataclasses.replace(
            _PRESSED, asks=(*_asks(4, 8, 40), *_asks(6, 40, 4, leaves_after_s=0.15)), faults=Faults(delay_s=(0.0, 1.5))
        ),
    ),
    "shared before it is there": Mutation(
        _shared_before_it_is_there, f"{_MEMORY}|{_ANSWER}", Scenario(0, num_prefill=2, asks=_ALIKE, faults=_SLOW)
    ),
    "held blocks are written": Mutation(_held_blocks_are_written, _MEMORY, Scenario(0, asks=_ALIKE, faults=_SLOW)),
    "local prompts for nobody": Mutation(
        _local_prompts_are_computed_for_nobody, r"the thread steps ended", dataclasses.replace(_LOCAL, asks=_LOCAL_LEAVERS)
    ),
    "local prompts on a stale state": Mutation(_local_prompts_begin_from_what_is_there, _ANSWER, _LOCAL),
    "memory of a local prompt is free too soon": Mutation(
        _memory_of_a_local_prompt_is_free_too_soon, rf"{_ANSWER}|{_MEMORY}|{_LEAK}|the thread steps ended", _LOCAL
    ),
    "one token too many": Mutation(_late_tokens_after_the_end, _ANSWER, Scenario(0, asks=_asks(6))),
}
"""By what the rule is."""

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
from decode_worker.loop import DecodeLoop
from decode_worker.worker import DecodeWorker
from prefill_worker.inbox import MemoryQuiet
from prefill_worker.loop import PrefillLoop
from prefill_worker.peers import DecodePeers
from prefill_worker.prompt import RunningPrompt
from router.answer import Answer
from router.assembly import TokenAssembler
from router.attempt import Attempt
from transfer.handoff import Outgoing
from transfer.lease import LeaseTable
from transfer.lease_state import Lease, LeaseState
from transfer.outgoing_state import OutgoingState
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

    def same(self: LeaseTable, request: Any, attempt: int, router_id: str, writer_id: str) -> Lease:
        return reserve(self, request, 1, router_id, writer_id)

    return mock.patch.object(LeaseTable, "reserve", same)


def _prefill_frees_before_quiet() -> AbstractContextManager[object]:
    """The prefill worker takes its memory back, and tells the decode worker, without waiting for the sender."""

    def abort(self: PrefillLoop, prompt: RunningPrompt, reason: str) -> None:
        if not prompt.aborting:
            prompt.aborting = True
            assert prompt.handoff is not None
            prompt.handoff.abort(lambda: None)
            self.inbox.put(MemoryQuiet(prompt.task.key))

    return mock.patch.object(PrefillLoop, "_abort", abort)


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
    return mock.patch.object(PrefillLoop, "_drop")


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


@dataclasses.dataclass(frozen=True)
class Mutation:
    """breaks: what of the invariants it must break, as a pattern for the violation. begin: where the search for a run that
    shows it starts, so that it is short; the seeds are among those that are run without a mutation too."""

    plant: Callable[[], AbstractContextManager[object]]
    breaks: str
    begin: int = 0


_MEMORY = r"landed in|granted while|which is not its prompt's"
_ANSWER = r"it got"
_LEAK = r"are in use"
_RECOVERY = r"after all had healed"
_FOR_NOBODY = r"still computes for"

MUTATIONS: dict[str, Mutation] = {
    "no quarantine": Mutation(_no_quarantine, _MEMORY),
    "no checksum over the state": Mutation(_no_state_checksum, _ANSWER, begin=20),
    "no checks of the record": Mutation(_no_record_checksum, _ANSWER, begin=20),
    "attempt numbers ignored": Mutation(_attempt_numbers_ignored, _MEMORY, begin=120),
    "prefill frees before quiet": Mutation(_prefill_frees_before_quiet, _MEMORY),
    "quiet while writing": Mutation(_sender_quiet_while_writing, _MEMORY),
    "record before the bytes": Mutation(_record_before_the_bytes, f"{_MEMORY}|{_ANSWER}"),
    "delivered tokens forgotten": Mutation(_delivered_tokens_forgotten, _ANSWER),
    "tokens in order of arrival": Mutation(_tokens_in_order_of_arrival, _ANSWER),
    "deaths not told": Mutation(_deaths_not_told, _LEAK, begin=40),
    "the dead are heard": Mutation(_the_dead_are_heard, _LEAK, begin=320),
    "release said once": Mutation(_release_said_once, _LEAK, begin=100),
    "prefill for nobody": Mutation(_prefill_for_nobody, _FOR_NOBODY, begin=150),
    "decode for nobody": Mutation(_decode_for_nobody, _FOR_NOBODY, begin=150),
    "half full blocks leave": Mutation(_half_full_blocks_leave, _ANSWER),
    "broken pairs stay broken": Mutation(_broken_pairs_stay_broken, _RECOVERY),
    "one token too many": Mutation(_late_tokens_after_the_end, _ANSWER),
}
"""By what the rule is."""

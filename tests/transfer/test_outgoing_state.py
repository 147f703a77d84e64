"""The writer's automaton: its table is its drawing, and each hand-off has one outcome."""

import re

import pytest

from tandem.errors import TransferFailed
from tests.transfer.helpers import Pair, grant_of
from transfer.handoff import HandoffResult, Outgoing
from transfer.outgoing_state import OPEN_STATES, OUTGOING_MOVES, OutgoingState

S = OutgoingState


def test_every_state_has_its_moves_and_stands_in_the_drawing() -> None:
    assert set(OUTGOING_MOVES) == set(S)
    drawing = S.__doc__ or ""
    for state in S:
        assert re.search(rf"\b{state.value}\b", drawing), state


def test_the_record_is_reached_once_and_from_an_open_hand_off_only() -> None:
    assert {state for state in S if S.RECORDED in OUTGOING_MOVES[state]} == {S.FINISHING}
    reachable, frontier = set(), {S.FAILED, S.ABORTED, S.QUIET, S.RECORDED}
    while frontier:
        reachable |= frontier
        frontier = {after for state in frontier for after in OUTGOING_MOVES[state]} - reachable
    assert not reachable & OPEN_STATES


def test_a_caller_can_give_up_at_any_time_and_is_told_of_quiet() -> None:
    assert all(S.ABORTED in OUTGOING_MOVES[state] for state in S)
    assert [state for state in S if S.QUIET in OUTGOING_MOVES[state]] == [S.ABORTED]


def outgoing_of(pair: Pair, name: str, block: int) -> Outgoing:
    lease = pair.reserve(num_prompt=3, request_id=name)
    handoff = pair.sender.begin(grant_of(lease), name, 1, (block,), block)
    handoff.finish(3, 42, pair.clock.now(), lambda outcome: pair.results.append(outcome))
    return handoff._outgoing


def test_a_recorded_hand_off_has_no_second_outcome_when_the_pair_breaks_in_the_same_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Pair()
    first, second = outgoing_of(pair, "one", 0), outgoing_of(pair, "two", 1)
    send_record, broken = pair.agent.notify, iter([False, True])

    def notify(peer: str, message: bytes) -> None:
        if pair.sender._next() is None and next(broken, False):  # everything is written: these are the records
            raise TransferFailed("the connection broke")
        send_record(peer, message)

    original = pair.sender._send_record

    def send(outgoing: Outgoing) -> None:
        monkeypatch.setattr(pair.agent, "notify", notify)
        original(outgoing)
        monkeypatch.setattr(pair.agent, "notify", send_record)

    monkeypatch.setattr(pair.sender, "_send_record", send)
    pair.run(0.1)
    assert [type(result) for result in pair.results] == [HandoffResult, TransferFailed]
    assert (first.state, second.state) == (S.RECORDED, S.FAILED)


def test_the_states_of_a_hand_off_that_is_given_up_after_its_failure() -> None:
    pair = Pair()
    lease = pair.reserve(num_prompt=3)
    handoff = pair.sender.begin(grant_of(lease), "r", 1, (0,), 0)
    pair.sender.step()
    assert handoff._outgoing.state is S.OPEN
    pair.sender.disconnect("d", dead=True)
    pair.sender.step()
    assert handoff._outgoing.state is S.FAILED
    handoff.abort(lambda: pair.quiet.append("quiet"))
    pair.sender.step()
    assert handoff._outgoing.state is S.QUIET
    assert pair.quiet == ["quiet"]
    assert handoff.failure is not None

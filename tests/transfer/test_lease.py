"""Memory is owned by at most one lease, is freed exactly once, and not before its writer is silent."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from tandem.clock import FakeClock
from tandem.errors import InvalidRequest, LeaseLost, NoRoom
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tests.transfer.helpers import BLOCK, EPOCH, SPECS, lease_table, request
from transfer.lease import RECORD_GRACE_S, LeaseTable
from transfer.lease_memory import AdmissionPolicy, claim_of
from transfer.lease_state import AWAITED_STATES, FINAL_STATES, LIVE_STATES, MOVES, NO_SLOT, Lease, LeaseState

S = LeaseState


def table(num_blocks: int = 16, num_slots: int = 4) -> tuple[LeaseTable, FakeClock]:
    clock = FakeClock(100.0)
    return lease_table(clock, num_blocks, num_slots, ttl_s=60.0), clock


def tight(num_blocks: int = 16, num_slots: int = 4, overcommit: float = 1.0, batch_share: float = 0.8) -> LeaseTable:
    return lease_table(FakeClock(100.0), num_blocks, num_slots, policy=AdmissionPolicy(overcommit, batch_share))


def reserve(leases: LeaseTable, request_id: str = "r", num_prompt: int = 10) -> Lease:
    return leases.reserve(request(num_prompt, request_id=request_id), 1, "router", "p")


def reach(leases: LeaseTable, state: LeaseState, request_id: str = "r") -> Lease:
    """A lease that stands in `state`."""
    lease = reserve(leases, request_id)
    if state is S.RECEIVING:
        leases.write_seen(lease.id, EPOCH)
    elif state in (S.QUARANTINED, S.ABORTED):
        leases.abort(lease.id, "test")
    elif state is S.EXPIRED:
        leases.expire(lease.expires_at)
    if state in (S.ABORTED, S.EXPIRED):
        leases.writer_quiet(lease.id, EPOCH, "p")
    if state in (S.VERIFIED, S.RUNNING, S.SWAPPED, S.RELEASED):
        leases.verified(lease.id, EPOCH)
    if state in (S.RUNNING, S.SWAPPED, S.RELEASED):
        leases.start_running(lease.id, EPOCH)
    if state is S.SWAPPED:
        leases.swap_out(lease.id, EPOCH, "test")
    if state is S.RELEASED:
        leases.release(lease.id, EPOCH)
    assert leases.get(lease.id, EPOCH).state is state
    return leases.get(lease.id, EPOCH)


def free(leases: LeaseTable) -> bool:
    return not any(leases.counts_by_state().values()) and leases.check() == []


def test_a_lease_whose_grant_was_never_heard_ends_and_its_attempt_is_refused_from_then_on() -> None:
    leases, _ = table()
    reserve(leases, "heard")
    reserve(leases, "lost")
    leases.abandon("lost", 1, "another writer")
    assert leases.find("lost", 1) is not None
    leases.abandon("lost", 1, "p")
    assert leases.find("lost", 1) is None
    leases.abandon("late", 1, "p")  # the reservation itself is still on its way
    with pytest.raises(LeaseLost, match="abandoned"):
        reserve(leases, "late")
    assert leases.find("heard", 1) is not None
    assert leases.check() == []


def test_a_reservation_holds_prompt_growth_and_one_slot() -> None:
    leases, _ = table()
    lease = reserve(leases, num_prompt=10)
    assert len(lease.block_ids) == -(-(10 + 4 - 1) // BLOCK)
    assert lease.state is S.RESERVED
    assert leases.check() == []


def test_a_reservation_is_all_or_nothing() -> None:
    leases, _ = table(num_blocks=5, num_slots=4)
    reserve(leases, "a")
    with pytest.raises(NoRoom, match="4 KV blocks wanted, 1 free"):
        reserve(leases, "b")
    leases, _ = table(num_blocks=16, num_slots=1)
    reserve(leases, "a")
    with pytest.raises(NoRoom, match="no state slot"):
        reserve(leases, "b")
    assert leases.check() == []
    assert leases.counts_by_state()["reserved"] == 1


@pytest.mark.parametrize(("num_prompt", "field"), [(10, "max_new_tokens"), (65, "prompt")])
def test_what_could_never_fit_is_refused_at_once_naming_the_limit(num_prompt: int, field: str) -> None:
    leases, _ = table(num_blocks=16)
    with pytest.raises(InvalidRequest, match="at most 64") as caught:
        leases.reserve(request(num_prompt, max_new_tokens=60), 1, "router", "p")
    assert caught.value.field == field


def test_asking_again_for_the_same_attempt_gives_the_same_lease() -> None:
    leases, _ = table()
    assert reserve(leases).id == reserve(leases).id
    assert leases.reserve(request(), 2, "router", "p").id != reserve(leases).id
    with pytest.raises(NoRoom, match="another writer"):
        leases.reserve(request(), 1, "router", "p-2")


def test_nonce_and_id_are_new_for_every_lease() -> None:
    leases, _ = table()
    grants = [reserve(leases, str(i)) for i in range(4)]
    assert len({g.id for g in grants}) == len({g.nonce for g in grants}) == 4


def test_the_whole_life_of_a_good_lease() -> None:
    leases, clock = table()
    lease = reserve(leases)
    clock.advance(1)
    leases.write_seen(lease.id, EPOCH)
    clock.advance(1)
    leases.verified(lease.id, EPOCH)
    leases.start_running(lease.id, EPOCH)
    clock.advance(1)
    assert leases.release(lease.id, EPOCH)
    history = leases.get(lease.id, EPOCH).history
    assert [(t.at_s, t.state) for t in history] == [
        (100.0, S.RESERVED),
        (101.0, S.RECEIVING),
        (102.0, S.VERIFIED),
        (102.0, S.RUNNING),
        (103.0, S.RELEASED),
    ]
    assert free(leases)


def test_a_record_may_come_before_any_notice() -> None:
    leases, _ = table()
    assert leases.verified(reserve(leases).id, EPOCH).state is S.VERIFIED


@pytest.mark.parametrize("state", [S.RESERVED, S.RECEIVING])
def test_memory_of_an_aborted_lease_waits_for_its_writer(state: LeaseState) -> None:
    leases, _ = table()
    lease = reach(leases, state)
    leases.abort(lease.id, "client went away")
    assert leases.counts_by_state()["quarantined"] == 1
    # Nobody else gets it meanwhile.
    others = {b for i in range(3) for b in reserve(leases, f"o{i}").block_ids}
    assert not others & set(lease.block_ids)
    leases.writer_quiet(lease.id, EPOCH, "p")
    assert leases.get(lease.id, EPOCH).state is S.ABORTED
    assert leases.check() == []


def test_a_lease_whose_prompt_is_computed_here_awaits_no_record_and_never_expires() -> None:
    leases, clock = table()
    lease = leases.reserve(request(request_id="r"), 1, "router", "d", is_local=True)
    assert (lease.state, leases.num_awaited) == (S.COMPUTING, 0)
    clock.advance(1e6)
    assert leases.expire(clock.now()) == []
    assert leases.write_seen(lease.id, EPOCH).state is S.COMPUTING
    assert leases.writer_quiet(lease.id, EPOCH, "d").state is S.COMPUTING
    assert leases.writer_dead("d") == []
    with pytest.raises(LeaseLost, match="computing"):
        leases.verified(lease.id, EPOCH)
    with pytest.raises(LeaseLost, match="computing"):
        leases.start_running(lease.id, EPOCH)
    assert leases.computed(lease.id, EPOCH).state is S.VERIFIED
    leases.start_running(lease.id, EPOCH)
    assert leases.release(lease.id, EPOCH)
    assert free(leases)


def test_only_a_lease_whose_prompt_is_computed_here_becomes_computed() -> None:
    leases, _ = table()
    with pytest.raises(LeaseLost, match="not computing"):
        leases.computed(reserve(leases).id, EPOCH)


def test_memory_of_a_lease_whose_prompt_is_computed_here_is_free_at_once_when_aborted() -> None:
    leases, _ = table()
    leases.abort(leases.reserve(request(request_id="r"), 1, "router", "d", is_local=True).id, "client went away")
    assert free(leases)


@pytest.mark.parametrize("state", [S.VERIFIED, S.RUNNING])
def test_memory_of_a_verified_lease_is_free_at_once_when_aborted(state: LeaseState) -> None:
    leases, _ = table()
    leases.abort(reach(leases, state).id, "client went away")
    assert free(leases)


def test_an_expired_lease_is_quarantined_and_then_free() -> None:
    leases, clock = table()
    lease = reserve(leases)
    clock.advance(59.9)
    assert leases.expire(clock.now()) == []
    clock.advance(0.1)
    assert [late.id for late in leases.expire(clock.now())] == [lease.id]
    assert leases.counts_by_state()["quarantined"] == 1
    assert leases.writer_quiet(lease.id, EPOCH, "p").state is S.EXPIRED
    assert free(leases)


def test_a_sign_of_life_of_the_writer_moves_the_expiry() -> None:
    leases, clock = table()
    lease = reserve(leases)
    for _ in range(5):
        clock.advance(50)
        leases.write_seen(lease.id, EPOCH)
        assert leases.expire(clock.now()) == []
    clock.advance(60)
    assert len(leases.expire(clock.now())) == 1


@pytest.mark.parametrize("state", [S.VERIFIED, S.RUNNING])
def test_what_is_verified_does_not_expire(state: LeaseState) -> None:
    leases, clock = table()
    reach(leases, state)
    clock.advance(1e6)
    assert leases.expire(clock.now()) == []


def test_a_lost_record_frees_without_quarantine_once_its_writer_has_finished() -> None:
    leases, clock = table()
    lease = reserve(leases)
    leases.writer_quiet(lease.id, EPOCH, "p", record_sent=True)
    assert leases.get(lease.id, EPOCH).state is S.RESERVED
    clock.advance(RECORD_GRACE_S)
    assert leases.expire(clock.now())[0].state is S.EXPIRED
    assert free(leases)


def test_word_of_a_sent_record_does_not_overtake_the_record() -> None:
    leases, _ = table()
    lease = reserve(leases)
    leases.writer_quiet(lease.id, EPOCH, "p", record_sent=True)
    assert leases.verified(lease.id, EPOCH).state is S.VERIFIED


def test_a_late_word_of_the_writer_does_not_touch_a_running_sequence() -> None:
    leases, _ = table()
    lease = reach(leases, S.RUNNING)
    for record_sent in (True, False):
        assert leases.writer_quiet(lease.id, EPOCH, "p", record_sent=record_sent).state is S.RUNNING
    assert leases.writer_dead("p") == []
    assert leases.counts_by_state()["running"] == 1


def test_a_dead_writer_frees_all_that_waited_for_it_and_nothing_else() -> None:
    leases, _ = table(num_blocks=32, num_slots=8)
    for i, state in enumerate((S.RESERVED, S.RECEIVING, S.QUARANTINED, S.VERIFIED)):
        reach(leases, state, str(i))
    other = leases.reserve(request(request_id="x"), 1, "router", "p-2")
    assert len(leases.writer_dead("p")) == 3
    assert leases.get(other.id, EPOCH).state is S.RESERVED
    assert leases.counts_by_state() == {
        "reserved": 1,
        "receiving": 0,
        "computing": 0,
        "verified": 1,
        "running": 0,
        "swapped": 0,
        "quarantined": 0,
    }
    assert leases.check() == []


def test_a_reservation_that_arrives_after_its_writer_was_found_dead_is_refused() -> None:
    leases, _ = table()
    leases.writer_dead("p")
    with pytest.raises(LeaseLost, match="dead"):
        leases.reserve(request(), 1, "router", "p")  # its process sent it before it died
    assert leases.check() == []
    assert leases.reserve(request(), 2, "router", "p-2").state is S.RESERVED


@pytest.mark.parametrize("state", FINAL_STATES)
def test_an_ended_lease_is_never_freed_again(state: LeaseState) -> None:
    leases, clock = table()
    lease = reach(leases, state)
    again = reserve(leases, "new")  # takes the same memory
    assert set(again.block_ids) & set(lease.block_ids)
    assert leases.release(lease.id, EPOCH) is False
    leases.abort(lease.id, "again")
    leases.writer_quiet(lease.id, EPOCH, "p")
    for act in (leases.verified, leases.start_running, leases.write_seen):
        with pytest.raises(LeaseLost):
            act(lease.id, EPOCH)
    assert leases.expire(clock.now()) == []
    assert leases.get(again.id, EPOCH).state is S.RESERVED
    assert leases.check() == []


def test_a_lease_of_another_life_or_writer_is_lost() -> None:
    leases, _ = table()
    lease = reserve(leases)
    for act in (leases.verified, leases.start_running, leases.write_seen, leases.release, leases.get):
        with pytest.raises(LeaseLost):
            act(lease.id, EPOCH + 1)
        with pytest.raises(LeaseLost):
            act("nobody", EPOCH)
    with pytest.raises(LeaseLost, match="not held by writer q"):
        leases.writer_quiet(lease.id, EPOCH, "q")
    with pytest.raises(LeaseLost):
        leases.abort("nobody", "test")


def test_a_lease_aborted_before_it_runs_does_not_run() -> None:
    leases, _ = table()
    lease = reach(leases, S.VERIFIED)
    leases.abort(lease.id, "client went away")
    with pytest.raises(LeaseLost, match="client went away"):
        leases.start_running(lease.id, EPOCH)


def test_only_a_running_sequence_is_released() -> None:
    leases, _ = table()
    lease = reach(leases, S.RECEIVING)
    with pytest.raises(LeaseLost, match="not running"):
        leases.release(lease.id, EPOCH)


def test_find_knows_the_live_lease_of_an_attempt() -> None:
    leases, _ = table()
    lease = reserve(leases)
    found = leases.find("r", 1)
    assert found is not None
    assert found.id == lease.id
    assert leases.find("r", 2) is None
    leases.writer_quiet(lease.id, EPOCH, "p")
    assert leases.find("r", 1) is None


def test_counts_and_ages_name_every_live_state_even_when_idle() -> None:
    leases, clock = table()
    assert leases.counts_by_state() == leases.oldest_age_by_state() == {state.value: 0 for state in LIVE_STATES}
    reserve(leases, "a")
    clock.advance(5)
    reserve(leases, "b")
    assert leases.oldest_age_by_state()["reserved"] == 5.0
    assert leases.ended_by_state() == {"released": 0, "aborted": 0, "expired": 0}


def test_check_names_memory_that_nobody_holds_or_two_hold() -> None:
    leases, _ = table()
    lease = reserve(leases)
    leases._live[lease.id] = replace(lease, block_ids=lease.block_ids[1:])
    assert leases.check() == [f"block {lease.block_ids[0]}"]
    leases._live["thief"] = replace(lease, id="thief", block_ids=())
    assert f"slot {lease.slot}" in leases.check()


def test_every_state_has_its_moves_and_the_final_ones_have_none() -> None:
    assert set(MOVES) == set(S) == set(LIVE_STATES) | set(FINAL_STATES)
    assert all(not MOVES[state] for state in FINAL_STATES)
    assert {target for moves in MOVES.values() for target in moves} == set(S) - {S.RESERVED}


# ---- growth, eviction, and who is let in ----


def long_answer(name: str, num_prompt: int = 8, max_new_tokens: int = 33, **kind: object) -> Request:
    """With 8 tokens of prompt: 2 blocks, 3 with the first token, 10 in all."""
    rules = StopRules(max_new_tokens)
    return Request(name, tuple(range(num_prompt)), SamplingParams(), rules, **kind)  # type: ignore[arg-type]


def run(leases: LeaseTable, asked: Request) -> Lease:
    lease = leases.reserve(asked, 1, "router", "p")
    leases.verified(lease.id, EPOCH)
    return leases.start_running(lease.id, EPOCH)


def test_with_overcommit_a_reservation_takes_the_prompts_blocks_and_counts_its_expected_growth() -> None:
    leases = tight(num_blocks=13, overcommit=4.0)
    first = leases.reserve(long_answer("a"), 1, "router", "p")
    assert len(first.block_ids) == 3
    assert (first.claim.expected, first.claim.whole) == (4, 10)
    assert leases.num_blocks_counted() == 4
    for name in ("b", "c"):
        leases.reserve(long_answer(name), 1, "router", "p")
    with pytest.raises(NoRoom, match="4 KV blocks wanted, 1 free"):  # although 4 are, which those three are to grow into
        leases.reserve(long_answer("d"), 1, "router", "p")
    assert leases.check() == []


def test_what_has_outgrown_its_expectation_counts_with_what_it_holds() -> None:
    leases = tight(num_blocks=13, overcommit=4.0)
    lease = run(leases, long_answer("a"))
    assert leases.grow(lease.id, EPOCH, 10).block_ids[:3] == lease.block_ids
    assert leases.num_blocks_counted() == 10
    with pytest.raises(NoRoom):
        leases.reserve(long_answer("b"), 1, "router", "p")


def test_a_resumed_request_reserves_its_whole_answer() -> None:
    leases = tight(overcommit=4.0)
    assert len(leases.reserve(long_answer("a", generated=(1, 2)), 1, "router", "p").block_ids) == 10


def test_growth_is_all_or_nothing_and_of_the_running_alone() -> None:
    leases = tight(num_blocks=10, overcommit=4.0)
    lease = run(leases, long_answer("a"))
    leases.reserve(long_answer("b"), 1, "router", "p")
    with pytest.raises(NoRoom, match="5 KV blocks wanted, 4 free"):
        leases.grow(lease.id, EPOCH, 8)
    assert leases.get(lease.id, EPOCH) == lease
    assert leases.grow(lease.id, EPOCH, 2) == lease, "it has so many already"
    waiting = leases.find("b", 1)
    assert waiting is not None
    with pytest.raises(LeaseLost, match="not running"):
        leases.grow(waiting.id, EPOCH, 4)


def test_growth_takes_nothing_that_a_writer_may_still_reach() -> None:
    leases = tight(num_blocks=10, num_slots=3, overcommit=4.0)
    lease = run(leases, long_answer("a"))
    quarantined = leases.reserve(long_answer("b"), 1, "router", "q")
    leases.abort(quarantined.id, "client went away")
    grown = leases.grow(lease.id, EPOCH, 7)
    assert not set(grown.block_ids) & set(quarantined.block_ids)
    with pytest.raises(NoRoom):
        leases.grow(lease.id, EPOCH, 8)
    leases.writer_quiet(quarantined.id, EPOCH, "q")
    assert set(leases.grow(lease.id, EPOCH, 10).block_ids) == set(range(10))


def test_an_evicted_sequence_holds_nothing_and_comes_back_to_other_memory() -> None:
    leases = tight(num_blocks=10, num_slots=2, overcommit=4.0)
    lease = run(leases, long_answer("a"))
    away = leases.swap_out(lease.id, EPOCH, "evicted")
    assert (away.state, away.block_ids, away.slot) == (S.SWAPPED, (), NO_SLOT)
    assert leases.check() == []
    assert leases.history(f"block {lease.block_ids[0]}").endswith("swapped at 0.000 s (evicted)")
    with pytest.raises(NoRoom, match="1 evicted sequences come back first"):
        leases.reserve(long_answer("b"), 1, "router", "p")
    assert leases.num_blocks_counted() == 10
    back = leases.swap_in(lease.id, EPOCH, 6)
    assert (back.state, len(back.block_ids)) == (S.RUNNING, 6)
    assert leases.check() == []
    assert [step.state for step in back.history[-3:]] == [S.RUNNING, S.SWAPPED, S.RUNNING]
    assert leases.release(lease.id, EPOCH)
    assert free(leases)


def test_an_evicted_lease_that_is_aborted_frees_nothing_twice() -> None:
    leases = tight(overcommit=4.0)
    lease = run(leases, long_answer("a"))
    leases.swap_out(lease.id, EPOCH, "evicted")
    leases.writer_dead("p")  # its writer had finished long ago
    assert leases.abort(lease.id, "client went away").state is S.ABORTED
    assert free(leases)
    with pytest.raises(LeaseLost):
        leases.swap_in(lease.id, EPOCH, 3)


def test_batch_requests_leave_blocks_and_slots_to_the_others() -> None:
    batch = ServiceClass.BATCH
    leases = tight(num_blocks=40, num_slots=10, batch_share=0.5)
    leases.reserve(long_answer("a", service_class=batch), 1, "router", "p")
    leases.reserve(long_answer("b", service_class=batch), 1, "router", "p")
    with pytest.raises(NoRoom, match="batch requests would hold 30 KV blocks, 20 are theirs"):
        leases.reserve(long_answer("c", service_class=batch), 1, "router", "p")
    leases.reserve(long_answer("d"), 1, "router", "p")
    leases = tight(num_blocks=400, num_slots=4, batch_share=0.5)
    for name in ("a", "b"):
        leases.reserve(long_answer(name, service_class=batch), 1, "router", "p")
    with pytest.raises(NoRoom, match="batch requests hold 2 state slots, 2 are theirs"):
        leases.reserve(long_answer("c", service_class=batch), 1, "router", "p")
    leases.reserve(long_answer("d"), 1, "router", "p")


def test_a_lone_batch_request_may_take_what_it_needs() -> None:
    leases = tight(num_blocks=10, num_slots=1)
    leases.reserve(long_answer("a", service_class=ServiceClass.BATCH), 1, "router", "p")


@given(st.integers(1, 60), st.integers(1, 60), st.floats(1.0, 50.0), st.booleans())
def test_a_claim_begins_with_the_first_tokens_block_and_ends_with_the_whole_answer(
    num_prompt: int, max_new_tokens: int, overcommit: float, is_resumed: bool
) -> None:
    asked = long_answer("a", num_prompt, max_new_tokens + is_resumed, generated=(1,) * is_resumed)
    claim = claim_of(asked, SPECS, overcommit)
    assert claim.first <= claim.expected <= claim.whole == SPECS.blocks_for(asked.max_total_tokens)
    assert claim.first >= SPECS.blocks_for(min(len(asked.tokens) + 1, asked.max_total_tokens))


def test_many_threads_neither_lose_nor_share_memory() -> None:
    leases, _ = table(num_blocks=16, num_slots=4)
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for i in range(150):
                try:
                    lease = reserve(leases, f"{name}-{i}")
                except NoRoom:
                    continue
                if i % 3 == 0:
                    leases.abort(lease.id, "test")
                    leases.writer_quiet(lease.id, EPOCH, "p")
                else:
                    leases.verified(lease.id, EPOCH)
                    leases.start_running(lease.id, EPOCH)
                    assert leases.release(lease.id, EPOCH)
        except AssertionError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert free(leases)


class LeaseMachine(RuleBasedStateMachine):
    """Any order of calls, true or stale: memory always sums, nothing that is written is shared, and none is reused under a
    writer."""

    known: Bundle[Lease] = Bundle("known")
    policy = AdmissionPolicy(overcommit=3.0)

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock(100.0)
        self.leases = lease_table(self.clock, 12, 3, policy=self.policy)
        self.ids: list[str] = []
        # Of each block: the number of the prompts' block that it holds whole (all prompts begin alike), or nothing of use.
        self.content: dict[int, int | None] = {}
        # Leases whose writer may still write: granted, and neither confirmed quiet, nor dead, nor finished with a record.
        self.may_write: dict[str, Lease] = {}
        self.lives = {"p": 0, "q": 0}  # of each writer: ids are never used again

    def _act(self, act: str, lease: Lease, *args: object, **kwargs: object) -> None:
        try:
            getattr(self.leases, act)(lease.id, *args, **kwargs)
        except LeaseLost:
            return

    @rule(
        target=known,
        request_id=st.integers(0, 5),
        num_prompt=st.integers(1, 30),
        max_new_tokens=st.sampled_from([1, 4, 18]),
        writer=st.sampled_from(["p", "q"]),
        is_late=st.booleans(),
        is_new=st.booleans(),
    )
    def reserve(self, request_id: int, num_prompt: int, max_new_tokens: int, writer: str, is_late: bool, is_new: bool) -> Lease:
        """is_new: its writer can leave out blocks that are held."""
        key = f"r{request_id}-{len(self.ids) // 8}"
        life = max(0, self.lives[writer] - is_late)
        try:
            asked = request(num_prompt, max_new_tokens, key)
            lease = self.leases.reserve(asked, 1, "router", f"{writer}-{life}", may_share=is_new)
        except (NoRoom, LeaseLost):
            return replace(DUMMY, id="none")
        if lease.id not in self.ids:
            assert lease.writer_id in (f"{writer}-{life}" for writer, life in self.lives.items())
            self.ids.append(lease.id)
            self.may_write[lease.id] = lease
            self._is_out_of_reach(lease)
            self._holds_nothing(lease.block_ids[lease.num_held :])
        return lease

    def _is_out_of_reach(self, granted: Lease) -> None:
        """Of every writer but its own."""
        for other in self.may_write.values():
            if other.id != granted.id:
                assert not set(other.block_ids[other.num_held :]) & set(granted.block_ids)
                assert other.slot != granted.slot

    def _holds_nothing(self, block_ids: tuple[int, ...]) -> None:
        self.content.update(dict.fromkeys(block_ids))

    @rule(lease=known)
    def write_seen(self, lease: Lease) -> None:
        self._act("write_seen", lease, EPOCH)

    @rule(lease=known)
    def record(self, lease: Lease) -> None:
        self.may_write.pop(lease.id, None)
        with contextlib.suppress(LeaseLost):
            verified = self.leases.verified(lease.id, EPOCH)
            num_full = len(verified.request.tokens) // BLOCK
            self.content.update({block: number for number, block in enumerate(verified.block_ids[:num_full])})

    @rule(lease=known)
    def run(self, lease: Lease) -> None:
        self._act("start_running", lease, EPOCH)

    @rule(lease=known, count=st.integers(0, 12))
    def grow(self, lease: Lease, count: int) -> None:
        with contextlib.suppress(NoRoom, LeaseLost):
            before = self.leases.get(lease.id, EPOCH).block_ids
            grown = self.leases.grow(lease.id, EPOCH, count)
            self._is_out_of_reach(grown)
            self._holds_nothing(grown.block_ids[len(before) :])

    @rule(lease=known)
    def swap_out(self, lease: Lease) -> None:
        self._act("swap_out", lease, EPOCH, "test")

    @rule(lease=known, count=st.integers(0, 12))
    def swap_in(self, lease: Lease, count: int) -> None:
        with contextlib.suppress(NoRoom, LeaseLost):
            back = self.leases.swap_in(lease.id, EPOCH, count)
            self._is_out_of_reach(back)
            self._holds_nothing(back.block_ids)

    @rule(lease=known)
    def release(self, lease: Lease) -> None:
        self._act("release", lease, EPOCH)

    @rule(lease=known)
    def abort(self, lease: Lease) -> None:
        self._act("abort", lease, "test")

    @rule(lease=known, sent=st.booleans())
    def writer_quiet(self, lease: Lease, sent: bool) -> None:
        self.may_write.pop(lease.id, None)
        self._act("writer_quiet", lease, EPOCH, lease.writer_id, record_sent=sent)

    @rule(writer=st.sampled_from(["p", "q"]))
    def writer_dead(self, writer: str) -> None:
        dead = f"{writer}-{self.lives[writer]}"
        self.lives[writer] += 1
        self.may_write = {i: lease for i, lease in self.may_write.items() if lease.writer_id != dead}
        self.leases.writer_dead(dead)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.leases.expire(self.clock.now())

    @rule(lease=known)
    def stale(self, lease: Lease) -> None:
        self._act("release", lease, EPOCH - 1)
        self._act("writer_quiet", lease, EPOCH, "stranger")

    @invariant()
    def pools_sum_and_nothing_is_shared_but_what_was_held(self) -> None:
        assert self.leases.check() == []
        live = [lease for i in self.ids if (lease := self.leases.get(i, EPOCH)).state in LIVE_STATES]
        blocks = [block for lease in live for block in lease.block_ids[lease.num_held :]]
        assert len(blocks) == len(set(blocks))
        for lease in live:
            held = lease.block_ids[: lease.num_held]
            assert [self.content[block] for block in held] == list(range(len(held)))
        slots = [slot for lease in live for slot in lease.slots]
        assert len(set(slots)) == len(slots)
        away = [lease for lease in live if lease.state is S.SWAPPED]
        assert len(slots) == len(live) - len(away)
        assert not any(lease.block_ids for lease in away)
        assert sum(self.leases.counts_by_state().values()) == len(live)
        assert self.leases.num_awaited == sum(lease.state in AWAITED_STATES for lease in live)

    @invariant()
    def memory_that_may_be_written_is_not_free(self) -> None:
        for lease_id in self.may_write:
            assert self.leases.get(lease_id, EPOCH).state in LIVE_STATES


DUMMY = Lease("", EPOCH, b"", request(), 1, "router", "p", (), 0, 0.0, ())
LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase


class SharingMachine(LeaseMachine):
    policy = AdmissionPolicy(overcommit=3.0, keep_prefixes=True)


SharingMachine.TestCase.settings = LeaseMachine.TestCase.settings
TestSharingMachine = SharingMachine.TestCase

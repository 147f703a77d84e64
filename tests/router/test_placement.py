"""Where requests go, and why they cannot go anywhere."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from router.placement import Need, NeverFits, NoRoomNow, NoWorker, Placement, Snapshot, WorkerView, place
from tandem.clock import FakeClock
from tandem.errors import NoRoom
from tandem.request import Request, SamplingParams, ServiceClass, StopRules
from tests.transfer.helpers import SPECS, lease_table
from transfer.lease_memory import AdmissionPolicy


def prefill(worker_id: str, queue_tokens: int = 0, running: int = 0, ready: bool = True) -> WorkerView:
    return WorkerView(worker_id, ready, queue_tokens, running)


def decode(worker_id: str, blocks: int = 0, slots: int = 0, ready: bool = True, total: int = 10) -> WorkerView:
    return WorkerView(
        worker_id,
        ready,
        kv_blocks_used=blocks,
        kv_blocks_total=total,
        state_slots_used=slots,
        state_slots_total=4,
        block_size_tokens=16,
    )


NEED = Need("r", 32)


def test_the_shortest_prefill_queue_and_the_most_headroom_win() -> None:
    pools = Snapshot((prefill("p0", 500), prefill("p1", 20)), (decode("d0", blocks=5), decode("d1", blocks=1)))
    assert place(pools, NEED) == Placement("p1", "d1")


def test_full_state_slots_count_as_much_as_full_blocks() -> None:
    pools = Snapshot((prefill("p0"),), (decode("d0", blocks=0, slots=3), decode("d1", blocks=6, slots=1)))
    assert place(pools, NEED) == Placement("p0", "d1")


def test_a_worker_without_a_free_slot_holds_nothing() -> None:
    assert isinstance(place(Snapshot((prefill("p0"),), (decode("d0", slots=4),)), NEED), NoRoomNow)


def test_a_worker_without_enough_blocks_is_passed_over() -> None:
    pools = Snapshot((prefill("p0"),), (decode("d0", blocks=9), decode("d1", blocks=8, slots=3)))
    assert place(pools, NEED) == Placement("p0", "d1")


def test_workers_that_failed_are_avoided_while_there_are_others() -> None:
    pools = Snapshot((prefill("p0"), prefill("p1", 900)), (decode("d0"), decode("d1", blocks=8)))
    assert place(pools, NEED, {"p0", "d0"}) == Placement("p1", "d1")
    assert isinstance(place(Snapshot(pools.prefill[:1], pools.decode[:1]), NEED, {"p0", "d0"}), Placement)


def test_workers_that_are_not_ready_are_not_used() -> None:
    pools = Snapshot((prefill("p0", ready=False), prefill("p1", 900)), (decode("d0", ready=False), decode("d1", blocks=8)))
    assert place(pools, NEED) == Placement("p1", "d1")


def test_a_missing_pool_is_named() -> None:
    assert place(Snapshot((prefill("p0"),), (decode("d0", ready=False),)), NEED) == NoWorker("no decode worker is ready")
    assert place(Snapshot(), NEED) == NoWorker("no prefill and decode worker is ready")


def test_what_never_fits_is_told_from_what_does_not_fit_now() -> None:
    full = Snapshot((prefill("p0"),), (decode("d0", blocks=10),))
    assert isinstance(place(full, Need("r", 160)), NoRoomNow)
    assert isinstance(place(full, Need("r", 161)), NeverFits)


def test_a_large_worker_that_is_away_still_counts_as_one_that_fits() -> None:
    pools = Snapshot((prefill("p0"),), (decode("d0"), decode("d1", ready=False, total=100)))
    assert isinstance(place(pools, Need("r", 1600)), NoRoomNow)


def test_equal_workers_share_the_requests_and_a_request_finds_the_same_again() -> None:
    pools = Snapshot(tuple(prefill(f"p{i}") for i in range(4)), tuple(decode(f"d{i}") for i in range(4)))
    chosen = [place(pools, Need(f"r{i}", 32)) for i in range(200)]
    for role in ("prefill_id", "decode_id"):
        counts = [sum(getattr(c, role) == f"{role[0]}{i}" for c in chosen) for i in range(4)]
        assert min(counts) > 20
    assert chosen == [place(pools, Need(f"r{i}", 32)) for i in range(200)]


def test_batch_leaves_room_that_interactive_requests_get() -> None:
    worker = WorkerView("d0", kv_blocks_total=10, state_slots_total=4, block_size_tokens=16, batch_blocks=6, batch_slots=1)
    batch, quick = Need("r", 32, service_class=ServiceClass.BATCH), NEED
    worker = replace(worker, batch_share=0.75)
    pools = Snapshot((prefill("p0"),), (worker,))
    assert isinstance(place(pools, batch), NoRoomNow)
    assert place(pools, quick) == Placement("p0", "d0")
    assert place(replace(pools, decode=(replace(worker, batch_share=0.8),)), batch) == Placement("p0", "d0")
    slots_full = replace(worker, batch_blocks=0, batch_slots=3)
    assert isinstance(place(replace(pools, decode=(slots_full,)), batch), NoRoomNow)


def test_one_batch_request_may_always_be_there() -> None:
    worker = WorkerView("d0", kv_blocks_total=10, state_slots_total=1, block_size_tokens=16, batch_share=0.1)
    pools = Snapshot((prefill("p0"),), (worker,))
    assert place(pools, Need("r", 160, service_class=ServiceClass.BATCH)) == Placement("p0", "d0")


@given(share=st.floats(0, 1), answers=st.lists(st.integers(1, 100), min_size=1, max_size=8))
def test_the_router_places_batch_where_the_decode_worker_would_admit_it(share: float, answers: list[int]) -> None:
    leases = lease_table(FakeClock(), num_blocks=40, num_slots=6, policy=AdmissionPolicy(batch_share=share))
    size = SPECS.block_size_tokens
    empty = WorkerView("d0", kv_blocks_total=40, state_slots_total=6, block_size_tokens=size, batch_share=share)
    for number, answer in enumerate(answers):
        asked = Request(f"r{number}", (1, 2, 3), SamplingParams(), StopRules(answer), ServiceClass.BATCH)
        held, slots = leases.num_blocks_counted(), sum(leases.counts_by_state().values())
        view = replace(empty, kv_blocks_used=held, state_slots_used=slots, batch_blocks=held, batch_slots=slots)
        need = Need(asked.request_id, asked.max_total_tokens, service_class=ServiceClass.BATCH)
        decision = place(Snapshot((prefill("p0"),), (view,)), need)
        try:
            leases.reserve(asked, 1, "router", "p0")
        except NoRoom:
            assert isinstance(decision, NoRoomNow)
        else:
            assert isinstance(decision, Placement)


def test_batch_prompts_that_wait_are_no_work_before_an_interactive_one() -> None:
    flooded = WorkerView("p0", queue_tokens=9000, batch_tokens=9000)
    pools = Snapshot((flooded, prefill("p1", 100)), (decode("d0"),))
    assert place(pools, NEED) == Placement("p0", "d0")
    assert place(pools, Need("r", 32, service_class=ServiceClass.BATCH)) == Placement("p1", "d0")


def test_with_overcommit_a_request_needs_room_for_what_is_expected_and_a_resumed_one_for_all() -> None:
    def pools(blocks: int) -> Snapshot:
        worker = replace(decode("d0", blocks=blocks), overcommit=4.0)
        return Snapshot((prefill("p0"),), (worker,))

    fresh = Need("r", 32 + 128, num_tokens=32)  # 2 blocks, and a quarter of 8
    assert isinstance(place(pools(6), fresh), Placement)
    assert isinstance(place(pools(7), fresh), NoRoomNow)
    resumed = replace(fresh, is_resumed=True)
    assert isinstance(place(pools(1), resumed), NoRoomNow)
    assert isinstance(place(pools(0), resumed), Placement)

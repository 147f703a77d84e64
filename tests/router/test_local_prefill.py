"""Which prompts are computed on their decode worker: when that is known to be quicker, and never in a way that starves."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import router.placement
from router.fake_workers import Script
from router.local_prefill import LocalWay, ShippedWay, is_local_better
from router.placement import Need, NoRoomNow, NoWorker, Placement, Snapshot, WorkerView, place
from router.prefixes import PrefixDirectory, PrefixEntry
from tandem.cache.names import Prefix
from tandem.config import RouterConfig
from tandem.errors import Overloaded, Unavailable
from tandem.request import ServiceClass
from tests.router.tools import Bench, prompt, until

# A decode step of 20 ms, 1 ms for a prompt token on either side, 20 ms from there to here.
THERE = ShippedWay(num_tokens=32, token_s=0.001, step_tokens=512, reserve_s=0.002, handoff_s=0.018, num_bytes=1 << 20)
HERE = LocalWay(num_tokens=32, token_s=0.001, step_s=0.02, share=0.25)


def test_of_two_idle_workers_of_one_speed_the_one_that_need_not_ship_is_quicker() -> None:
    assert is_local_better(THERE, HERE)
    assert (THERE.seconds, HERE.seconds) == (pytest.approx(0.052), pytest.approx(0.032))


def test_a_longer_prompt_is_shipped_since_its_journey_costs_no_more() -> None:
    assert not is_local_better(replace(THERE, num_tokens=128), replace(HERE, num_tokens=128))


def test_what_lies_within_the_error_of_a_measurement_is_shipped() -> None:
    assert not is_local_better(THERE, replace(HERE, token_s=0.0014))
    assert replace(HERE, token_s=0.0014).seconds < THERE.seconds


def test_beside_running_sequences_a_prompt_gets_its_share_of_the_time_alone() -> None:
    beside = replace(HERE, num_running=3)
    assert beside.seconds == pytest.approx(5 * 0.032)
    assert not is_local_better(THERE, beside)
    assert is_local_better(replace(THERE, queue_tokens=1000), replace(beside, num_running=1))


def test_what_running_sequences_lose_is_counted() -> None:
    busy = replace(THERE, queue_tokens=1000)
    assert replace(HERE, num_running=24).taken_s == pytest.approx(24 * 0.032)
    assert not is_local_better(busy, replace(HERE, num_running=24))
    assert replace(HERE, num_running=24).seconds < busy.seconds


def test_batch_prompts_over_there_give_way() -> None:
    slow = decode(token_s=0.005)
    busy = Snapshot((prefill(queue_tokens=5000),), (slow,))
    assert isinstance(placed := place(busy, SHORT), Placement)
    assert placed.is_local
    assert place(Snapshot((prefill(queue_tokens=5000, batch_tokens=5000),), (slow,)), SHORT) == Placement("p0", "d0")


def test_over_there_a_prompt_waits_for_half_a_step_and_shares_the_next_however_long_the_queue() -> None:
    assert replace(THERE, queue_tokens=100).seconds == pytest.approx(0.05 + 0.132 + 0.02)
    for queue_tokens in (512, 10**6):
        assert replace(THERE, queue_tokens=queue_tokens).seconds == pytest.approx(0.256 + 0.512 + 0.02)
    assert replace(THERE, queue_tokens=100, step_tokens=16).seconds == pytest.approx(0.008 + 0.032 + 0.02)


def test_what_waits_here_comes_first() -> None:
    assert replace(HERE, queue_tokens=32).seconds == pytest.approx(0.064)


def test_no_prompt_is_quicker_than_a_decode_step() -> None:
    assert replace(HERE, num_tokens=1).seconds == 0.02


def test_until_a_prompt_was_seen_each_token_is_taken_to_need_a_step() -> None:
    unseen = replace(HERE, token_s=0.0, num_running=1, num_tokens=4)
    assert unseen.seconds == pytest.approx(5 * 4 * 0.02)
    assert not is_local_better(THERE, unseen)


def test_a_worker_with_nothing_to_do_is_tried_while_others_are_computed_over_there() -> None:
    unseen, busy = replace(HERE, token_s=0.0), replace(THERE, queue_tokens=1)
    assert is_local_better(busy, unseen)
    assert not is_local_better(THERE, unseen)
    assert not is_local_better(busy, replace(unseen, queue_tokens=1))
    assert not is_local_better(busy, replace(unseen, num_running=1))


def test_a_cluster_that_has_done_nothing_yet_ships() -> None:
    assert not is_local_better(ShippedWay(32, num_bytes=1 << 30), LocalWay(32))


def test_where_nothing_is_known_of_a_busy_worker_the_prompt_is_shipped() -> None:
    assert not is_local_better(ShippedWay(32), LocalWay(32, num_running=1))


def test_an_answer_of_one_token_has_no_journey() -> None:
    assert replace(THERE, num_bytes=0).seconds == pytest.approx(0.032)


def test_a_hand_off_that_nobody_timed_is_judged_by_its_bytes() -> None:
    untimed = replace(THERE, handoff_s=0.0, num_bytes=150_000_000)
    assert untimed.seconds == pytest.approx(0.032 + 0.002 + 0.015)


@given(st.floats(1e-6, 1.0), st.floats(1e-6, 1.0), st.floats(0.0, 1.0), st.integers(1, 64), st.integers(0, 10**6))
def test_more_work_over_there_never_makes_here_worse(
    there_s: float, here_s: float, step_s: float, num_tokens: int, queue_tokens: int
) -> None:
    here = LocalWay(num_tokens, token_s=here_s, step_s=step_s)
    calm = ShippedWay(num_tokens, token_s=there_s, step_tokens=64)
    if is_local_better(calm, here):
        assert is_local_better(replace(calm, queue_tokens=queue_tokens), here)


# ---- placed ----


def prefill(worker_id: str = "p0", **state: object) -> WorkerView:
    return replace(WorkerView(worker_id, token_s=0.001, step_tokens=512, reserve_s=0.002), **state)  # type: ignore[arg-type]


def decode(worker_id: str = "d0", **state: object) -> WorkerView:
    able = WorkerView(
        *(worker_id, True),
        kv_blocks_total=10,
        state_slots_total=4,
        block_size_tokens=16,
        token_s=0.001,
        step_s=0.02,
        local_tokens=64,
        local_share=0.25,
        block_bytes=1000,
        state_bytes=500_000,
    )
    return replace(able, **state)  # type: ignore[arg-type]


SHORT = Need("r", 40, num_tokens=32)
POOLS = Snapshot((prefill(),), (decode(),))


def test_a_short_prompt_is_placed_on_its_decode_worker_with_what_need_not_travel() -> None:
    placed = place(POOLS, SHORT, handoff_s=0.02)
    assert placed == Placement("d0", "d0", absorber_id="p0", saved_bytes=502_000)
    assert isinstance(placed, Placement)
    assert placed.is_local


@pytest.mark.parametrize(
    "need",
    [
        Need("r", 80, num_tokens=65),
        replace(SHORT, service_class=ServiceClass.BATCH),
        replace(SHORT, was_refused=True),
    ],
    ids=["too-long", "batch", "refused"],
)
def test_others_are_shipped(need: Need) -> None:
    assert place(POOLS, need, handoff_s=0.02) == Placement("p0", "d0")


def test_a_worker_that_computes_no_prompts_is_sent_none() -> None:
    assert place(Snapshot((prefill(),), (decode(local_tokens=0),)), SHORT) == Placement("p0", "d0")


def test_the_headroom_chooses_the_decode_worker_as_for_any_other() -> None:
    pools = Snapshot((prefill(),), (decode("d0", state_slots_used=2), decode("d1", running=3)))
    assert place(pools, SHORT, handoff_s=0.02) == Placement("p0", "d1")


def test_what_a_prefill_worker_keeps_of_the_prompt_speaks_for_it() -> None:
    prefix = Prefix.of("model", 16, range(32))
    need = replace(SHORT, prefix=prefix)
    assert isinstance(placed := place(POOLS, need, handoff_s=0.02), Placement)
    assert placed.is_local
    keeps = PrefixDirectory()
    keeps.replace("p0", (PrefixEntry(prefix.shorts[1], 16),))
    assert place(replace(POOLS, prefixes=keeps), need, handoff_s=0.02) == Placement("p0", "d0", hit_tokens=16)


def test_without_prefill_workers_short_prompts_are_answered_and_long_ones_wait() -> None:
    pools = Snapshot((), (decode("d0", local_tokens=0), decode("d1", running=3, queue_tokens=99)))
    expected = Placement("d1", "d1", saved_bytes=502_000)
    assert place(pools, SHORT) == expected
    assert place(pools, replace(SHORT, was_refused=True, service_class=ServiceClass.BATCH)) == expected
    assert place(pools, Need("r", 80, num_tokens=65)) == NoWorker("no prefill worker is ready")
    assert place(Snapshot((), (decode(local_tokens=0),)), SHORT) == NoWorker("no prefill worker is ready")
    assert place(Snapshot(), SHORT) == NoWorker("no prefill and decode worker is ready")


def test_a_full_decode_worker_computes_nothing_either() -> None:
    assert isinstance(place(Snapshot((), (decode(state_slots_used=4),)), SHORT), NoRoomNow)


# ---- served ----


@pytest.fixture
def all_that_may_be_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.placement, "is_local_better", lambda shipped, local: True)


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_a_local_answer_has_one_worker_and_no_hand_off() -> None:
    bench = Bench(local_prefill_tokens=64)
    shipped, _, _ = await Bench().ask(prompt(max_new_tokens=6))
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=6))
    assert tokens == shipped
    assert (outcome.prefill_worker, outcome.decode_worker, outcome.handoff_exposed_s) == ("d0", "d0", 0.0)
    assert bench.cluster.prefill[0].submitted == []
    times = outcome.timings
    assert times.queued <= times.prefill_started <= times.first_token <= times.handed_off <= times.finished
    assert bench.cluster.cancels() == {"p0": [], "d0": []}
    assert places(bench) == {"local": 1.0}
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
@pytest.mark.parametrize("kind", ["NoRoom", "Overloaded", "Leaving", "HandoffError", "TransferFailed"])
async def test_a_prompt_that_a_decode_worker_refuses_is_shipped_and_not_sent_there_again(kind: str) -> None:
    bench = Bench(script=Script(refusals={"d0": [kind, "never asked again"]}), local_prefill_tokens=64)
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=6))
    assert tokens == (await Bench().ask(prompt(max_new_tokens=6)))[0]
    assert (outcome.prefill_worker, outcome.decode_worker, outcome.attempts) == ("p0", "d0", 2)
    assert places(bench) == {"local": 1.0, "local_refused": 1.0, "shipped": 1.0}
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_an_answer_whose_decode_worker_is_lost_goes_on_locally_if_it_is_still_short() -> None:
    bench = Bench(1, 2, Script(lost_after={"d0": 3, "d1": 3}), RouterConfig(queue_wait_s=0.05), local_prefill_tokens=8)
    bench.cluster.table.assign(("other", 1), Placement("p0", "d1"), 0, Need("other", 16))  # d1 comes second
    with pytest.raises(Unavailable):
        await bench.ask(prompt("hi", max_new_tokens=20))
    placed = [
        (handle.info.id, len(request.tokens)) for handle in bench.cluster.by_id.values() for request, _, _ in handle.submitted
    ]
    assert placed == [("d0", 2), ("d1", 6)]
    bench.cluster.table.release(("other", 1))
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_an_answer_that_has_become_long_is_shipped_when_its_worker_is_lost() -> None:
    bench = Bench(1, 2, Script(lost_after={"d0": 3}), local_prefill_tokens=5)
    bench.cluster.table.assign(("other", 1), Placement("p0", "d1"), 0, Need("other", 16))
    tokens, _, outcome = await bench.ask(prompt("hi", max_new_tokens=12))
    assert tokens == (await Bench().ask(prompt("hi", max_new_tokens=12)))[0]
    assert (outcome.prefill_worker, outcome.decode_worker) == ("p0", "d1")
    assert places(bench) == {"local": 1.0, "shipped": 1.0}
    bench.cluster.table.release(("other", 1))
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_without_a_prefill_worker_a_short_prompt_is_answered_and_a_long_one_refused_in_time() -> None:
    bench = Bench(0, 1, local_prefill_tokens=8, config=RouterConfig(queue_wait_s=0.05))
    _, _, outcome = await bench.ask(prompt(max_new_tokens=3))
    assert outcome.prefill_worker == "d0"
    with pytest.raises(Unavailable, match="no prefill worker is ready"):
        await bench.ask(prompt("nine char", max_new_tokens=3))
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_a_decode_worker_that_refuses_for_ever_is_asked_a_bounded_number_of_times() -> None:
    bench = Bench(0, 1, Script(refusals={"d0": ["Overloaded"] * 99}), local_prefill_tokens=8)
    with pytest.raises(Overloaded):
        await bench.ask(prompt(max_new_tokens=3))
    assert len(bench.cluster.decode[0].submitted) == 2
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_a_prefill_worker_absorbs_the_answer_that_it_did_not_begin() -> None:
    bench = Bench(local_prefill_tokens=64)
    worker = bench.cluster.prefill[0]
    assert worker.load is not None
    worker.load = replace(worker.load, prefixes=(PrefixEntry(1, 16),))
    tokens, _, _ = await bench.ask(prompt(max_new_tokens=4))
    assert [(len(request.prompt), list(request.generated)) for request in worker.absorbed] == [(5, tokens)]
    assert bench.cluster.decode[0].absorbed == []


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_whoever_leaves_is_cancelled_once_at_its_one_worker() -> None:
    bench = Bench(script=Script(prefill_s=60.0), local_prefill_tokens=64)
    asking = asyncio.create_task(bench.ask(prompt()))
    await until(lambda: bench.cluster.decode[0].submitted)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert [len(keys) for keys in bench.cluster.cancels().values()] == [0, 1]
    await until(lambda: not bench.cluster.num_running)
    bench.assert_nothing_is_left()


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_a_decode_worker_that_is_silent_about_its_prompt_is_asked() -> None:
    bench = Bench(script=Script(prefill_s=0.1), local_prefill_tokens=64, config=RouterConfig(ask_after_s=0.02, stall_s=5.0))
    _, _, outcome = await bench.ask(prompt(max_new_tokens=3))
    assert (outcome.attempts, outcome.prefill_worker) == (1, "d0")
    assert bench.cluster.decode[0].asked


@pytest.mark.usefixtures("all_that_may_be_is_local")
async def test_what_is_placed_locally_counts_as_waiting_there() -> None:
    bench = Bench(script=Script(prefill_s=60.0), local_prefill_tokens=64)
    asking = asyncio.create_task(bench.ask(prompt(max_new_tokens=40)))
    await until(lambda: bench.cluster.decode[0].submitted)
    ((there,), (here,)) = (bench.cluster.table.snapshot().prefill, bench.cluster.table.snapshot().decode)
    assert (there.queue_tokens, here.queue_tokens, here.kv_blocks_used) == (0, 5, 3)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    bench.assert_nothing_is_left()


def places(bench: Bench) -> dict[str, float]:
    """Counted so far."""
    return {
        labels[0]: series.total for (family, labels), series in bench.measures.series().items() if family == "prompts_placed"
    }

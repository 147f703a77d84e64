"""Whatever workers and clients do: every token once and in order, and nothing left behind."""

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial

import pytest

from router.answer import Delta
from router.events import AttemptKey, Failed, FirstToken, PrefillStarted, Ready, Standing, Tokens
from router.fake_workers import FakeWorkerHandle, Script
from router.placement import Need, Placement
from tandem.config import RouterConfig
from tandem.errors import InvalidRequest, Overloaded, Unavailable
from tandem.request import FinishReason, Phase, SamplingParams
from tandem.v1 import inference_pb2 as pb
from tests.router.tools import EOS, Bench, prompt, says, until
from tests.standstill import stand_still

SHORT = RouterConfig(queue_wait_s=0.05, stall_s=0.05)


async def test_an_answer_is_streamed_whole() -> None:
    bench = Bench(script=says("hi wörld"))
    tokens, text, outcome = await bench.ask(prompt())
    assert text == "hi wörld"
    assert bytes(tokens) == b"hi w\xc3\xb6rld\x00"
    assert (outcome.finish_reason, outcome.attempts) == (FinishReason.STOP, 1)
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (5, 10)
    assert (outcome.prefill_worker, outcome.decode_worker) == ("p0", "d0")
    times = outcome.timings
    assert times.received <= times.queued <= times.prefill_started <= times.first_token <= times.handed_off <= times.finished
    bench.assert_nothing_is_left()
    assert bench.cluster.cancels() == {"p0": [], "d0": []}


@pytest.mark.parametrize("wanted", [1, 2, 5])
async def test_exactly_as_many_tokens_come_as_were_asked_for(wanted: int) -> None:
    bench = Bench()
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=wanted))
    assert len(tokens) == outcome.completion_tokens == wanted
    assert outcome.finish_reason is FinishReason.LENGTH
    assert outcome.decode_worker == ("" if wanted == 1 else "d0")
    bench.assert_nothing_is_left()


async def test_a_first_token_that_ends_the_answer_needs_no_decode_worker() -> None:
    bench = Bench(script=says(""))
    tokens, text, outcome = await bench.ask(prompt())
    assert (tokens, text, outcome.decode_worker) == ([EOS], "", "")
    assert outcome.finish_reason is FinishReason.STOP


async def test_a_worker_that_answers_too_much_is_cut_off() -> None:
    bench = Bench(script=Script())
    bench.cluster.prefill[0].on_submit = lambda *_: None
    reading = asyncio.create_task(bench.ask(prompt(max_new_tokens=2)))
    await until(lambda: bench.cluster.prefill[0].submitted)
    request, attempt, _ = bench.cluster.prefill[0].submitted[0]
    key = (request.request_id, attempt)
    bench.cluster.prefill[0].emit(key, FirstToken(0, 65))
    bench.cluster.decode[0].emit(key, Tokens(1, (66, 67, 68)))
    tokens, text, outcome = await reading
    assert (tokens, text, outcome.finish_reason) == ([65, 66], "AB", FinishReason.LENGTH)
    assert bench.cluster.cancels() == {"p0": [key], "d0": [key]}


# ---- failures ----


@pytest.mark.parametrize(
    ("script", "attempts"),
    [
        (Script(refusals={"p0": ["TransferFailed"], "p1": ["TransferFailed"]}), 3),
        (Script(refusals={"p0": ["NoRoom"] * 5, "p1": ["NoRoom"] * 5}), None),
        (Script(handoff_failures=["HandoffRefused"]), 2),
        (Script(handoff_failures=["LeaseLost", "TransferFailed", "HandoffRefused"]), 4),
        (Script(lost_after={"d0": 0, "d1": 0}), 3),
        (Script(lost_after={"d0": 3, "d1": 3}), 3),
    ],
    ids=[
        "before-first-token",
        "no-room",
        "hand-off-refused",
        "three-hand-offs",
        "decode-lost-at-once",
        "decode-lost-mid-stream",
    ],
)
async def test_no_token_is_lost_or_repeated_when_an_attempt_fails(script: Script, attempts: int | None) -> None:
    lost = bool(script.lost_after)
    bench = Bench(2, 3, script)
    if lost:  # d2 is the last resort: it looks fuller than the others
        bench.cluster.table.assign(("other", 1), Placement("p0", "d2"), 0, Need("other", 16 * 60))
    undisturbed, _, _ = await Bench().ask(prompt(max_new_tokens=12))
    tokens, text, outcome = await bench.ask(prompt(max_new_tokens=12))
    assert tokens == undisturbed
    assert text == bytes(tokens).decode(errors="replace")
    assert attempts is None or outcome.attempts == attempts
    if lost:
        assert outcome.decode_worker == "d2"
        bench.cluster.table.release(("other", 1))
    bench.assert_nothing_is_left()


async def test_a_retry_hands_over_the_tokens_so_far_and_the_same_seed() -> None:
    bench = Bench(2, 2, Script(lost_after={"d0": 2, "d1": 2}), config=SHORT)
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await bench.ask(prompt(max_new_tokens=12, sampling=pb.Sampling(temperature=1.0)))
    first, second = sorted((s for p in bench.cluster.prefill for s in p.submitted), key=lambda s: s[1])
    assert (first[1], second[1]) == (1, 2)
    assert (len(first[0].generated), len(second[0].generated)) == (0, 3)
    assert first[0].sampling == second[0].sampling != SamplingParams(1.0)
    assert first[0].request_id == second[0].request_id


async def test_failed_workers_are_avoided() -> None:
    bench = Bench(2, 2, Script(refusals={"p0": ["TransferFailed"] * 2, "p1": ["TransferFailed"]}))
    await bench.ask(prompt())
    used = [(p.info.id, s[1]) for p in bench.cluster.prefill for s in p.submitted]
    assert sorted(used, key=lambda u: u[1])[0][0] != sorted(used, key=lambda u: u[1])[1][0]


async def test_attempts_are_bounded() -> None:
    bench = Bench(script=Script(refusals={"p0": ["TransferFailed"] * 9}), config=RouterConfig(max_attempts=3))
    with pytest.raises(Unavailable, match="3 attempts failed, the last with TransferFailed at p0"):
        await bench.ask(prompt())
    assert [attempt for _, attempt, _ in bench.cluster.prefill[0].submitted] == [1, 2, 3]
    assert bench.ended[0].phase is Phase.FAILED
    bench.assert_nothing_is_left()


async def test_being_evicted_is_no_failed_attempt() -> None:
    once_too_often = Script(handoff_failures=["Evicted", "HandoffRefused", "Evicted"])
    bench = Bench(2, 3, once_too_often, config=RouterConfig(max_attempts=2))
    undisturbed, _, _ = await Bench().ask(prompt(max_new_tokens=12))
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=12))
    assert (tokens, outcome.attempts) == (undisturbed, 4)
    bench.assert_nothing_is_left()


async def test_a_final_failure_is_not_retried() -> None:
    bench = Bench()
    bench.cluster.prefill[0].on_submit = lambda request, attempt, _: bench.cluster.prefill[0].fail(
        (request.request_id, attempt), "InvalidRequest", "prompt: too odd", retryable=False
    )
    with pytest.raises(InvalidRequest, match="prompt: too odd"):
        await bench.ask(prompt())
    assert len(bench.cluster.prefill[0].submitted) == 1


async def test_a_stalled_attempt_is_replaced() -> None:
    bench = Bench(1, 2, config=SHORT)
    submit = bench.cluster.prefill[0].on_submit

    def drop_the_first(request: object, attempt: int, decode_id: str) -> None:
        bench.cluster.prefill[0].on_submit = submit
        bench.cluster.prefill[0].emit((request.request_id, attempt), FirstToken(0, 65))  # type: ignore[attr-defined]

    bench.cluster.prefill[0].on_submit = drop_the_first
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=4))
    assert (tokens[0], len(tokens), outcome.attempts) == (65, 4, 2)


async def test_a_prefill_worker_that_drops_a_task_silently_is_found_out_and_the_request_goes_elsewhere() -> None:
    bench = Bench(2, 1, config=RouterConfig(ask_after_s=0.02, stall_s=60.0))
    for handle in bench.cluster.prefill:  # the first one to get it forgets it
        submit = handle.on_submit

        def drop(request: object, attempt: int, decode_id: str, submit: Callable[..., None] = submit) -> None:
            if attempt > 1:
                submit(request, attempt, decode_id)

        handle.on_submit = drop
    tokens, _, outcome = await bench.ask(prompt(max_new_tokens=3))
    assert (len(tokens), outcome.attempts) == (3, 2)
    first = next(handle for handle in bench.cluster.prefill if handle.submitted[0][1] == 1)
    assert first.asked == [(first.submitted[0][0].request_id, 1)]
    assert outcome.prefill_worker != first.info.id
    bench.assert_nothing_is_left()


async def test_a_prompt_that_waits_long_in_a_worker_that_knows_it_is_left_alone() -> None:
    bench = Bench(config=RouterConfig(ask_after_s=0.01, stall_s=0.2), script=Script(prefill_s=0.5))
    _, _, outcome = await bench.ask(prompt(max_new_tokens=2))
    assert outcome.attempts == 1
    assert len(bench.cluster.prefill[0].asked) > 3


async def test_a_worker_that_does_not_even_say_whether_it_has_the_task_is_given_up() -> None:
    bench = Bench(config=RouterConfig(ask_after_s=0.01, stall_s=0.05, max_attempts=1), script=Script(prefill_s=3600))
    bench.cluster.prefill[0].on_ask = lambda key: None
    with pytest.raises(Unavailable, match=r"Stalled at p0: no word for 0\.05 s before the first token"):
        await bench.ask(prompt())


@pytest.mark.parametrize("when", ["before the first token", "after it"])
async def test_a_pause_of_the_router_ends_no_attempt(when: str) -> None:
    bench = Bench(config=RouterConfig(ask_after_s=0.05, stall_s=0.2, max_attempts=1))
    prefill, decode = bench.cluster.prefill[0], bench.cluster.decode[0]
    prefill.on_submit, prefill.on_ask = lambda *_: None, lambda key: None
    reading = asyncio.create_task(bench.ask(prompt(max_new_tokens=2)))
    await until(lambda: prefill.submitted)
    key = (prefill.submitted[0][0].request_id, 1)
    if when == "after it":
        prefill.emit(key, FirstToken(0, 65))
    await asyncio.sleep(0.02)
    stand_still(0.6)
    await asyncio.sleep(0.02)
    prefill.emit(key, FirstToken(0, 65))
    decode.emit(key, Tokens(1, (66,), FinishReason.LENGTH))
    tokens, _, outcome = await reading
    assert (tokens, outcome.attempts) == ([65, 66], 1)


async def test_an_answer_that_comes_after_the_first_token_says_nothing() -> None:
    bench = Bench()
    prefill, decode = bench.cluster.prefill[0], bench.cluster.decode[0]
    prefill.on_submit = lambda *_: None
    reading = asyncio.create_task(bench.ask(prompt(max_new_tokens=2)))
    await until(lambda: prefill.submitted)
    key = (prefill.submitted[0][0].request_id, 1)
    prefill.emit(key, FirstToken(0, 65))
    prefill.emit(key, Standing(known=False))
    decode.emit(key, Tokens(1, (66,), FinishReason.LENGTH))
    tokens, _, outcome = await reading
    assert (tokens, outcome.attempts) == ([65, 66], 1)


async def test_a_full_prefill_worker_is_no_final_answer_while_there_is_another() -> None:
    bench = Bench(2, 1, Script(refusals={"p0": ["Overloaded"], "p1": ["Overloaded"]}))
    for handle in bench.cluster.prefill:
        handle.fail = partial(_fail_finally, handle)  # type: ignore[method-assign]
    bench.cluster.script.refusals["p1"].clear()
    for _ in range(4):  # whichever is asked first
        tokens, _, _ = await bench.ask(prompt(max_new_tokens=2))
        assert len(tokens) == 2
    bench.assert_nothing_is_left()


async def test_when_all_prefill_workers_are_full_the_client_is_told_when_to_come_again() -> None:
    bench = Bench(2, 1, Script(refusals={"p0": ["Overloaded"] * 9, "p1": ["Overloaded"] * 9}))
    for handle in bench.cluster.prefill:
        handle.fail = partial(_fail_finally, handle)  # type: ignore[method-assign]
    with pytest.raises(Overloaded) as refused:
        await bench.ask(prompt())
    assert refused.value.retry_after_s > 0
    assert sorted(len(handle.submitted) for handle in bench.cluster.prefill) == [1, 2]


def _fail_finally(handle: FakeWorkerHandle, key: AttemptKey, kind: str) -> None:
    """As the wire carries a request error: not to be retried."""
    handle.emit(key, Failed(handle.info.id, kind, "its queue is full", retryable=False))


async def test_clients_that_use_one_id_at_the_same_time_each_get_their_own_answer() -> None:
    bench = Bench(1, 1)
    texts = ["one", "three", "elevens"]
    alone = [await Bench().ask(prompt(text, max_new_tokens=6)) for text in texts]
    together = await asyncio.gather(*(bench.ask(prompt(text, max_new_tokens=6)) for text in texts))
    assert [tokens for tokens, _, _ in together] == [tokens for tokens, _, _ in alone]
    assert {outcome.request_id for _, _, outcome in together} == {"test"}
    assert len({request.request_id for request, _, _ in bench.cluster.prefill[0].submitted}) == 3
    bench.assert_nothing_is_left()


# ---- order ----


async def test_decode_may_overtake_prefill_and_old_attempts_are_not_heard() -> None:
    bench = Bench()
    prefill, decode = bench.cluster.prefill[0], bench.cluster.decode[0]
    prefill.on_submit = lambda *_: None
    reading = asyncio.create_task(bench.ask(prompt(max_new_tokens=4)))
    await until(lambda: prefill.submitted)
    first = (prefill.submitted[0][0].request_id, 1)
    prefill.fail(first, "TransferFailed")
    await until(lambda: len(prefill.submitted) == 2)
    second = (first[0], 2)
    prefill.emit(first, FirstToken(0, 99))
    decode.emit(first, Tokens(1, (99,)))
    decode.emit(second, Ready(0.25))
    decode.emit(second, Tokens(2, (67,)))
    decode.emit(second, Tokens(1, (66, 67)))
    decode.emit(second, Tokens(3, (68,), FinishReason.LENGTH))
    prefill.emit(second, PrefillStarted())
    prefill.emit(second, FirstToken(0, 65))
    tokens, text, outcome = await reading
    assert (tokens, text) == ([65, 66, 67, 68], "ABCD")
    assert outcome.handoff_exposed_s == 0.25
    assert decode.cancelled == [first]


async def test_the_prefill_workers_death_after_the_hand_off_does_not_matter() -> None:
    bench = Bench()
    prefill, decode = bench.cluster.prefill[0], bench.cluster.decode[0]
    prefill.on_submit = lambda *_: None
    reading = asyncio.create_task(bench.ask(prompt(max_new_tokens=2)))
    await until(lambda: prefill.submitted)
    key = (prefill.submitted[0][0].request_id, 1)
    prefill.emit(key, FirstToken(0, 65))
    decode.emit(key, Ready())
    prefill.lose()
    decode.emit(key, Tokens(1, (66,), FinishReason.LENGTH))
    tokens, _, outcome = await reading
    assert (tokens, outcome.attempts) == ([65, 66], 1)


async def test_the_prefill_workers_death_before_the_hand_off_ends_the_attempt() -> None:
    bench = Bench(2, 1)
    for handle in bench.cluster.prefill:
        handle.on_submit = lambda *_: None
    reading = asyncio.create_task(bench.ask(prompt(max_new_tokens=2)))
    await until(lambda: any(p.submitted for p in bench.cluster.prefill))
    dying, other = sorted(bench.cluster.prefill, key=lambda p: not p.submitted)
    key = (dying.submitted[0][0].request_id, 1)
    dying.emit(key, FirstToken(0, 65))
    bench.cluster.lose(dying.info.id)
    await until(lambda: other.submitted)
    assert other.submitted[0][0].generated == (65,)
    other.emit((key[0], 2), FirstToken(1, 66, FinishReason.LENGTH))
    tokens, _, outcome = await reading
    assert (tokens, outcome.attempts, outcome.prefill_worker) == ([65, 66], 2, other.info.id)


# ---- stop strings ----


@pytest.mark.parametrize(
    ("stop", "expected"),
    [("end", "the "), ("nd of", "the e"), ("ö", "the end of w"), ("missing", "the end of wörld"), ("of x", None)],
)
async def test_stop_strings_are_found_over_tokens_and_not_delivered(stop: str, expected: str | None) -> None:
    bench = Bench(script=says("the end of wörld"))
    _, text, outcome = await bench.ask(prompt(stop=[stop]))
    assert text == (expected or "the end of wörld")
    assert outcome.finish_reason is FinishReason.STOP
    stopped = len(text) < len("the end of wörld")
    assert bool(bench.cluster.decode[0].cancelled) == stopped
    await until(lambda: not bench.cluster.num_running)
    bench.assert_nothing_is_left()


async def test_text_held_back_for_a_stop_string_comes_at_the_end() -> None:
    bench = Bench(script=says("so it en"))
    _, text, outcome = await bench.ask(prompt(stop=["end"], max_new_tokens=8))
    assert (text, outcome.finish_reason) == ("so it en", FinishReason.LENGTH)


# ---- cancellation and deadlines ----


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_both_workers_hear_at_once_that_the_client_is_gone(after: int) -> None:
    bench = Bench(script=Script(prefill_s=0 if after else 3600))

    async def read_some() -> None:
        seen = 0
        async with contextlib.aclosing(bench.pipeline.generate(prompt(max_new_tokens=500), "gone")) as stream:
            async for item in stream:
                assert isinstance(item, Delta)
                seen += len(item.token_ids)
                if seen >= after:
                    await asyncio.Event().wait()

    reading = asyncio.create_task(read_some())
    await until(lambda: bench.cluster.prefill[0].submitted)
    for _ in range(20 * after):
        await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    key = (bench.cluster.prefill[0].submitted[0][0].request_id, 1)
    assert bench.cluster.cancels() == {"p0": [key], "d0": [key]}
    assert bench.ended[0].phase is Phase.CANCELLED
    await until(lambda: not bench.cluster.num_running)
    bench.assert_nothing_is_left()


async def test_a_deadline_ends_the_request_everywhere() -> None:
    bench = Bench(script=Script(step_s=3600))
    with pytest.raises(TimeoutError):
        await bench.ask(prompt(), deadline_s=0.05)
    assert len(bench.cluster.decode[0].cancelled) == len(bench.cluster.prefill[0].cancelled) == 1
    assert bench.ended[0].phase is Phase.FAILED
    await until(lambda: not bench.cluster.num_running)
    bench.assert_nothing_is_left()


async def test_an_abort_storm_leaves_nothing() -> None:
    bench = Bench(2, 2, Script(step_s=3600), slots=4)
    clients = [asyncio.create_task(bench.ask(prompt())) for _ in range(60)]
    await until(lambda: bench.cluster.num_running == 8)
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)
    await until(lambda: not bench.cluster.num_running)
    bench.assert_nothing_is_left()
    bench.cluster.script.step_s = 0
    assert (await bench.ask(prompt(max_new_tokens=3)))[2].completion_tokens == 3


# ---- waiting ----


async def test_a_full_queue_refuses_with_a_hint() -> None:
    bench = Bench(script=Script(step_s=3600), config=RouterConfig(max_queue=2), slots=1)
    waiting = [asyncio.create_task(bench.ask(prompt())) for _ in range(3)]
    await until(lambda: bench.pipeline.num_by_phase == {"queued": 2, "decoding": 1})
    with pytest.raises(Overloaded) as refused:
        await bench.ask(prompt())
    assert refused.value.retry_after_s > 0
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    bench.assert_nothing_is_left()


async def test_a_request_waits_for_room_and_then_for_nothing_else() -> None:
    bench = Bench(script=Script(step_s=0.001), slots=1)
    answers = await asyncio.gather(*(bench.ask(prompt(max_new_tokens=3)) for _ in range(4)))
    assert [len(tokens) for tokens, _, _ in answers] == [3] * 4
    bench.assert_nothing_is_left()


async def test_interactive_requests_are_placed_before_batch() -> None:
    bench = Bench(script=Script(step_s=3600), slots=1)
    first = asyncio.create_task(bench.ask(prompt("a")))
    await until(lambda: bench.cluster.num_running == 1)
    batch = asyncio.create_task(bench.ask(prompt("b", service_class=pb.SERVICE_CLASS_BATCH)))
    await until(lambda: bench.pipeline.num_by_phase["queued"] == 1)
    quick = asyncio.create_task(bench.ask(prompt("q")))
    await until(lambda: bench.pipeline.num_by_phase["queued"] == 2)
    first.cancel()
    await until(lambda: len(bench.cluster.prefill[0].submitted) == 2)
    assert bench.cluster.prefill[0].submitted[1][0].prompt == (ord("q"),)
    for task in (batch, quick):
        task.cancel()
    await asyncio.wait([first, batch, quick])


async def test_without_workers_a_request_waits_a_bounded_time() -> None:
    bench = Bench(1, 0, config=SHORT)
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await bench.ask(prompt())
    bench.assert_nothing_is_left()


async def test_without_room_a_request_waits_a_bounded_time() -> None:
    bench = Bench(script=Script(step_s=3600), config=RouterConfig(queue_wait_s=0.05), slots=1)
    first = asyncio.create_task(bench.ask(prompt()))
    await until(lambda: bench.cluster.num_running == 1)
    with pytest.raises(Overloaded, match="no decode worker has room"):
        await bench.ask(prompt())
    first.cancel()
    await asyncio.wait([first])


async def test_what_no_worker_can_ever_hold_is_refused_at_once() -> None:
    bench = Bench()
    bench.cluster.decode[0].load = None
    object.__setattr__(bench.cluster.decode[0].info, "kv_blocks_total", 2)
    bench.cluster.table.changed("d0")
    with pytest.raises(InvalidRequest, match="no decode worker can hold more than 32"):
        await bench.ask(prompt(max_new_tokens=100))


async def test_a_slow_reader_gets_all_that_came_meanwhile_in_one_piece() -> None:
    bench = Bench(script=says("x" * 300))
    pieces = []
    async with contextlib.aclosing(bench.pipeline.generate(prompt(max_new_tokens=300), "slow")) as stream:
        async for item in stream:
            if isinstance(item, Delta):
                pieces.append(item)
                if len(pieces) == 1:
                    await until(lambda: not bench.cluster.num_running)
    assert len(pieces) == 2
    assert "".join(piece.text for piece in pieces) == "x" * 300

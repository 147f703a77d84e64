"""Several answers to one prompt, logprobs, and the prompt given back."""

import math

import pytest

from router.answer import Delta
from router.fake_workers import Script
from router.job import Outcome
from tandem.errors import Unavailable
from tandem.request import Phase
from tandem.v1 import inference_pb2 as pb
from tests.router.tools import EOS, Bench, prompt, says


async def everything(bench: Bench, message: pb.GenerateRequest) -> tuple[list[Delta], list[Outcome]]:
    items = [item async for item in bench.pipeline.generate(message, "test")]
    return [i for i in items if isinstance(i, Delta)], [i for i in items if isinstance(i, Outcome)]


async def test_n_answers_come_side_by_side_each_with_its_own_end() -> None:
    bench = Bench(num_decode=2, script=Script(answer=lambda request, index: request.sampling.seed % 100 + index))
    deltas, outcomes = await everything(bench, prompt(n=5, max_new_tokens=4, sampling=pb.Sampling(seed=7)))
    assert sorted(outcome.index for outcome in outcomes) == [0, 1, 2, 3, 4]
    answers = [[token for d in deltas if d.index == index for token in d.token_ids] for index in range(5)]
    assert answers[0] == [7, 8, 9, 10]
    assert len({tuple(answer) for answer in answers}) == 5
    assert [job.phase for job in bench.ended] == [Phase.FINISHED] * 5
    bench.assert_nothing_is_left()


async def test_one_answer_that_fails_ends_the_others() -> None:
    bench = Bench(script=Script(step_s=0.001, lost_after={"d0": 5}))
    bench.pipeline._config = bench.pipeline._config.__class__(queue_wait_s=0.01)
    bench.pipeline._queue._wait_s = 0.01
    with pytest.raises(Unavailable):
        await everything(bench, prompt(n=3, max_new_tokens=50))
    assert len(bench.ended) == 3
    bench.assert_nothing_is_left()


async def test_a_client_that_leaves_frees_all_answers() -> None:
    bench = Bench(script=Script(step_s=0.001))
    stream = bench.pipeline.generate(prompt(n=4, max_new_tokens=400), "test")
    await anext(stream)
    await stream.aclose()
    assert [job.phase for job in bench.ended] == [Phase.CANCELLED] * 4
    bench.assert_nothing_is_left()


async def test_every_token_has_its_logprobs_the_first_one_too() -> None:
    deltas, _ = await everything(Bench(script=says("abc")), prompt(logprobs=2))
    tokens = [token for delta in deltas for token in delta.token_ids]
    told = [entry for delta in deltas for entry in delta.logprobs]
    assert tokens == [*b"abc", EOS]
    assert [entry.top[0][0] for entry in told] == tokens
    assert all(entry.logprob == -math.log(2) and len(entry.top) == 2 for entry in told)


async def test_logprobs_survive_the_loss_of_a_decode_worker_each_once() -> None:
    bench = Bench(num_decode=2, script=Script(lost_after={"d0": 3, "d1": 3}, answer=lambda request, index: 65 + index))
    bench.cluster.script.lost_after = {"d0": 3}
    deltas, [outcome] = await everything(bench, prompt(logprobs=1, max_new_tokens=9))
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert [entry.top[0][0] for delta in deltas for entry in delta.logprobs] == tokens == list(range(65, 74))
    assert outcome.attempts in (1, 2)


async def test_nothing_is_told_that_nobody_asked_for() -> None:
    deltas, _ = await everything(Bench(script=says("abc")), prompt())
    assert all(delta.logprobs == () and delta.prompt is None for delta in deltas)


async def test_the_prompt_comes_back_once_with_logprobs_of_all_but_its_first_token() -> None:
    deltas, _ = await everything(Bench(script=says("abc")), prompt("hello", echo=True, prompt_logprobs=1))
    told = [delta.prompt for delta in deltas if delta.prompt]
    assert deltas[0].prompt is not None
    assert len(told) == 1
    assert (told[0].text, bytes(told[0].token_ids)) == ("hello", b"hello")
    assert [entry.top[0][0] for entry in told[0].logprobs] == list(b"ello")


async def test_tokens_echoed_are_decoded_and_without_echo_only_tokens_come() -> None:
    ids = pb.TokenIds(ids=b"hi")
    deltas, _ = await everything(Bench(), pb.GenerateRequest(token_ids=ids, echo=True, max_new_tokens=1))
    assert deltas[0].prompt is not None
    assert deltas[0].prompt.text == "hi"
    deltas, _ = await everything(Bench(), pb.GenerateRequest(token_ids=ids, prompt_logprobs=0, max_new_tokens=1))
    assert deltas[0].prompt is not None
    assert deltas[0].prompt.text == ""


async def test_a_stop_string_before_the_least_length_does_not_count() -> None:
    _, text, outcome = await Bench(script=says("xx-yy-zz")).ask(prompt(stop=["-"], min_new_tokens=3))
    assert (text, outcome.finish_reason.value) == ("xx-yy", "stop")

"""What one lost, ended or restarted process costs, on a whole cluster of real ones: time, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import cache
from itertools import islice

import grpc
import pytest
import pytest_asyncio

from bench.up import UpCluster, is_full, up_cluster
from tandem.request import Request, SamplingParams, StopRules
from tandem.tokenizer import Tokenizer
from tandem.v1 import operations_pb2
from tandem.worker_process import find_process
from tests.chaos.cases import Case, clear_cases, long_requests, random_model
from tests.chaos.load import ask

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LONG = 500
LONGEST = 900
DRAIN_S = 4.0
PROMPTS = tuple(f"Chapter {number}. Once upon a time" for number in range(1, 65))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[UpCluster]:
    settings: dict[str, object] = {"worker": {"drain_s": DRAIN_S}}
    async with up_cluster("--memory-gib", "0.3", prefill=2, decode=2, settings=settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: UpCluster) -> AsyncIterator[UpCluster]:
    """Whole before every test, and after it."""
    await shared.until_whole()
    yield shared
    await shared.until_whole(120)


@cache
def long_answer(sampling: SamplingParams) -> tuple[str, tuple[int, ...]]:
    """A prompt that the model answers with `LONG` tokens, its own end tokens notwithstanding; and that answer."""
    tokenizer = Tokenizer.load(random_model().folder)
    stop = StopRules(LONG, tokenizer.eos_ids)
    requests = (Request(text, tuple(tokenizer.encode(text)), sampling, stop) for text in PROMPTS)
    for case in clear_cases(requests):
        if len(case.expected) == LONG:
            return case.request.request_id, case.expected
    pytest.skip("the model ends every answer early")


@cache
def longest_cases() -> tuple[Case, ...]:
    return tuple(islice(clear_cases(long_requests(LONGEST)), 6))


def long_cases(count: int, num_tokens: int) -> list[Case]:
    """Greedy requests with answers of so many tokens."""
    stop = StopRules(num_tokens)
    return [Case(replace(case.request, stop=stop), case.expected[:num_tokens]) for case in longest_cases()[:count]]


async def tandem_generate(cluster: UpCluster, *words: str) -> Process:
    command = (sys.executable, "-m", "tandem.cli.main", "generate", "--address", cluster.address, *words)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


async def busy_worker(cluster: UpCluster, role: str, known: frozenset[str] = frozenset()) -> operations_pb2.WorkerStatus:
    """The one of the role that computes most, once one does."""

    def runs(status: operations_pb2.Status) -> bool:
        return any(worker.role == role and worker.running for worker in status.workers)

    status = await cluster.until(runs, 30)
    return max((w for w in status.workers if w.role == role), key=lambda w: w.running)


async def until_gone(pid: int, timeout_s: float) -> float:
    """Seconds until the process had ended."""
    begin_s = time.monotonic()
    while (found := find_process(pid)) is not None and found[1] != "Z":
        assert time.monotonic() - begin_s < timeout_s, "the process is still there"
        await asyncio.sleep(0.02)
    return time.monotonic() - begin_s


async def test_generate_shows_the_whole_right_answer_though_its_decode_worker_is_killed(cluster: UpCluster) -> None:
    prompt, answer = long_answer(SamplingParams())
    process = await tandem_generate(cluster, prompt, "--max-new-tokens", str(LONG))
    assert process.stdout is not None
    begin = await process.stdout.readexactly(20)
    os.kill((await busy_worker(cluster, "decode")).pid, signal.SIGKILL)
    rest, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode() + cluster.log
    detokenizer = Tokenizer.load(random_model().folder).detokenizer()
    expected = detokenizer.push(answer) + detokenizer.flush()
    assert begin + rest == (expected + "\n").encode()
    assert "attempt 1" in cluster.log


async def test_a_sampled_answer_is_the_same_though_its_decode_worker_is_killed(cluster: UpCluster) -> None:
    """Equal in every token; see `tests.chaos.cases` for what rounding may do, and why it does nothing here."""
    prompt, answer = long_answer(SamplingParams(temperature=0.8, seed=42))
    words = ("--max-new-tokens", str(LONG), "--temperature", "0.8", "--seed", "42", "--json")
    process = await tandem_generate(cluster, prompt, *words)
    victim = await busy_worker(cluster, "decode")
    await asyncio.sleep(1.0)
    os.kill(victim.pid, signal.SIGKILL)
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode() + cluster.log
    told = json.loads(stdout)
    assert told["attempts"] == 2
    assert tuple(told["token_ids"]) == answer


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_asked_to_end_takes_nothing_new_and_ends_with_no_stream_broken(cluster: UpCluster, role: str) -> None:
    cases = long_cases(6, LONGEST)
    running = [asyncio.create_task(ask(cluster.stub, case)) for case in cases]
    await busy_worker(cluster, "decode")
    victim = next(worker for worker in await cluster.workers(role) if worker.state == "ready")
    os.kill(victim.pid, signal.SIGTERM)

    def is_draining(status: operations_pb2.Status) -> bool:
        return all(worker.state != "ready" for worker in status.workers if worker.id == victim.id)

    await cluster.until(is_draining, 2.0)
    late = [asyncio.create_task(ask(cluster.stub, case)) for case in cases[:2]]
    assert await until_gone(victim.pid, DRAIN_S + 15.0) < DRAIN_S + 15.0
    records = await asyncio.gather(*running, *late)
    assert [(record.wrong, record.status) for record in records] == [("", None)] * len(records)


async def test_a_second_signal_ends_a_worker_at_once_and_its_streams_go_on(cluster: UpCluster) -> None:
    running = [asyncio.create_task(ask(cluster.stub, case)) for case in long_cases(6, LONGEST)]
    victim = await busy_worker(cluster, "decode")
    os.kill(victim.pid, signal.SIGTERM)
    await asyncio.sleep(0.3)
    os.kill(victim.pid, signal.SIGTERM)
    assert await until_gone(victim.pid, 10) < DRAIN_S
    records = await asyncio.gather(*running)
    assert [(record.wrong, record.status) for record in records] == [("", None)] * len(records)


async def test_a_killed_router_is_started_again_and_workers_live_on(cluster: UpCluster) -> None:
    before = {worker.id: worker.pid for worker in await cluster.workers()}
    cases, short = long_cases(6, LONGEST), long_cases(2, 60)
    running = [asyncio.create_task(ask(cluster.stub, case)) for case in cases]
    await busy_worker(cluster, "decode")
    router = cluster.router_pid()
    os.kill(router, signal.SIGKILL)
    killed_s = time.monotonic()
    broken = await asyncio.gather(*running)
    assert {record.status for record in broken} == {grpc.StatusCode.UNAVAILABLE}
    assert [record.wrong for record in broken] == [""] * len(broken)  # what came before was right
    await cluster.until(is_full, 30)
    assert [(await ask(cluster.stub, case)).wrong for case in short] == ["", ""]
    assert time.monotonic() - killed_s < 30
    assert cluster.router_pid() != router
    assert {worker.id: worker.pid for worker in await cluster.workers()} == before
    assert "started again" in cluster.log


async def test_a_router_asked_to_end_finishes_its_streams_first(cluster: UpCluster) -> None:
    running = [asyncio.create_task(ask(cluster.stub, case)) for case in long_cases(4, 150)]
    await busy_worker(cluster, "decode")
    os.kill(cluster.router_pid(), signal.SIGTERM)
    records = await asyncio.gather(*running)
    assert [(record.wrong, record.status) for record in records] == [("", None)] * len(records)


async def test_a_second_signal_ends_the_router_at_once(cluster: UpCluster) -> None:
    running = [asyncio.create_task(ask(cluster.stub, case)) for case in long_cases(6, LONGEST)]
    await busy_worker(cluster, "decode")
    router = cluster.router_pid()
    os.kill(router, signal.SIGTERM)
    await asyncio.sleep(0.3)
    os.kill(router, signal.SIGTERM)
    assert await until_gone(router, 10) < 5
    records = await asyncio.gather(*running)
    assert {record.status for record in records} <= {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}

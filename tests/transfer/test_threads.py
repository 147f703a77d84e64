"""Sender and receiver in threads of their own, over the fake fabric: they wake, stop, and end when a step goes wrong."""

from __future__ import annotations

import logging
import threading

import pytest

from tandem.errors import TransferFailed
from tests.transfer.helpers import Pair, grant_of
from transfer.handoff import HandoffResult, Stopwatch
from transfer.looper import Looper


def test_a_woken_thread_looks_at_once() -> None:
    looks = threading.Semaphore(0)

    def step() -> float:
        looks.release()
        return 3600.0

    looper = Looper("test", step, lambda: None)
    looper.start()
    assert looks.acquire(timeout=5)
    looper.wake()
    assert looks.acquire(timeout=5)
    looper.stop()


def test_a_step_that_raises_ends_the_thread_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    died = threading.Event()

    def step() -> float:
        raise ZeroDivisionError("bug")

    with caplog.at_level(logging.ERROR):
        looper = Looper("test", step, died.set)
        looper.start()
        assert died.wait(5)
        looper.stop()
    assert "bug" in caplog.text


def test_handoffs_between_running_threads() -> None:
    pair = Pair()
    verified = threading.Semaphore(0)
    pair.decode.receiver.on_verified = lambda *_: verified.release()
    pair.sender.start()
    pair.decode.receiver.start()
    pair.sender.connect("d", pair.decode.agent.metadata, pair.decode.layout)
    leases = [pair.reserve(request_id=f"r{i}") for i in range(3)]
    pair.decode.receiver.wake()
    for lease in leases:
        handoff = pair.sender.begin(grant_of(lease), lease.request.request_id, 1, (3, 9, 5), 2)
        handoff.push_kv(0, 1)
        handoff.push_state(0)
        handoff.finish(10, 42, 0.0, pair.results.append)
    assert all(verified.acquire(timeout=5) for _ in leases)
    pair.sender.stop()
    pair.decode.receiver.stop()
    assert [type(result) for result in pair.results] == [HandoffResult] * 3
    assert not pair.sender.alive
    assert not pair.decode.receiver.alive


def test_a_bug_in_the_senders_thread_fails_what_is_open() -> None:
    pair = Pair()

    def broken() -> list[tuple[str, bytes]]:
        raise ZeroDivisionError("bug")

    handoff = pair.sender.begin(grant_of(pair.reserve()), "r", 1, (3, 9, 5), 2)
    pair.sender.step()
    pair.agent.take_notifications = broken  # type: ignore[method-assign]
    done = threading.Event()
    handoff.finish(10, 42, 0.0, lambda result: (pair.results.append(result), done.set())[0])
    pair.sender.start()
    assert done.wait(5)
    pair.sender.stop()
    assert isinstance(pair.results[0], TransferFailed)
    assert not pair.sender.alive


def test_a_stopwatch_counts_overlapping_flights_once() -> None:
    watch = Stopwatch()
    for now, act in [
        (0.0, watch.start),
        (1.0, watch.start),
        (2.0, watch.stop),
        (5.0, watch.stop),
        (7.0, watch.start),
        (8.0, watch.stop),
    ]:
        act(now)
    assert watch.total_s == 6.0

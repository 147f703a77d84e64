"""A step loop's thread lets the other threads of its process go first."""

import os
import sys
import threading

import pytest

from tandem.step_thread import step_thread

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to the process")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def nicenesses_of_a_step_thread() -> list[int]:
    told: list[int] = []
    thread = step_thread(lambda: told.append(niceness()), "steps")
    thread.start()
    thread.join()
    return told


def test_who_computes_is_nicer_than_who_speaks_whatever_the_process_is() -> None:
    ours = niceness()
    assert nicenesses_of_a_step_thread() == [min(19, ours + 5)]
    assert niceness() == ours


def test_where_the_system_refuses_it_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refused)
    assert nicenesses_of_a_step_thread() == [niceness()]

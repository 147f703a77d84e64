"""A step loop's thread lets the other threads of its process go first."""

import os
import sys
import threading

import pytest

from tandem.step_thread import step_thread


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness belongs to the process")
def test_who_computes_is_nicer_than_who_speaks() -> None:
    niceness: list[int] = []
    thread = step_thread(lambda: niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())), "steps")
    thread.start()
    thread.join()
    assert niceness[0] > os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

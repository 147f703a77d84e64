"""Nothing outlives `up`, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.cli.reaper import descendants, marked

# A parent that starts the reaper, and a descendant two steps down that left its process group and its session.
PARENT = """
import os, subprocess, sys, time
from tandem.cli.reaper import MARK, start_reaper
reaper = start_reaper()
child = subprocess.Popen([sys.executable, "-S", "-c",
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True); time.sleep(60)"], start_new_session=True)
print(os.environ[MARK], reaper, flush=True)
time.sleep(60)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_descendants_and_the_reaper_go_with_the_parent(ending: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        mark, reaper = parent.stdout.readline().split()
        deadline = time.monotonic() + 10
        while len(marked(mark)) < 2 and time.monotonic() < deadline:
            os.sched_yield()
        assert len(marked(mark)) == 2
        parent.send_signal(ending)
        parent.wait(10)
        while (marked(mark) or is_alive(int(reaper))) and time.monotonic() < deadline:
            os.sched_yield()
        assert marked(mark) == []
        assert not is_alive(int(reaper))


def test_a_descendant_that_overwrote_its_environment_goes_too() -> None:
    code = PARENT.replace('[sys.executable, "-S", "-c",', "['env', '-i', sys.executable, \"-S\", \"-c\",")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        mark, _ = parent.stdout.readline().split()
        time.sleep(1.5)  # the reaper looks every second
        below = descendants(parent.pid)
        assert len(below) == 3
        assert marked(mark) == []
        parent.kill()
        parent.wait(10)
        deadline = time.monotonic() + 10
        while any(is_alive(pid) for pid, _ in below) and time.monotonic() < deadline:
            os.sched_yield()
        assert [pid for pid, _ in below if is_alive(pid)] == []


def test_processes_of_others_carry_no_mark() -> None:
    assert marked("0" * 32) == []

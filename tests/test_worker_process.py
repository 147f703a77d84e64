"""A worker's process ends in good order when it is asked to, and at once when it is asked twice."""

from __future__ import annotations

import signal
import subprocess
import sys

# A worker without work: it says what happens to it. What it drains takes as long as its standard input is open.
WORKER = """
import asyncio, sys
from tandem.worker_process import WorkerProcess

class Host:
    is_alive = True
    async def drain(self, drain_s=None):
        print("draining", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print("drained", flush=True)
    async def stop(self):
        print("stopped", flush=True)

async def make(progress):
    if sys.argv[1] == "starting":
        print("starting", flush=True)
        await asyncio.Event().wait()
    return Host()

process = WorkerProcess(make)
process.start()
print("started", flush=True)
print(process.wait_stopped(), flush=True)
"""


# The same, asked twice as by a controller and by its next life.
ASKED_AGAIN = """
import asyncio, threading, time
from tandem.worker_process import WorkerProcess

class Host:
    is_alive = True
    async def drain(self, drain_s=None):
        print("drained within", drain_s, flush=True)
    async def stop(self):
        pass

made = []
async def make(progress):
    made.append(await asyncio.sleep(0.05, Host()))
    return made[-1]

process = WorkerProcess(make)
starts = [threading.Thread(target=process.start) for _ in range(2)]
[start.start() for start in starts]; [start.join() for start in starts]
print("hosts:", len(made), flush=True)
first = threading.Thread(target=lambda: print(process.wait_stopped(), flush=True))
first.start()
while not process._num_waits:
    time.sleep(0.001)
second = threading.Thread(target=lambda: print(process.wait_stopped(), flush=True))
second.start()
first.join()
process.stop(1.5)
second.join()
"""


def start(mode: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_runs_is_drained_and_the_process_ends_with_0() -> None:
    with start("serving") as process:
        assert line(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "draining"
        assert process.stdin is not None
        process.stdin.close()
        assert [line(process) for _ in range(3)] == ["drained", "stopped", "it was asked to end by SIGTERM"]
        assert process.wait(10) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    with start("serving") as process:
        assert line(process) == "started"
        process.send_signal(signal.SIGTERM)
        assert line(process) == "draining"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 1


def test_one_that_has_nothing_to_drain_yet_ends_at_once() -> None:
    with start("starting") as process:
        assert line(process) == "starting"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_what_another_controller_asks_again_is_done_once_and_its_wait_takes_the_place_of_the_first() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED_AGAIN], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.splitlines() == ["hosts: 1", "another waits for the end", "drained within 1.5", "stopped"]

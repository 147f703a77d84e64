"""What people see while a cluster starts."""

import io

from controller.overview import Overview, PoolOverview, WorkerOverview
from tandem.cli.progress import LoadingDisplay, loading_line
from tandem.clock import FakeClock

VIEW = Overview(
    pools={"prefill": PoolOverview(2, 1, "1 starting", ""), "decode": PoolOverview(1, 0, "1 starting", "")},
    workers=(
        WorkerOverview("prefill-1", "prefill", "ready", 100, 100),
        WorkerOverview("prefill-2", "prefill", "starting", 43, 100),
        WorkerOverview("decode-3", "decode", "starting", 0, 0),
    ),
    model_name="",
)


def test_the_line_says_who_is_ready_and_how_far_the_others_are() -> None:
    assert loading_line(VIEW) == "prefill 1/2 ready, 43 % loaded · decode 0/1 ready"


def test_a_terminal_gets_one_line_that_changes_and_is_cleared() -> None:
    stream, clock = io.StringIO(), FakeClock()
    display = LoadingDisplay(stream, clock, live=True)
    display.show("a long line")
    display.show("short")
    display.clear()
    written = stream.getvalue()
    assert "\n" not in written
    assert written.rsplit("\r", 2)[1].strip() == ""


def test_a_log_gets_a_line_each_few_seconds() -> None:
    stream, clock = io.StringIO(), FakeClock()
    display = LoadingDisplay(stream, clock, live=False)
    for _ in range(100):
        display.show("loading")
        clock.advance(0.1)
    display.clear()
    assert stream.getvalue().splitlines() == ["tandem: loading (0 s)", "tandem: loading (5 s)"]

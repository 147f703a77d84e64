"""What the controller saves comes back as it was."""

from controller.events import Event, EventKind, EventLog
from controller.saved import SavedState, WorkerRecord, from_json, to_json


def test_a_state_comes_back_as_it_was_saved() -> None:
    state = SavedState(
        "7f3a",
        12,
        {"prefill": None, "decode": 3},
        (
            WorkerRecord("decode-7f3a-11", 11, "decode", "ready", b"\x00\xff", ("node", 42, 99), retiring=True),
            WorkerRecord("prefill-7f3a-2", 2, "prefill", "draining", reason="1 prefill wanted", drain_s=1.5),
        ),
        (Event(3, 1.25, EventKind.DRAINED, "decode-7f3a-1", "it has ended"),),
        4711,
    )
    assert from_json(to_json(state)) == state


def test_event_numbers_go_on_and_the_log_is_bounded() -> None:
    log = EventLog(lambda: 5.0)
    log.restore([Event(40, 1.0, EventKind.SCALED, "decode", "before")])
    for _ in range(100):
        log.note(EventKind.READY, "decode-1", "ready")
    assert log.all[-1] == Event(140, 5.0, EventKind.READY, "decode-1", "ready")
    assert len(log.all) == 64
    assert [event.number for event in log.newest(2)] == [139, 140]

"""`status`: the JSON object that tools rely on, and the table for people."""

import pytest

from tandem.cli import main as cli
from tandem.cli.status import as_json, as_text
from tandem.v1 import operations_pb2

STATUS = operations_pb2.Status(
    model_name="embedded",
    model_fingerprint="abc123",
    workers=[
        operations_pb2.WorkerStatus(
            id="prefill-7f3a-1",
            role="prefill",
            state="ready",
            pid=42,
            node="here",
            address="127.0.0.1:4000",
            transport="cma",
            queue=3,
            running=1,
            kv_blocks=operations_pb2.UsedOfTotal(used=5, total=100),
            state_slots=operations_pb2.UsedOfTotal(used=1, total=64),
            step_seconds=0.012,
        ),
        operations_pb2.WorkerStatus(id="decode-7f3a-12", role="decode", state="draining"),
    ],
    leases={"running": 2, "quarantined": 0},
    lease_ages={"running": 12.34, "quarantined": 0.0},
    requests={"queued": 3, "decoding": 0},
    pools={
        "prefill": operations_pb2.PoolSize(wanted=1, ready=1),
        "decode": operations_pb2.PoolSize(wanted=2, ready=1, reason="2 wanted, nodes offer 1 unit", offered=1),
    },
    events=[
        operations_pb2.ClusterEvent(number=7, time_s=1.5, kind="scaled", subject="decode", text="decode scaled from 1 to 2"),
        operations_pb2.ClusterEvent(number=8, time_s=2.5, kind="lost", subject="decode-7f3a-11", text="decode-7f3a-11 is lost"),
    ],
)


def test_json_has_the_promised_names() -> None:
    data = as_json(STATUS)
    assert set(data) == {"model", "workers", "leases", "lease_ages", "requests", "pools", "events", "cordoned"}
    assert data["model"] == {"name": "embedded", "fingerprint": "abc123"}
    assert data["leases"] == {"running": 2, "quarantined": 0}
    assert data["lease_ages"] == {"running": 12.34, "quarantined": 0.0}
    assert data["requests"] == {"queued": 3, "decoding": 0}
    assert data["workers"][0] == {
        "id": "prefill-7f3a-1",
        "role": "prefill",
        "state": "ready",
        "pid": 42,
        "node": "here",
        "address": "127.0.0.1:4000",
        "transport": "cma",
        "queue": 3,
        "running": 1,
        "kv_blocks": {"used": 5, "total": 100},
        "state_slots": {"used": 1, "total": 64},
        "pool_mismatches": 0,
        "wasted_chunks": 0,
        "worst_wasted_chunks": 0,
        "step_seconds": 0.012,
    }


def test_json_tells_how_each_pool_is_and_what_happened_to_it() -> None:
    data = as_json(STATUS)
    reason = "2 wanted, nodes offer 1 unit"
    counts = {"wanted": 2, "ready": 1, "offered": 1, "starting": 0, "draining": 0}
    assert data["pools"]["decode"] == {**counts, "reason": reason}
    text = "decode scaled from 1 to 2"
    assert data["events"][0] == {"number": 7, "time": 1.5, "kind": "scaled", "subject": "decode", "text": text}


def test_the_newest_events_stand_below_the_table_when_asked_for() -> None:
    assert "scaled" not in as_text(STATUS)
    last = as_text(STATUS, 1).splitlines()[-1]
    assert last.endswith("decode-7f3a-11 is lost")
    assert "scaled" not in as_text(STATUS, 1)


def test_the_table_is_aligned_and_gives_reasons() -> None:
    lines = as_text(STATUS).splitlines()
    assert "decode    1 of 2 ready  (2 wanted, nodes offer 1 unit)" in lines
    assert "requests  3 queued" in lines
    assert "leases    2 running (oldest 12.3 s)" in lines
    header, first, second = lines[-3:]
    assert header.index("ROLE") == first.index("prefill ", 3) == second.index("decode ", 3)
    assert first.endswith("5/100         1/64")


def test_hosts_that_get_no_workers_are_shown() -> None:
    status = operations_pb2.Status(cordoned=["10.0.0.1", "10.0.0.2"])
    assert "cordoned  10.0.0.1, 10.0.0.2" in as_text(status).splitlines()
    assert as_json(status)["cordoned"] == ["10.0.0.1", "10.0.0.2"]
    assert "cordoned" not in as_text(STATUS)


def test_a_worker_that_misses_memory_is_pointed_out() -> None:
    worker = operations_pb2.WorkerStatus(id="decode-1", role="decode", pool_mismatches=3)
    assert "WRONG     decode-1 misses 3 KV blocks or state slots" in as_text(operations_pb2.Status(workers=[worker]))


def test_an_empty_cluster_has_a_status_too() -> None:
    assert "none yet" in as_text(operations_pb2.Status())
    assert as_json(operations_pb2.Status())["workers"] == []


def test_without_a_router_it_says_what_to_do_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--address", "127.0.0.1:1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "tandem up" in err
    assert err.count("\n") == 1

"""`tandem status`: pools, workers, load and leases, as the router sees them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tandem.cli.client_tls import add_router_options
from tandem.cli.operations import get_status
from tandem.cli.scale import pool_line
from tandem.v1 import operations_pb2

__all__ = ["add_parser", "as_json", "as_text", "run"]

_WATCH_EVERY_S = 1.0
_WATCHED_EVENTS = 10
_CLEAR = "\x1b[H\x1b[2J"
_COLUMNS = (
    *("WORKER", "ROLE", "STATE", "PID", "NODE", "ADDRESS", "TRANSPORT"),
    *("QUEUE", "RUNNING", "STEP MS", "KV BLOCKS", "STATE SLOTS"),
)
_NUMERIC = {"PID", "QUEUE", "RUNNING", "STEP MS", "KV BLOCKS", "STATE SLOTS"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("status", help="pools, workers, load, leases", description="Show a running cluster.")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    while True:
        status = get_status(args)
        text = json.dumps(as_json(status)) if args.json else as_text(status, _WATCHED_EVENTS if args.watch else 0)
        clear = _CLEAR if args.watch and not args.json and sys.stdout.isatty() else ""
        print(clear + text, flush=True)
        if not args.watch:
            return 0
        time.sleep(_WATCH_EVERY_S)


def as_json(status: operations_pb2.Status) -> dict[str, Any]:
    """The object of `status --json`."""
    return {
        "model": {"name": status.model_name, "fingerprint": status.model_fingerprint},
        "workers": [
            {
                "id": worker.id,
                "role": worker.role,
                "state": worker.state,
                "pid": worker.pid,
                "node": worker.node,
                "address": worker.address,
                "transport": worker.transport,
                "queue": worker.queue,
                "running": worker.running,
                "kv_blocks": {"used": worker.kv_blocks.used, "total": worker.kv_blocks.total},
                "state_slots": {"used": worker.state_slots.used, "total": worker.state_slots.total},
                "pool_mismatches": worker.pool_mismatches,
                "wasted_chunks": worker.wasted_chunks,
                "worst_wasted_chunks": worker.worst_wasted_chunks,
                "step_seconds": worker.step_seconds,
            }
            for worker in status.workers
        ],
        "leases": dict(status.leases),
        "lease_ages": dict(status.lease_ages),
        "requests": dict(status.requests),
        "cordoned": list(status.cordoned),
        "pools": {role: _pool_json(pool) for role, pool in status.pools.items()},
        "events": [
            {"number": event.number, "time": event.time_s, "kind": event.kind, "subject": event.subject, "text": event.text}
            for event in status.events
        ],
    }


def _pool_json(pool: operations_pb2.PoolSize) -> dict[str, Any]:
    return {
        "wanted": pool.wanted,
        "ready": pool.ready,
        "reason": pool.reason,
        "offered": pool.offered,
        "starting": pool.starting,
        "draining": pool.draining,
    }


def as_text(status: operations_pb2.Status, num_events: int = 0) -> str:
    """For people: the model, the pools, a table of workers, counts, and the newest events."""
    lines = [f"model     {status.model_name or 'none yet'}  {status.model_fingerprint}".rstrip()]
    for role, pool in sorted(status.pools.items(), reverse=True):  # prefill first, as requests go
        lines.append(pool_line(role, pool))
    if status.cordoned:
        lines.append(f"cordoned  {', '.join(status.cordoned)}")
    lines.append(f"requests  {_counts(status.requests)}")
    lines.append(f"leases    {_counts(status.leases, status.lease_ages)}")
    lines += [
        f"WRONG     {worker.id} misses {worker.pool_mismatches} KV blocks or state slots; its log has their history"
        for worker in status.workers
        if worker.pool_mismatches
    ]
    if status.workers:
        lines += ["", *_table([_COLUMNS, *map(_row, status.workers)])]
    if events := status.events[-num_events:] if num_events else ():
        lines += ["", *(f"{time.strftime('%H:%M:%S', time.localtime(event.time_s))}  {event.text}" for event in events)]
    return "\n".join(lines)


def _row(worker: operations_pb2.WorkerStatus) -> tuple[str, ...]:
    return (
        worker.id,
        worker.role,
        worker.state,
        str(worker.pid),
        worker.node,
        worker.address,
        worker.transport,
        str(worker.queue),
        str(worker.running),
        f"{1000 * worker.step_seconds:.1f}",
        f"{worker.kv_blocks.used}/{worker.kv_blocks.total}",
        f"{worker.state_slots.used}/{worker.state_slots.total}",
    )


def _counts(counts: Mapping[str, int], ages: Mapping[str, float] = MappingProxyType({})) -> str:
    def age(name: str) -> str:
        return f" (oldest {ages[name]:.1f} s)" if name in ages else ""

    return ", ".join(f"{count} {name}{age(name)}" for name, count in sorted(counts.items()) if count) or "none"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if name in _NUMERIC else cell.ljust(width)
            for name, cell, width in zip(rows[0], row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines

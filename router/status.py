"""What `Operations.GetStatus` answers: this router's view of pools, workers, leases and its own requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from router.fleet import ClusterEvent, Fleet
from router.state import WorkerEntry, WorkerTable
from router.worker import DECODE, PREFILL, WorkerInfo, WorkerLoad
from tandem.v1 import operations_pb2 as pb

__all__ = ["status_of"]


def status_of(fleet: Fleet, table: WorkerTable, num_by_phase: Mapping[str, int]) -> pb.Status:
    leases: Counter[str] = Counter()
    ages: dict[str, float] = {}
    for entry in table.entries:
        if entry.handle.load is not None:
            leases.update(entry.handle.load.leases)
            for state, age_s in entry.handle.load.lease_ages.items():
                ages[state] = max(age_s, ages.get(state, 0.0))
    model = fleet.model.info if fleet.model else None
    return pb.Status(
        model_name=model.name if model else "",
        model_fingerprint=model.fingerprint if model else "",
        workers=sorted(
            (*map(_entry, table.entries), *map(_refused, fleet.refused.values())), key=lambda w: (w.role != PREFILL, w.id)
        ),
        leases=leases,
        lease_ages=ages,
        requests=num_by_phase,
        pools={role: _pool(fleet, table, role) for role in (PREFILL, DECODE)},
        events=map(_event, fleet.events),
        cordoned=fleet.cordoned,
    )


def _pool(fleet: Fleet, table: WorkerTable, role: str) -> pb.PoolSize:
    wish = fleet.pools.get(role)
    size = pb.PoolSize(ready=table.num_ready(role))
    if wish is not None:
        size.wanted, size.reason, size.offered = wish.wanted, wish.reason, wish.offered
        size.starting, size.draining = wish.starting, wish.draining
    return size


def _event(event: ClusterEvent) -> pb.ClusterEvent:
    return pb.ClusterEvent(number=event.number, time_s=event.time_s, kind=event.kind, subject=event.subject, text=event.text)


def _entry(entry: WorkerEntry) -> pb.WorkerStatus:
    return _worker(entry.handle.info, entry.state, entry.handle.load or WorkerLoad())


def _refused(info: WorkerInfo) -> pb.WorkerStatus:
    return _worker(info, "refused", WorkerLoad())


def _worker(info: WorkerInfo, state: str, load: WorkerLoad) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        id=info.id,
        role=info.role,
        state=state,
        pid=info.pid,
        node=info.node,
        address=info.address,
        transport=load.transport or info.transport,
        queue=load.queue,
        running=load.running,
        kv_blocks=pb.UsedOfTotal(used=load.kv_blocks_used, total=load.kv_blocks_total or info.kv_blocks_total),
        state_slots=pb.UsedOfTotal(used=load.state_slots_used, total=load.state_slots_total or info.state_slots_total),
        pool_mismatches=load.pool_mismatches,
        wasted_chunks=load.wasted_chunks,
        worst_wasted_chunks=load.worst_wasted_chunks,
        step_seconds=load.step_s,
    )

"""One run from start to the last check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.clients import Client
from tests.simulation.cluster import Cluster, Front
from tests.simulation.network import Network
from tests.simulation.scenario import Ask, Scenario
from tests.simulation.seams import patched
from tests.simulation.workers import WorkerProcess
from tests.simulation.world import Condition, World
from transfer.fake_agent import Faults

__all__ = ["Report", "run"]

_START_S = 30.0
_SERVE_S = 120.0
_SETTLE_S = 90.0
_RECOVER_S = 60.0
_NOTICED_S = 4.0
_HEARD_S = 0.5
_KEEPALIVES_S = (5.0, 20.0)  # of who calls, and of who is called: here both ends of a connection break after one of them
_LAST = 99


@dataclass(frozen=True, slots=True)
class Report:
    """violations: empty when all is well. ends: of every client, in order: its error, or "" with the whole answer."""

    violations: tuple[str, ...]
    ends: tuple[str, ...]
    attempts: int
    num_events: int
    virtual_s: float


def run(scenario: Scenario, tell: Callable[[str], None] | None = None) -> Report:
    """Never raises for what tandem does: that is in the report. tell: gets what the processes log, line by line."""
    world = World(scenario.seed)
    network = Network(world, scenario.message_delay_s, world.random("keepalive").choice(_KEEPALIVES_S))
    with patched(world, network, tell):
        cluster = Cluster(scenario, world, network)
        clients = [Client(number, ask, world) for number, ask in enumerate(scenario.asks)]
        try:
            _play(scenario, cluster, clients)
        finally:
            for process in world.processes:
                process.look_for_unseen_errors()
            report = Report(
                violations=tuple(world.violations),
                ends=tuple(client.error for client in clients),
                attempts=sum(client.outcome.attempts for client in clients if client.outcome),
                num_events=world.num_events,
                virtual_s=world.now,
            )
            world.end()
    return report


def _play(scenario: Scenario, cluster: Cluster, clients: list[Client]) -> None:
    world = cluster.world
    if not world.run_while(lambda: not cluster.is_ready(), _START_S, look_s=0.05):
        world.complain("the cluster was never ready")
        return
    began_s = world.now
    cluster.fabric.faults = scenario.faults
    world.at(began_s + scenario.faults_until_s, lambda: _calm_down(cluster))
    for act in scenario.acts:
        world.at(began_s + act.at_s, lambda act=act: cluster.apply(act))  # type: ignore[misc]
    for client in clients:
        if not scenario.acts:
            client.on_end = lambda client=client: world.at(world.now + _HEARD_S, lambda: _check_gone(cluster, client))  # type: ignore[misc]
        world.at(began_s + client.ask.at_s, lambda client=client: client.start(cluster.front(client.ask.router)))  # type: ignore[misc]
    if not world.run_while(lambda: not all(client.is_done for client in clients), _SERVE_S):
        world.complain(f"clients {[client.number for client in clients if not client.is_done]} hang")
        return
    last_act_s = max((began_s + act.at_s + getattr(act, "for_s", 0.0) for act in scenario.acts), default=0.0)
    world.run_until(max(world.now, last_act_s, began_s + scenario.faults_until_s))
    if scenario.is_calm:
        _check_calm(clients, is_tight=scenario.max_queue < len(clients))
    world.run_while(lambda: _what_is_left(cluster) != [], _SETTLE_S)
    for what in _what_is_left(cluster):
        world.complain(what)
    if not scenario.is_calm and not world.violations:
        _check_recovery(cluster, _NOTICED_S if scenario.acts else 0.0)


def _check_gone(cluster: Cluster, client: Client) -> None:
    """Nothing is computed for nobody, once both workers must have heard that the client is gone."""

    def is_its(request_id: str) -> bool:
        return request_id.startswith(f"client-{client.number}.")

    for worker in cluster.site.alive("prefill"):
        prompts = worker.worker._loop._prompts
        if any(is_its(prompt.task.request.request_id) for prompt in (*prompts.waiting, *prompts.running)):
            cluster.world.complain(f"{worker.worker_id} still computes for client {client.number}, which is gone")
    for worker in cluster.site.alive("decode"):
        loop = worker.worker._loop
        sequences = [*loop._running, *(away.sequence for away in loop._residency._away)]
        leases = [*loop.local.waiting, *(sequence.lease for sequence in sequences)]
        if any(is_its(lease.request.request_id) for lease in leases):
            cluster.world.complain(f"{worker.worker_id} still computes for client {client.number}, which is gone")


def _check_recovery(cluster: Cluster, noticed_s: float) -> None:
    """Once nothing goes wrong any more, everything is as it was: all workers there, all pairs connected, and a request needs
    one attempt."""
    world = cluster.world
    for worker in cluster.site.alive():
        worker.engine.fail_next = False
    world.run_until(world.now + noticed_s)
    world.run_while(lambda: not cluster.is_ready() or _not_connected(cluster) != [], _RECOVER_S)
    for what in _not_connected(cluster) if cluster.is_ready() else ["the pools were not refilled"]:
        world.complain(what)
    last = Client(_LAST, Ask(0.0, (1, 2, 3, 4, 5), 4), world)
    last.start(cluster.front(0))
    if not world.run_while(lambda: not last.is_done, _SERVE_S, look_s=0.05) or last.outcome is None:
        world.complain(f"after all had healed, a request failed: {last.error or 'it hangs'}")
    elif last.outcome.attempts > 1:
        world.complain(f"after all had healed, a request needed {last.outcome.attempts} attempts")


def _not_connected(cluster: Cluster) -> list[str]:
    return [
        f"{prefill.worker_id} is not connected to {decode_id}: {reason}"
        for prefill in cluster.site.alive("prefill")
        for decode_id, reason in prefill.worker._peers.troubles().items()
    ]


def _calm_down(cluster: Cluster) -> None:
    cluster.fabric.faults = Faults(delay_s=(0.0, 0.01), hang_s=cluster.fabric.faults.hang_s)


def _check_calm(clients: list[Client], is_tight: bool) -> None:
    for client in clients:
        if client.error.partition(":")[0] not in ("", "left", "deadline", *(("Overloaded",) if is_tight else ())):
            client.world.complain(f"client {client.number} failed although nothing went wrong: {client.error}")


def _what_is_left(cluster: Cluster) -> list[str]:
    """What somebody still holds for a request, now that there is none."""
    left: list[str] = []
    for worker in cluster.site.alive():
        if worker.process.condition is Condition.RUNNING:
            left += [f"{worker.worker_id}: {what}" for what in _held_by(worker)]
    for front in cluster.fronts:
        if front.process.condition is Condition.RUNNING:
            left += _held_by_router(front)
    return left


def _held_by(worker: WorkerProcess) -> list[str]:
    engine, held = worker.engine, worker.worker.pool_mismatches()
    inside: Any = worker.worker
    num_blocks = inside._loop._memory.num_blocks_held if worker.role == "prefill" else inside._leases.num_blocks_used()
    if num_blocks or engine.slots.num_used:
        held.append(f"{num_blocks} blocks and {engine.slots.num_used} slots are in use")
    if not worker.worker._thread.is_alive() or not worker.worker.is_alive:
        held.append("a thread has ended")
    if worker.role == "prefill":
        loop, sender = worker.worker._loop, worker.worker._sender
        held += [
            f"{name}: {len(there)}"
            for name in ("waiting", "reserving", "running", "leaving")
            if (there := getattr(loop._prompts, name))
        ]
        held += [f"hand-off of {o.request_id} not settled: {o.failure}" for o in sender._outgoing]
    else:
        loop, leases = worker.worker._loop, worker.worker._leases
        held += [f"{name}: {len(there)}" for name in ("_verified", "_running") if (there := getattr(loop, name))]
        held += [f"prompts to compute: {loop.local.num_waiting}"] if loop.local.num_waiting else []
        held += [f"in host memory: {loop._residency.num_away}"] if loop._residency.num_away else []
        held += [
            f"lease {lease.id[:6]} of {lease.request.request_id}/{lease.attempt} for {lease.writer_id}: "
            + ", ".join(f"{step.at_s:.2f} {step.state.value} ({step.cause})" for step in lease.history)
            for lease in leases._live.values()
        ]
    return held


def _held_by_router(front: Front) -> list[str]:
    left = [f"{front.router_id}: {count} requests {phase}" for phase, count in front.pipeline.num_by_phase.items()]
    for entry in front.table.entries:
        info = entry.handle.info
        if entry.assigned_blocks or entry.assigned_tokens:
            left.append(f"{front.router_id}: {info.id} still has {entry.assigned_blocks or entry.assigned_tokens} assigned")
        if len(entry.handle._subscriptions):
            left.append(f"{front.router_id}: subscriptions at {info.id}")
    return left

"""Who may write what, looked at from outside: every item that lands, and every block that is granted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.simulation.world import World
from transfer.fake_agent import FakeAgent, FakeFabric, Landing
from transfer.handoff import Outgoing
from transfer.layout import CacheLayout
from transfer.lease_state import AWAITED_STATES, Lease, LeaseState

__all__ = ["Watch"]

_MAY_BE_WRITTEN = AWAITED_STATES | {LeaseState.QUARANTINED}


class Watch:
    """The invariant: no block and no slot is ever writable by two leases at once.

    - A write lands only in memory of the very lease that it was granted for, while that lease waits for its writer, and that
      no other lease shares.
    - It reads only from memory of the prompt that it was posted for.
    - Memory is granted only when no write of another lease can still land in it.
    """

    def __init__(self, world: World, fabric: FakeFabric) -> None:
        self._world = world
        self._fabric = fabric
        self._prefill: dict[str, PrefillWorker] = {}
        self._decode: dict[str, DecodeWorker] = {}
        fabric.on_landing = self._landing

    def prefill(self, worker: PrefillWorker, agent: FakeAgent) -> None:
        self._prefill[worker.worker_id] = worker
        sender: Any = worker._sender
        post = sender._post_one

        def tagged(outgoing: Outgoing) -> None:
            agent.tag = outgoing.grant.lease_id
            post(outgoing)

        sender._post_one = tagged

    def decode(self, worker: DecodeWorker) -> None:
        self._decode[worker.worker_id] = worker
        leases: Any = worker._leases
        for granting in ("reserve", "grow", "swap_in"):
            setattr(leases, granting, self._watched(worker, getattr(leases, granting)))

    def _watched(self, worker: DecodeWorker, grant: Callable[..., Lease]) -> Callable[..., Lease]:
        def watched(*args: Any, **named: Any) -> Lease:
            lease = grant(*args, **named)
            self._granted(worker, lease)
            return lease

        return watched

    def _granted(self, worker: DecodeWorker, lease: Lease) -> None:
        layout = worker._layout
        for tag, items in self._fabric.in_flight(worker.worker_id):
            if tag == lease.id:
                continue
            for item in items:
                kind, index = _place(layout, item)
                if index == lease.slot if kind == "state" else index in lease.block_ids:
                    self._world.complain(
                        f"{worker.worker_id}: {kind} {index} granted while a write of lease {tag} may land in it"
                    )
                    return

    def _landing(self, landing: Landing) -> None:
        decode = self._decode[landing.target]
        kind, index = _place(decode._layout, landing.target_item)
        owners = [
            lease
            for lease in decode._leases._live.values()
            if (index == lease.slot if kind == "state" else index in lease.block_ids)
        ]
        where = f"{landing.target}: a write of lease {landing.tag} landed in {kind} {index}"
        if not owners:
            self._world.complain(f"{where}, which is free")
        elif len(owners) > 1:
            self._world.complain(f"{where}, which leases {', '.join(owner.id for owner in owners)} share")
        elif owners[0].id != landing.tag:
            self._world.complain(f"{where}, which is lease {owners[0].id}'s")
        elif owners[0].state not in _MAY_BE_WRITTEN:
            self._world.complain(f"{where}, whose lease is {owners[0].state.value}")
        elif kind == "kv" and index in owners[0].block_ids[: owners[0].num_held]:
            self._world.complain(f"{where}, which was held and is shared")
        self._check_source(landing)

    def _check_source(self, landing: Landing) -> None:
        prompts = self._prefill[landing.source]._loop._prompts
        kind, index = _place(self._prefill[landing.source]._layout, landing.source_item)
        for prompt in (*prompts.running, *prompts.leaving.values()):
            if prompt.grant is not None and prompt.grant.lease_id == landing.tag:
                if index == prompt.memory.slot if kind == "state" else index in prompt.memory.block_ids:
                    return
                break
        self._world.complain(f"{landing.source}: a write of lease {landing.tag} read {kind} {index}, which is not its prompt's")


def _place(layout: CacheLayout, item: int) -> tuple[str, int]:
    group = max(i for i, first in enumerate(layout.firsts) if first <= item)
    return layout.groups[group].kind, item - layout.firsts[group]

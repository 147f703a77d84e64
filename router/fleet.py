"""From membership to handles: who is connected, who drains, who is refused, and which model is served. Knows no gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.model import ModelInfo, ServedModel, TokenizerLike
from router.state import WorkerTable
from router.worker import WorkerHandle, WorkerInfo
from tandem.errors import TandemError

__all__ = ["ClusterEvent", "Fleet", "Member", "Membership", "PoolWish"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    worker: WorkerInfo
    draining: bool = False


@dataclass(frozen=True, slots=True)
class PoolWish:
    """reason: why the pool is not as wanted; empty when it is. offered: units of all nodes."""

    wanted: int
    reason: str = ""
    offered: int = 0
    starting: int = 0
    draining: int = 0


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """What happened to the pools, as the controller tells it; see `controller.events`."""

    number: int
    time_s: float
    kind: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The whole of it, at one moment. pools: by role. cordoned: hosts that get no workers."""

    members: tuple[Member, ...] = ()
    pools: Mapping[str, PoolWish] = field(default_factory=dict)
    events: tuple[ClusterEvent, ...] = ()
    cordoned: tuple[str, ...] = ()


class Fleet:
    """Applies memberships to the table, one at a time.

    The first worker's model is the one served for the life of this router. A worker of another is not used; the log says why.
    connect: makes a handle. load_tokenizer: from the model's folder; runs beside the event loop.
    """

    def __init__(
        self,
        table: WorkerTable,
        connect: Callable[[WorkerInfo], WorkerHandle],
        load_tokenizer: Callable[[str], TokenizerLike],
    ) -> None:
        self.model: ServedModel | None = None
        self.pools: Mapping[str, PoolWish] = {}
        self.events: tuple[ClusterEvent, ...] = ()
        self.cordoned: tuple[str, ...] = ()
        self.refused: dict[str, WorkerInfo] = {}
        self._table = table
        self._connect = connect
        self._load_tokenizer = load_tokenizer

    async def apply(self, membership: Membership) -> None:
        """
        Raises:
            TandemError: no member's tokenizer can be loaded; nothing was changed.
        """
        if self.model is None and membership.members:
            await self._adopt(membership.members[0].worker.model)
        self.pools, self.events, self.cordoned = membership.pools, membership.events, membership.cordoned
        wanted = {member.worker.id: member for member in membership.members}
        self.refused = {worker_id: info for worker_id, info in self.refused.items() if worker_id in wanted}
        gone = [entry.handle.info.id for entry in self._table.entries if entry.handle.info.id not in wanted]
        for worker_id in gone:
            log.info("worker %s has left", worker_id)
        await asyncio.gather(*(self._table.remove(worker_id).close() for worker_id in gone))
        for worker_id, member in wanted.items():
            if worker_id in self._table:
                self._table.set_draining(worker_id, member.draining)
            elif self._fits(member.worker):
                self._table.add(self._connect(member.worker), member.draining)

    async def close(self) -> None:
        handles = [self._table.remove(entry.handle.info.id) for entry in self._table.entries]
        await asyncio.gather(*(handle.close() for handle in handles))

    async def _adopt(self, info: ModelInfo) -> None:
        try:
            tokenizer = await asyncio.to_thread(self._load_tokenizer, info.tokenizer_path)
        except TandemError:
            log.exception("the tokenizer of model %s cannot be loaded", info.name)
            raise
        self.model = ServedModel(info, tokenizer)
        log.info("serving %s (%s), %d tokens of context", info.name, info.fingerprint, info.max_context_tokens)

    def _fits(self, worker: WorkerInfo) -> bool:
        if self.model is None:
            return False
        if differences := self.model.info.differences(worker.model):
            if worker.id not in self.refused:
                log.error("worker %s is not used: it has %s", worker.id, ", ".join(differences))
            self.refused[worker.id] = worker
            return False
        return True

"""A decode worker's half of a hand-off in a process of its own, told over a pipe what to do. Run by the NIXL tests."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from tandem.cache.budget import PoolSizes
from tandem.cache.memory import CacheMemory
from tandem.cache.pool import IndexPool
from tandem.cache.spec import CacheSpecs, ConvTailSpec, PagedKvSpec, RecurrentSpec
from tandem.clock import MonotonicClock
from tandem.config import TransferConfig
from tests.transfer.helpers import EPOCH, FINGERPRINT, VOCAB, request, sequence_bytes
from transfer.layout import CacheLayout, group_tensors
from transfer.lease import LeaseTable
from transfer.nixl_agent import NixlAgent
from transfer.receiver import ReaderIdentity, Receiver

__all__ = ["SIZES", "SPECS", "decode_process"]

_KV = PagedKvSpec(num_kv_heads=2, head_dim=64, block_size_tokens=32, dtype="bfloat16")
_CONV = ConvTailSpec(query_channels=512, key_channels=512, value_channels=1024, width=4, dtype="bfloat16")
_RECURRENT = RecurrentSpec(num_heads=16, key_dim=64, value_dim=64)
SPECS = CacheSpecs(layers=((_CONV, _RECURRENT), (_CONV, _RECURRENT), (_CONV, _RECURRENT), (_KV,)) * 3)
SIZES = PoolSizes(num_blocks=1024, num_slots=8)


def decode_process(name: str, config: TransferConfig, pipe: Connection) -> None:
    """Serves (command, arguments) pairs from `pipe` until `stop`."""
    torch.set_num_threads(1)
    memory = CacheMemory.allocate(SPECS, SIZES)
    layout = CacheLayout.of(memory)
    agent = NixlAgent(name, config)
    agent.register(group_tensors(memory), layout)
    clock = MonotonicClock()
    pools = IndexPool(SIZES.num_blocks, "blocks"), IndexPool(SIZES.num_slots, "slots")
    leases = LeaseTable(*pools, SPECS, clock, 60.0, EPOCH)
    outcomes: list[Any] = []
    arrived = threading.Event()

    def report(outcome: Any) -> None:
        outcomes.append(outcome)
        arrived.set()

    receiver = Receiver(
        agent=agent,
        memory=memory,
        layout=layout,
        leases=leases,
        identity=ReaderIdentity(FINGERPRINT, VOCAB),
        config=config,
        clock=clock,
        on_verified=lambda lease, record, exposed_s: report((lease.id, record.first_token, exposed_s)),
        on_refused=lambda lease, refusal: report(refusal.field),
    )
    receiver.start()
    pipe.send((agent.metadata, layout.groups, os.getpid()))
    while (command := pipe.recv())[0] != "stop":
        if command[0] == "reserve":
            lease = leases.reserve(request(*command[1:]), 1, "router", "p")
            receiver.wake()
            pipe.send(lease)
        elif command[0] == "outcome":
            arrived.wait(20)
            arrived.clear()
            pipe.send(outcomes.pop() if outcomes else None)
        elif command[0] == "finish":
            leases.start_running(command[1], EPOCH)
            pipe.send(leases.release(command[1], EPOCH))
        elif command[0] == "bytes":
            pipe.send(sequence_bytes(memory, *command[1:]))
        elif command[0] == "state":
            cpu = time.process_time()
            pipe.send((agent.transport, leases.counts_by_state(), leases.check(), cpu))
    receiver.stop()
    agent.close()

"""How a worker presents itself, and whether two workers fit together."""

from __future__ import annotations

import os
import socket

from tandem.engine import Engine
from tandem.errors import PeerRefused
from tandem.v1 import worker_pb2 as pb

__all__ = ["check_same_model", "describe"]


def describe(worker_id: str, role: str, address: str, transport: str, engine: Engine) -> pb.WorkerDescription:
    loaded = engine.loaded
    return pb.WorkerDescription(
        worker_id=worker_id,
        role=role,
        address=address,
        pid=os.getpid(),
        node=socket.gethostname(),
        transport=transport,
        model=pb.ModelIdentity(
            name=loaded.name,
            fingerprint=loaded.fingerprint,
            max_context_tokens=loaded.max_context_tokens,
            block_size_tokens=engine.block_size_tokens,
            vocab_size=loaded.config.vocab_size,
            tokenizer_path=str(loaded.folder),
        ),
        kv_blocks_total=engine.blocks.size,
        state_slots_total=engine.slots.size,
        block_bytes=engine.memory.specs.block_bytes,
        state_bytes=engine.memory.specs.slot_bytes,
    )


def check_same_model(ours: pb.ModelIdentity, theirs: pb.ModelIdentity) -> None:
    """Both halves of a hand-off must mean the same by the same bytes.

    Raises:
        PeerRefused: names the first field that differs, with both values.
    """
    for field in ("fingerprint", "block_size_tokens", "max_context_tokens", "vocab_size"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            raise PeerRefused(f"{field} differs: {mine} here, {other} at the peer; start both pools with the same settings")

"""What a worker process sets up once, before anything else."""

from __future__ import annotations

import logging
import sys

__all__ = ["prepare_process"]

_SWITCH_INTERVAL_S = 0.0005
"""How long one Python thread may hold the interpreter while others wait. The default of 5 ms is as long as a whole
hand-off: the transfer thread must not wait that long behind the step loop."""


def prepare_process(worker_id: str) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {worker_id} %(levelname)s %(name)s: %(message)s")

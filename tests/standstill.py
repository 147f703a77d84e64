"""What a paused machine, or a stopped process, is to the event loop in it."""

import time

__all__ = ["stand_still"]


def stand_still(seconds: float) -> None:
    """Nothing in this process runs meanwhile."""
    time.sleep(seconds)

"""Whose handler SIGTERM has while Ray starts in this process."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

import ray._private.utils

__all__ = ["own_signal_handler"]

_LOOK_S = 0.01
_IGNORE = 1  # SIG_IGN


@contextlib.contextmanager
def own_signal_handler() -> Iterator[None]:
    """This process's handler of SIGTERM stays. While Ray starts it puts two of its own: one in Python, that ends the process
    wherever it just is, and one in C++, that prints a trace and aborts. The first is kept away; the second cannot be, and comes
    at a moment that nobody tells, in a call that lets no Python run in this thread. So another thread puts ours back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = signal.getsignal(signal.SIGTERM), ray._private.utils.set_sigterm_handler
    done = threading.Event()
    keeper = threading.Thread(target=_keep, args=(_handler_address(), done), name="signals", daemon=True)
    ray._private.utils.set_sigterm_handler = lambda handler: None
    keeper.start()
    try:
        yield
    finally:
        done.set()
        keeper.join()
        ray._private.utils.set_sigterm_handler = theirs
        signal.signal(signal.SIGTERM, ours)


def _libc_signal(handler: int | None) -> int | None:
    """signal(3) of the C library; returns the address of the handler that was there."""
    call = ctypes.CDLL(None).signal
    call.argtypes, call.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before: int | None = call(signal.SIGTERM, handler)
    return before


def _handler_address() -> int | None:
    """Of the one that is there: the interpreter's, which calls what `signal.signal` was given."""
    address = _libc_signal(_IGNORE)
    _libc_signal(address)
    return address


def _keep(address: int | None, done: threading.Event) -> None:
    while not done.wait(_LOOK_S):
        _libc_signal(address)

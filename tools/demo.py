"""`make demo`: a cluster, an answer streamed from it, its state, and its end. Any failure ends with a code that is not 0."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["main"]

_READY_S = 180.0
_COMMAND_S = 120.0
_STOP_S = 90.0
PROMPT = "Prefill takes the prompt, decode makes the answer:"


def tandem(*words: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli.main", *words]


def main() -> int:
    address = f"127.0.0.1:{_free_port()}"
    try:
        with _cluster(address):
            _run("generate", PROMPT, "--max-new-tokens", "48", "--timeline", "--address", address)
            _run("status", "--address", address)
    except _Failed as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1
    print("\nthe cluster has stopped; `tandem up` starts one that stays")
    return 0


class _Failed(Exception):
    """The demo cannot go on; says at which step."""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _run(*words: str) -> None:
    print(f"\n$ tandem {shlex.join(words)}", flush=True)
    done = subprocess.run(tandem(*words), timeout=_COMMAND_S, check=False)
    if done.returncode:
        raise _Failed(f"`tandem {words[0]}` ended with exit code {done.returncode}")


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """A cluster that serves; its exit code must be 0 when it is stopped."""
    port = address.rpartition(":")[2]
    print(f"$ tandem up --grpc-port {port}", flush=True)
    up = subprocess.Popen(tandem("up", "--grpc-port", port, "--http-port", "0"), stdout=subprocess.PIPE, text=True)
    impatience = threading.Timer(_READY_S, up.kill)
    impatience.start()
    try:
        assert up.stdout is not None
        line = up.stdout.readline()
        impatience.cancel()
        if not line.startswith("ready"):
            raise _Failed("`tandem up` did not become ready")
        print(line, end="", flush=True)
        yield
    finally:
        impatience.cancel()
        up.send_signal(signal.SIGTERM)
        try:
            code = up.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            up.kill()
            code = up.wait()
    if code:
        raise _Failed(f"`tandem up` ended with exit code {code}")


if __name__ == "__main__":
    sys.exit(main())

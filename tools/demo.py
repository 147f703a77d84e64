"""`make demo`: a cluster, a question whose answer stands far up in a long prompt, where its time went, and the cluster's end.

The embedded model knows nothing but the prompt: only KV and state that crossed whole from the prefill to the decode worker
give the right answer. A wrong one, as any other failure, ends with a code that is not 0.
"""

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
STORY = """\
Carl made soup, and Jack cut the bread. Oscar fed the parrot and then went to bed. A cold wind blew over the hills all day.
Tom has the blue hat. Ben bought some potatoes and shared them with Leo. Anna has the red key. Emma was tired after the long
walk. Lucy sang a song while Hugo danced. The horse ran across the road and was gone. Ravi walked slowly to the barn and back
again. Tom walked slowly to the market and back again. The lamp is in the attic. Emma had a shiny dream that night. Far away
a train went past and then it was quiet again. Rosa sang a song while Ivy danced. Omar went to sleep early and Zoe read for an
hour. Snow fell in the night and covered the roofs. The green key is with Omar. Tom had a small dream that night. Noah walked
slowly to the hall and back again. Adam looked out and watched the rain for a long time. A grey cloud moved slowly across the
sky. Tom and Sara talked about the weather. Rosa lives in Ashby. Amy made soup, and Ivan cut the bread. The moon came up and
the stars were very bright. Ruth was tired after the long walk. Max said hello to Emma and smiled. A little turtle came out of
the forest and looked around. The cat sleeps in the barn. It rained in the morning, but the afternoon was bright. By noon the
fog was gone and the boats went out. The rabbit ran across the road and was gone. Leo has the red coat. The streets were full
of people, and everyone was busy. The leaves were falling and the days were short. Ivy and Nora played a game until supper. A
small cat slept near the cave. Felix looked out and watched the rain for a long time. Hana and Ivy talked about the weather.
Iris and Dora talked about the weather. Mia wanted to go to the kitchen, but it was too late. The river was slow and clear,
and small fish swam in it. Max told Tim an old story about the sea.
""".replace("\n", " ")
QUESTION = "What does Anna have?"
ANSWER = "Anna has the red key."
BEGINNING = "One day Mia went to the"


def tandem(*words: str) -> list[str]:
    return [sys.executable, "-m", "tandem.cli.main", *words]


def main() -> int:
    address = f"127.0.0.1:{_free_port()}"
    try:
        with _cluster(address):
            _ask(address)
            _run("generate", BEGINNING, "--max-new-tokens", "80", "--timeline", "--address", address)
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


def _ask(address: str) -> None:
    """The question at the end of the story, in one message of a conversation."""
    words = ("chat", "--temperature", "0", "--address", address)
    facts = [sentence for sentence in STORY.split(". ") if " has the " in sentence]
    print(f"\n$ tandem {shlex.join(words)}\n> {STORY[:76]} …")
    print(f"  ({len(STORY.split())} words, among them: {'. '.join(facts)}.)\n  … {STORY[-50:]}{QUESTION}", flush=True)
    done = subprocess.run(
        tandem(*words), input=STORY + QUESTION, capture_output=True, text=True, timeout=_COMMAND_S, check=False
    )
    print(done.stdout + done.stderr, end="", flush=True)
    if done.returncode:
        raise _Failed(f"`tandem chat` ended with exit code {done.returncode}")
    if done.stdout.strip() != ANSWER:
        raise _Failed(f"the story says: {ANSWER}")
    print("right: that is what the story says", flush=True)


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

"""`tandem chat`: a conversation in the terminal."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable, Iterator

from tandem.cli.client_tls import add_router_options, api_key_of
from tandem.client import Client, Message, Options
from tandem.config import TlsConfig
from tandem.errors import ConfigError, Overloaded, TandemError, Unavailable

__all__ = ["add_parser", "converse", "run", "typed"]

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="a conversation in the terminal",
        description="Talk to the model, one line at a time. /new begins anew; /quit or Ctrl-D ends; Ctrl-C ends an answer.",
    )
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="longest answer (default %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 takes the likeliest (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed and words give the same answers")
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    """Raises TandemError: no router answers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    tls = TlsConfig(args.tls_cert, args.tls_key, args.tls_ca, args.tls_name)
    options: Options = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature}
    if args.seed is not None:
        options["seed"] = args.seed
    with Client(args.address, tls=tls if tls != TlsConfig() else None, api_key=api_key_of(args)) as client:
        if sys.stdin.isatty():
            print(f"{client.models()[0].name} at {args.address}; /quit ends", flush=True)
        converse(client, typed(), options, args.system or "")
    return 0


def converse(client: Client, lines: Iterable[str], options: Options, system: str) -> None:
    """One answer to each line. What a client may try again, it is told; other errors end the conversation.

    Raises:
        TandemError: see `tandem.errors`.
    """
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    for line in lines:
        if line == "/quit":
            return
        if line == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(client, messages, options)
        except (Overloaded, Unavailable) as error:
            if not sys.stdin.isatty():
                raise
            print(f"tandem: {error}", file=sys.stderr, flush=True)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


def _answer(client: Client, messages: list[Message], options: Options) -> str:
    """Streamed to the terminal; reasoning is shown dim. Ctrl-C ends it here and in the cluster."""
    dim, plain = (_DIM, _PLAIN) if sys.stdout.isatty() else ("", "")
    text = ""
    stream = client.stream(messages, **options)
    try:
        for part in stream:
            if part.reasoning:
                print(f"{dim}{part.reasoning}{plain}", end="", flush=True)
            if part.text:
                print(part.text, end="", flush=True)
                text += part.text
    except KeyboardInterrupt:
        print(" …", end="")
    except TimeoutError as error:
        raise TandemError(str(error)) from error
    finally:
        print(flush=True)
    return text


def typed() -> Iterator[str]:
    """What people write, up to the end of the input. Empty lines are passed over. Raises ConfigError: it is no UTF-8."""
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise ConfigError("standard input: is no valid UTF-8") from error
        if line:
            yield line

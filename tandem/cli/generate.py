"""`tandem generate`: one completion, streamed."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import grpc
import grpc.aio

from tandem.address import check_address
from tandem.cli.client_tls import add_router_options, channel_to
from tandem.cli.timeline import draw
from tandem.errors import ConfigError, Overloaded, TandemError, Unavailable
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc
from tandem.v1 import operations_pb2
from tandem.v1 import operations_pb2_grpc as operations_grpc

__all__ = ["add_parser", "as_json", "request_of", "run"]

_HINT_S = 1.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("generate", help="stream one completion", description="Stream one completion of PROMPT.")
    parser.add_argument("prompt", metavar="PROMPT", help="text to go on from; - reads standard input")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="longest answer (default 128, or what fits)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 (default) always takes the likeliest token")
    parser.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens up to this probability (default 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens (default 0: all)")
    parser.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same answer")
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object instead of text")
    shape.add_argument("--timeline", action="store_true", help="show where the time went, after the answer")
    parser.add_argument("--timeout", type=float, metavar="S", help="give up after so many seconds")
    add_router_options(parser)


def run(args: argparse.Namespace) -> int:
    """Raises TandemError: no answer, or only the beginning of one."""
    if args.timeout is not None and not args.timeout > 0:
        raise ConfigError(f"--timeout must be above 0 seconds, not {args.timeout:g}")
    check_address(args.address, "--address")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    printer = _Printer(quiet=args.json)
    try:
        channel = partial(channel_to, args.address, args)
        asyncio.run(_stream(request_of(args), channel, args.address, args.timeout, printer))
    finally:
        printer.end_line()
    if printer.finished is None:
        raise TandemError("the router ended the answer without saying how; try again")
    if args.json:
        print(json.dumps(as_json(printer.token_ids, printer.text, printer.finished), ensure_ascii=False))
    elif args.timeline:
        print("\n" + draw(printer.finished, colour=sys.stdout.isatty()))
    return 0


def request_of(args: argparse.Namespace) -> pb.GenerateRequest:
    """
    Raises:
        ConfigError: an argument that the request cannot carry.
    """
    request = pb.GenerateRequest()
    with _named("PROMPT", "is no valid UTF-8"):
        request.text = sys.stdin.read() if args.prompt == "-" else args.prompt
    with _named("--stop", "is no valid UTF-8"):
        request.stop.extend(args.stop)
    if args.max_new_tokens is not None:
        with _named("--max-new-tokens", f"{args.max_new_tokens} is out of range"):
            request.max_new_tokens = args.max_new_tokens
    for name in ("temperature", "top_p", "top_k", "seed"):
        value = getattr(args, name)
        if value is not None:
            with _named(f"--{name.replace('_', '-')}", f"{value} is out of range"):
                setattr(request.sampling, name, value)
    return request


@contextmanager
def _named(option: str, fault: str) -> Iterator[None]:
    """What protobuf cannot take is told by the option's name."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{option}: {fault}") from error


def as_json(token_ids: list[int], text: str, finished: pb.Finished) -> dict[str, Any]:
    """The object of `generate --json`; timings in seconds."""
    usage, timings = finished.usage, finished.timings
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": finished.finish_reason,
        "usage": {name: getattr(usage, name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")},
        "timings": {
            name: getattr(timings, name) for name in ("queue", "prefill", "handoff_exposed", "ttft", "decode", "total")
        },
        "prefill_worker": finished.prefill_worker,
        "decode_worker": finished.decode_worker,
        "request_id": finished.request_id,
        "attempts": finished.attempts,
    }


class _Printer:
    """Collects the answer, and shows its text as it comes unless `quiet`."""

    def __init__(self, quiet: bool) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.finished: pb.Finished | None = None
        self._quiet = quiet

    def add(self, message: pb.GenerateResponse) -> None:
        self.token_ids += message.token_ids
        self.text += message.text
        if message.HasField("finished"):
            self.finished = message.finished
        if message.text and not self._quiet:
            print(message.text, end="", flush=True)

    def end_line(self) -> None:
        if not self._quiet and (self.finished is not None or self.text):
            print(flush=True)


async def _stream(
    request: pb.GenerateRequest,
    make_channel: Callable[[], grpc.aio.Channel],
    address: str,
    timeout_s: float | None,
    printer: _Printer,
) -> None:
    """Leaving early, by Ctrl-C or otherwise, closes the channel, which cancels the request everywhere."""
    async with make_channel() as channel:
        try:
            async for message in pb_grpc.InferenceStub(channel).Generate(request, timeout=timeout_s):
                printer.add(message)
        except grpc.aio.AioRpcError as error:
            hint = await _what_lacks(channel) if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED else ""
            raise _explain(error, address, timeout_s, hint) from error


async def _what_lacks(channel: grpc.aio.Channel) -> str:
    """Why there may have been no answer in time: pools without a ready worker. Empty: not for that, or nobody knows."""
    try:
        status = await operations_grpc.OperationsStub(channel).GetStatus(operations_pb2.GetStatusRequest(), timeout=_HINT_S)
    except grpc.aio.AioRpcError:
        return ""
    return "; ".join(
        f"no {role} worker is ready" + (f" ({pool.reason})" if pool.reason else "")
        for role, pool in sorted(status.pools.items())
        if pool.ready == 0
    )


def _explain(error: grpc.aio.AioRpcError, address: str, timeout_s: float | None, hint: str = "") -> TandemError:
    trailers = dict(error.trailing_metadata() or ())
    details = error.details() or error.code().name
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return ConfigError(details)
        case grpc.StatusCode.DEADLINE_EXCEEDED if timeout_s is not None:
            return TandemError(f"no whole answer within {timeout_s:g} s: {hint or 'allow more with --timeout'}")
        case grpc.StatusCode.UNAVAILABLE if "x-request-id" not in trailers:
            hint = "start a cluster with `tandem up`, or name its --address, if none runs there"
            return Unavailable(f"no router answers at {address}, or it was lost in the middle ({details}): {hint}")
        case grpc.StatusCode.UNAVAILABLE:
            return Unavailable(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded(details, int(trailers.get("retry-after-ms", 1000)) / 1000)
        case code:
            return TandemError(f"the router at {address} answers {code.name}: {details}")

"""`tandem verify`: the same prompts through one process and through the cluster, token for token."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc
import grpc.aio

from tandem.child import module_command
from tandem.cli.client_tls import add_tls_options, channel_to
from tandem.config import CacheConfig, ModelSource
from tandem.errors import TandemError, Unavailable
from tandem.parity import Mismatch, compare, edge_lengths, make_cases, make_crowd, message_of
from tandem.request import Request
from tandem.v1 import inference_pb2 as pb
from tandem.v1 import inference_pb2_grpc as pb_grpc

__all__ = ["add_parser", "run"]

_CALL_TIMEOUT_S = 300.0
_READY_TIMEOUT_S = 300.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("verify", help="compare the cluster's answers with one process, token for token")
    parser.add_argument("--model", default="", help="local folder or hub id; default: the embedded model")
    parser.add_argument("--dtype", default="auto", help="as given to `up`")
    parser.add_argument("--address", default="", help="HOST:PORT of a running cluster; default: start one for the test")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers of a started cluster")
    parser.add_argument("--decode", type=int, default=1, help="decode workers of a started cluster")
    parser.add_argument("--chunk-tokens", type=int, default=256, help="prefill chunk of a started cluster")
    parser.add_argument("--max-new-tokens", type=int, default=24, help="answer length of every case")
    parser.add_argument("--crowd", type=int, default=32, help="requests sent at once")
    parser.add_argument("--longest", type=int, default=1200, help="longest prompt, in tokens")
    add_tls_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.address:
        return asyncio.run(_verify(args, args.address))
    with _cluster(args) as address:
        return asyncio.run(_verify(args, address))


async def _verify(args: argparse.Namespace, address: str) -> int:
    channel = channel_to(address, args)
    try:
        stub = pb_grpc.InferenceStub(channel)
        model = await _model(stub, address)
        longest = min(args.longest, model.max_context_tokens - args.max_new_tokens)
        lengths = edge_lengths(CacheConfig().block_size_tokens, args.chunk_tokens, longest)
        alone = make_cases(lengths, model.vocab_size, args.max_new_tokens)
        crowd = make_crowd(args.crowd, longest, model.vocab_size, args.max_new_tokens)
        print(
            f"cluster at {address}: {model.name}, {len(alone)} prompts one after another, then {len(crowd)} at once", flush=True
        )
        got = [await _generate(stub, request) for request in alone]
        got += await asyncio.gather(*(_generate(stub, request) for request in crowd))
    finally:
        await channel.close()
    print("one process: the same prompts again", flush=True)
    expected = await asyncio.to_thread(_reference, args, model, [*alone, *crowd])
    return _report([*alone, *crowd], compare([*alone, *crowd], expected, got), sum(map(len, expected)))


async def _model(stub: pb_grpc.InferenceStub, address: str) -> pb.Model:
    try:
        reply: pb.ListModelsResponse = await stub.ListModels(pb.ListModelsRequest(), timeout=30)
    except grpc.aio.AioRpcError as error:
        raise Unavailable(f"no cluster answers at {address} ({error.code().name}); start one with `tandem up`") from error
    if not reply.models:
        raise Unavailable(f"the cluster at {address} serves no model yet; wait until `tandem up` prints `ready`")
    return reply.models[0]


async def _generate(stub: pb_grpc.InferenceStub, request: Request) -> list[int]:
    """The answer's tokens; a failed request is an empty answer, and said."""
    call = stub.Generate(message_of(request), timeout=_CALL_TIMEOUT_S)
    tokens: list[int] = []
    try:
        async for response in call:
            tokens.extend(response.token_ids)
    except grpc.aio.AioRpcError as error:
        print(f"{request.request_id}: {error.code().name}: {error.details()}", file=sys.stderr)
    return tokens


def _reference(args: argparse.Namespace, model: pb.Model, requests: Sequence[Request]) -> list[list[int]]:
    """One process, no transfer: the prompts one at a time, so that no batching can hide a difference."""
    from tandem.colocated import ColocatedEngine
    from tandem.model.load import load_model

    loaded = load_model(ModelSource(path=args.model, dtype=args.dtype, max_context_tokens=model.max_context_tokens))
    if loaded.fingerprint != model.fingerprint:
        raise TandemError(
            f"the cluster serves {model.fingerprint[:12]}, not {args.model or loaded.name}; give --model and --dtype"
        )
    engine = ColocatedEngine(loaded, CacheConfig(max_sequences=1), chunk_tokens=args.chunk_tokens, max_batch=1)
    return [engine.generate([request])[0] for request in requests]


def _report(requests: Sequence[Request], mismatches: Sequence[Mismatch], num_tokens: int) -> int:
    for mismatch in mismatches:
        print(f"differs  {mismatch}")
    if mismatches:
        print(f"FAILED: {len(mismatches)} of {len(requests)} answers differ")
        return 1
    print(f"equal: {len(requests)} answers, {num_tokens} tokens")
    return 0


@contextmanager
def _cluster(args: argparse.Namespace) -> Iterator[str]:
    """A cluster for the length of the test, on a port that the system chooses."""
    command = module_command("tandem.cli.main", "up", "--grpc-port", "0", "--http-port", "0")
    command += ["--prefill", str(args.prefill), "--decode", str(args.decode), "--chunk-tokens", str(args.chunk_tokens)]
    command += ["--dtype", args.dtype] + (["--model", args.model] if args.model else [])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield _await_ready(process)
    finally:
        process.terminate()
        process.wait(timeout=60)


def _await_ready(process: subprocess.Popen[str]) -> str:
    """The address in the `ready` line.

    Raises:
        Unavailable: the cluster ended before it was ready; its own sentence stands on stderr.
    """
    assert process.stdout is not None
    started_s = time.monotonic()
    for line in process.stdout:
        if line.startswith("ready"):
            return next(word for word in line.split() if ":" in word).rstrip(",")
        if time.monotonic() - started_s > _READY_TIMEOUT_S:
            break
    raise Unavailable("the cluster for the test did not start")

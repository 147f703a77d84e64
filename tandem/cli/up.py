"""`tandem up`: what is to be started, checked before anything is."""

from __future__ import annotations

import argparse
import contextlib
import errno
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tandem.config import ClusterConfig, TrustConfig
from tandem.config_json import load_file
from tandem.errors import CheckpointError, ConfigError, TandemError
from tandem.secret import Secret
from tandem.tracing import require_tracing
from tandem.trust import Certificates, Trust, read_secret

__all__ = ["add_parser", "check_model", "chosen_ports", "cluster_config", "cluster_config_of_file", "run", "settle_trust"]

T = TypeVar("T")

_GIB = 1024**3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "up",
        help="start a local cluster in the foreground",
        description="Start a cluster here (or on the Ray cluster that RAY_ADDRESS names), print a line beginning `ready` "
        "when it can serve, and stop in order on SIGINT or SIGTERM.",
    )
    parser.add_argument("--model", metavar="DIR_OR_HUB_ID", help="checkpoint to serve (default: the embedded model)")
    parser.add_argument("--prefill", type=int, metavar="N", help="prefill workers (default 1)")
    parser.add_argument("--decode", type=int, metavar="N", help="decode workers (default 1)")
    parser.add_argument("--max-prefill", type=int, metavar="N", help="to how many they can be scaled (default 4, or --prefill)")
    parser.add_argument("--max-decode", type=int, metavar="N", help="the same for decode workers")
    parser.add_argument("--host", help="address that clients connect to (default 127.0.0.1)")
    parser.add_argument("--grpc-port", type=int, metavar="PORT", help="default 50051; 0: any free one")
    parser.add_argument("--http-port", type=int, metavar="PORT", help="default 8000; 0: any free one")
    parser.add_argument("--config", metavar="FILE", help="settings as JSON (a ClusterConfig); options override it")
    parser.add_argument(
        "--cluster-secret-file", metavar="FILE", help="what the cluster's processes know each other by (default: made anew)"
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), help="of weights and KV (default auto)")
    parser.add_argument("--max-context-tokens", type=int, metavar="N", help="prompt + answer (default: the checkpoint's)")
    parser.add_argument("--memory-gib", type=float, metavar="GIB", help="KV blocks and state slots of one worker")
    parser.add_argument(
        "--prefix-cache-gib",
        type=float,
        metavar="GIB",
        help="kept states of prompts, at each prefill worker (0: off, default 0.25)",
    )
    parser.add_argument("--chunk-tokens", type=int, metavar="N", help="most prompt tokens in one prefill step (default 512)")
    parser.add_argument("--block-size-tokens", type=int, metavar="N", help="tokens per KV block (default 32)")
    parser.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector (default: as the OTEL_ variables say)",
    )


def cluster_config(args: argparse.Namespace) -> ClusterConfig:
    """The file's settings, then what the command line gave.

    Raises:
        ConfigError: the file cannot be used, or a number is out of range; names it.
    """
    config = load_file(ClusterConfig, args.config) if args.config else ClusterConfig()
    worker = config.worker
    model = _given(worker.model, path=args.model, dtype=args.dtype, max_context_tokens=args.max_context_tokens)
    budget_bytes = None if args.memory_gib is None else _budget_bytes(args.memory_gib)
    cache = _given(
        worker.cache,
        budget_bytes=budget_bytes,
        block_size_tokens=args.block_size_tokens,
        prefix_gib=args.prefix_cache_gib,
    )
    prefill = _given(worker.prefill, chunk_tokens=args.chunk_tokens)
    router = _given(config.router, host=args.host, grpc_port=args.grpc_port, http_port=args.http_port)
    worker = replace(worker, model=model, cache=cache, prefill=prefill)
    trust = _given(config.trust, secret_file=args.cluster_secret_file)
    tracing = _given(config.tracing, otlp_endpoint=args.otlp_endpoint)
    config = replace(config, worker=worker, router=router, trust=trust, tracing=tracing)
    config = _given(config, prefill=args.prefill, decode=args.decode, max_prefill=args.max_prefill, max_decode=args.max_decode)
    _check_numbers(config)
    return config


def cluster_config_of_file(path: str | None, secret_file: str | None) -> ClusterConfig:
    """The settings of a file alone, or the defaults, with the secret's file put in. Raises ConfigError: as `cluster_config`."""
    config = load_file(ClusterConfig, path) if path else ClusterConfig()
    config = replace(config, trust=_given(config.trust, secret_file=secret_file))
    _check_numbers(config)
    return config


def settle_trust(config: ClusterConfig) -> ClusterConfig:
    """The configuration with the secret made or read, and the same trust and the same collector of traces for every process.

    Raises:
        ConfigError: a file cannot be used, the configuration gives trust in more than one place, or traces are asked for and
        OpenTelemetry is not installed; says which.
    """
    require_tracing(config.tracing)
    if config.trust.secret or config.worker.trust != TrustConfig() or config.router.trust != TrustConfig():
        raise ConfigError("of a cluster's trust only the top-level `trust` can be set, and its secret only by a file")
    secret_file = config.trust.secret_file
    secret = read_secret(secret_file) if secret_file else Secret.make()
    trust = replace(config.trust, secret=secret, secret_file="")
    Trust.load(trust)  # whether the certificates can be used shows here, not in a worker's log
    Certificates.load(config.router.tls)
    shared: dict[str, Any] = {"trust": trust}
    if config.tracing.otlp_endpoint:
        shared["tracing"] = config.tracing
    return replace(config, trust=trust, worker=replace(config.worker, **shared), router=replace(config.router, **shared))


def check_model(config: ClusterConfig) -> ClusterConfig:
    """Refuse a model that cannot be served by a look at its config and the headers of its shards; a folder's path becomes
    absolute.

    Raises:
        CheckpointError: neither a folder nor a hub id, an architecture that is not served, a shard is missing or truncated, or
            a file of the embedded model was changed.
    """
    path = config.worker.model.path
    if not path:
        from tandem.model.embedded import embedded_checkpoint

        embedded_checkpoint()
        return config
    folder = Path(path).expanduser()
    if folder.is_dir():
        from tandem.model.config import ModelConfig
        from tandem.model.shards import Shards
        from tandem.tokenizer import require_tokenizer

        ModelConfig.from_folder(folder)
        Shards.open(folder)
        require_tokenizer(folder)
        model = replace(config.worker.model, path=str(folder.resolve()))
        return replace(config, worker=replace(config.worker, model=model))
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise CheckpointError(f"{path} is neither a folder nor a hub id of the form owner/name")
    return config


@contextlib.contextmanager
def chosen_ports(config: ClusterConfig) -> Iterator[ClusterConfig]:
    """The configuration with the ports of clients settled, so that a restarted router has the same. As long as the context
    lasts the system gives them to nobody else, for one of the many connections of a cluster that starts, say.

    Raises:
        ConfigError: both are the same. TandemError: a port is in use, or the host is not this machine's.
    """
    router = config.router
    if router.grpc_port and router.grpc_port == router.http_port:
        raise ConfigError(f"--grpc-port and --http-port are both {router.grpc_port}")
    with (
        _held_port(router.host, router.grpc_port, "--grpc-port") as grpc_port,
        _held_port(router.host, router.http_port, "--http-port") as http_port,
    ):
        yield replace(config, router=replace(router, grpc_port=grpc_port, http_port=http_port))


@contextlib.contextmanager
def _held_port(host: str, port: int, option: str) -> Iterator[int]:
    """Bound and not listened to: so whoever asks for that very port, and to reuse its address, may listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port whose last connections linger is free
        try:
            held.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TandemError(
                    f"port {port} of {host} is in use, perhaps by another `tandem up`; choose another with {option}"
                ) from error
            raise TandemError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        yield int(held.getsockname()[1])


def run(args: argparse.Namespace) -> int:
    with chosen_ports(settle_trust(check_model(cluster_config(args)))) as config:
        from tandem.cli.foreground import run_in_foreground

        return run_in_foreground(config)


def _budget_bytes(gib: float) -> int:
    if not 0 < gib < 2**20:
        raise ConfigError(f"--memory-gib must be more than 0 and less than {2**20}, not {gib:g}")
    return int(gib * _GIB)


def _given(config: T, **values: object) -> T:
    """`config` with the values that are not None."""
    changes: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    return replace(config, **changes)  # type: ignore[type-var]


def _check_numbers(config: ClusterConfig) -> None:
    worker, router, units = config.worker, config.router, config.units
    for name, value, low, high in (
        ("--prefill", config.prefill, 1, 1024),
        ("--decode", config.decode, 1, 1024),
        ("--max-prefill", units["prefill"], config.prefill, 1024),
        ("--max-decode", units["decode"], config.decode, 1024),
        ("--grpc-port", router.grpc_port, 0, 65535),
        ("--http-port", router.http_port, 0, 65535),
        ("--max-context-tokens", worker.model.max_context_tokens, 0, 2**31 - 1),
        ("cache.budget_bytes", worker.cache.budget_bytes, 0, 2**62),
        ("--prefix-cache-gib", worker.cache.prefix_gib, 0, 2**20),
        ("prefill.checkpoint_every_tokens", worker.prefill.checkpoint_every_tokens, 1, 2**31 - 1),
        ("--chunk-tokens", worker.prefill.chunk_tokens, 1, 2**20),
        ("--block-size-tokens", worker.cache.block_size_tokens, 1, 2**16),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{name} must be from {low} to {high}, not {value}")

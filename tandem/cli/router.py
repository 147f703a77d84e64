"""`tandem router`: one router of a running cluster. `up` starts it; on Kubernetes it has its own pods."""

from __future__ import annotations

import argparse
import asyncio
import inspect
from dataclasses import replace

from tandem.address import check_address
from tandem.config import RouterConfig
from tandem.config_json import load
from tandem.errors import ConfigError
from tandem.trust import read_secret

__all__ = ["add_parser", "router_config", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("router", description="Serve clients of a running cluster.")
    parser.add_argument(
        "--controller", required=True, metavar="HOST:PORT", help="address of the controller's Membership service"
    )
    parser.add_argument("--host", help="address that clients connect to (default 127.0.0.1)")
    parser.add_argument("--grpc-port", type=int, help="0 lets the system choose (default 50051)")
    parser.add_argument("--http-port", type=int, help="0 lets the system choose (default 8000)")
    parser.add_argument(
        "--cluster-secret-file", metavar="FILE", help="the secret that the workers have too; - reads standard input"
    )
    parser.add_argument("--settings", default="{}", metavar="JSON", help="a RouterConfig; the other options override it")


def router_config(args: argparse.Namespace) -> RouterConfig:
    """Raises ConfigError: a setting is unknown or of the wrong type, or the secret cannot be read."""
    given = {name: getattr(args, name) for name in ("host", "grpc_port", "http_port") if getattr(args, name) is not None}
    config = replace(load(RouterConfig, args.settings, "--settings"), **given)
    if config.trust.secret:
        raise ConfigError("--settings shows the cluster secret to everybody: name its file with --cluster-secret-file")
    if args.cluster_secret_file:
        config = replace(config, trust=replace(config.trust, secret=read_secret(args.cluster_secret_file)))
    return config


def run(args: argparse.Namespace) -> int:
    check_address(args.controller, "--controller")
    from router.main import run_router

    outcome = run_router(router_config(args), args.controller)
    if inspect.iscoroutine(outcome):
        outcome = asyncio.run(outcome)
    return int(outcome or 0)

"""`tandem node`: one worker's place in a cluster of several hosts. On Kubernetes each pod of a pool runs one."""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import sys
from dataclasses import replace

from tandem.address import check_address
from tandem.config import ClusterConfig
from tandem.config_json import load_file
from tandem.errors import ConfigError
from tandem.trust import Trust

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "node",
        description="Join the cluster of a `tandem head` with a place for one worker, in the foreground. SIGTERM lets the "
        "worker finish what runs before the node ends; HTTP /healthz and /readyz say how it is.",
    )
    parser.add_argument("--role", required=True, choices=("prefill", "decode"), help="which pool the worker belongs to")
    parser.add_argument("--head", required=True, metavar="HOST:PORT", help="address of the Ray head")
    parser.add_argument("--controller", required=True, metavar="HOST:PORT", help="the controller's Membership service")
    parser.add_argument("--host", required=True, metavar="ADDRESS", help="of this machine, as the others reach it")
    parser.add_argument(
        "--probe-host", default="0.0.0.0", metavar="ADDRESS", help="where probes are served (default %(default)s)"
    )
    parser.add_argument("--probe-port", type=int, default=8082, metavar="PORT", help="default %(default)s")
    parser.add_argument("--config", metavar="FILE", help="the head's settings; only `trust` is used")
    parser.add_argument("--cluster-secret-file", metavar="FILE", help="what the cluster's processes know each other by")
    parser.add_argument(
        "--leave-s", type=float, default=330.0, metavar="S", help="longest that leaving may take; more than worker.drain_s"
    )


def run(args: argparse.Namespace) -> int:
    from controller.node.node import NodeSettings, run_node

    check_address(args.head, "--head")
    check_address(args.controller, "--controller")
    if not 0 < args.probe_port < 2**16:
        raise ConfigError(f"--probe-port must be from 1 to 65535, not {args.probe_port}")
    if not (math.isfinite(args.leave_s) and args.leave_s > 0):
        raise ConfigError(f"--leave-s must be more than 0, not {args.leave_s}")
    config = load_file(ClusterConfig, args.config) if args.config else ClusterConfig()
    secret_file = args.cluster_secret_file or config.trust.secret_file
    trust = Trust.load(replace(config.trust, secret_file=secret_file))
    settings = NodeSettings(args.role, args.head, args.controller, args.host, args.probe_host, args.probe_port, args.leave_s)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(run_node(settings, trust))
    return 0

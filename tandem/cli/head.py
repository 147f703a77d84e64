"""`tandem head`: the Ray head and the controller of a cluster of several hosts. On Kubernetes it has its own pod."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from controller.node.ray_process import RayProcess, head_command, is_reachable, token_environment
from tandem.cli.errors import EXIT_OK
from tandem.cli.foreground import Incidents, StopRequest, patient_overview, pools_line
from tandem.cli.up import check_model, cluster_config_of_file, settle_trust
from tandem.clock import MonotonicClock
from tandem.config import ClusterConfig
from tandem.errors import ConfigError, TandemError

if TYPE_CHECKING:
    from controller.launch import ClusterHandle

__all__ = ["add_parser", "head_config", "run"]

_LOOK_S = 0.2
_WATCH_S = 1.0
_RAY_START_S = 120.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "head",
        description="Run the Ray head and the controller of a cluster whose workers run on other hosts (`tandem node`), in the "
        "foreground. It keeps one worker for each node that joins; routers follow its membership (`tandem router`).",
    )
    parser.add_argument("--host", required=True, metavar="ADDRESS", help="of this machine, as nodes and routers reach it")
    parser.add_argument("--ray-port", type=int, default=6379, metavar="PORT", help="for nodes (default %(default)s)")
    parser.add_argument(
        "--membership-port", type=int, default=6380, metavar="PORT", help="for routers and nodes (default %(default)s)"
    )
    parser.add_argument("--config", metavar="FILE", help="settings as JSON (a ClusterConfig); pool sizes in it are not used")
    parser.add_argument("--cluster-secret-file", metavar="FILE", help="what the cluster's processes know each other by")


def head_config(args: argparse.Namespace) -> ClusterConfig:
    """
    Raises:
        ConfigError: a setting, a port or a file cannot be used, or no secret file is named.
        CheckpointError: the model cannot be served.
    """
    for option, port in (("--ray-port", args.ray_port), ("--membership-port", args.membership_port)):
        if not 0 < port < 2**16:
            raise ConfigError(f"{option} must be from 1 to 65535, not {port}")
    if args.ray_port == args.membership_port:
        raise ConfigError(f"--ray-port and --membership-port are both {args.ray_port}")
    config = cluster_config_of_file(args.config, args.cluster_secret_file)
    if not config.trust.secret_file:
        # one made here would reach nobody
        raise ConfigError("the nodes and routers must have the same secret: name its file with --cluster-secret-file")
    return settle_trust(check_model(config))


def run(args: argparse.Namespace) -> int:
    config = head_config(args)
    out = sys.stdout
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # Ray prints to it whenever a worker dies
        return _run(config, args, lambda line: print(line, file=out, flush=True))


def _run(config: ClusterConfig, args: argparse.Namespace, tell: Callable[[str], None]) -> int:
    stop = StopRequest()
    stop.install()
    token = token_environment(config.trust.secret)
    ray = RayProcess(head_command(args.host, args.ray_port), token)
    ray.start()
    try:
        if not _until_reachable(ray, (args.host, args.ray_port), stop):
            return EXIT_OK
        address = f"{args.host}:{args.ray_port}"
        # Read when the module that follows is imported: a cluster is joined, with this token.
        os.environ.update({"RAY_ADDRESS": address, **token})
        from controller.launch import start_controller

        cluster = start_controller(config, address, args.host, args.membership_port)
        stop.install()  # importing Ray may have put handlers of its own
        tell(f"ready for nodes at {args.host}:{args.ray_port} and for routers at {cluster.address}")
        try:
            _watch(cluster, ray, stop)
        finally:
            cluster.shutdown()
    finally:
        ray.stop()
    return EXIT_OK


def _until_reachable(ray: RayProcess, address: tuple[str, int], stop: StopRequest) -> bool:
    """False: a stop was asked for before. Raises TandemError: Ray has ended, or does not listen."""
    clock = MonotonicClock()
    deadline_s = clock.now() + _RAY_START_S
    while not is_reachable(address):
        _check_alive(ray)
        if clock.now() > deadline_s:
            raise TandemError(f"the Ray head does not listen at {address[0]}:{address[1]} after {_RAY_START_S:.0f} s")
        if stop.wait(_LOOK_S):
            return False
    return True


def _check_alive(ray: RayProcess) -> None:
    if (status := ray.ended()) is not None:
        raise TandemError(f"the Ray head has ended (exit code {status}); its output above says why")


def _watch(cluster: ClusterHandle, ray: RayProcess, stop: StopRequest) -> None:
    """Until a stop is asked for: tell what went wrong and how the pools are since."""
    incidents = Incidents(cluster.log_folder)
    told = ""

    def tell(text: str) -> None:
        print(f"tandem: {text}", file=sys.stderr, flush=True)

    while not stop.wait(_WATCH_S):
        _check_alive(ray)
        if (view := patient_overview(cluster, stop, MonotonicClock(), tell)) is None:
            return
        line = pools_line(view)
        for text in [*incidents.new(view), *([line] if line != told else [])]:
            tell(text)
        told = line

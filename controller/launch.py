"""Starts a Ray cluster on this machine, or joins the one that RAY_ADDRESS names, and runs the controller in it."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

from controller.local_node import LocalNode, run_bounded
from controller.node.ray_process import OBJECT_STORE_BYTES, RAY_ENVIRONMENT
from controller.overview import Overview
from controller.reconcile import DECODE, PREFILL
from controller.share import divide
from tandem.config import ClusterConfig, beyond_loopback
from tandem.config_json import dump
from tandem.environment import ray_address
from tandem.errors import TandemError, first_line
from tandem.memory_limit import available_bytes

# Ray reads these when it is imported, and its processes when they start. On Linux it replaces a loopback address by the
# machine's own and listens on every interface, unless told that it is on one of the systems where it keeps to loopback.
# Whoever reaches Ray's own ports may run code as we do, so a cluster of our own asks for a token that only its processes have.
_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
_TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ.update(RAY_ENVIRONMENT if ray_address() else RAY_ENVIRONMENT | _LOOPBACK_ONLY | _TOKEN)

import ray  # noqa: E402
import ray.exceptions  # noqa: E402
import ray.util  # noqa: E402
from ray.job_config import JobConfig  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

from controller.actor import NAME, NAMESPACE, ControllerActor, resource  # noqa: E402
from controller.signals import own_signal_handler  # noqa: E402

__all__ = ["ClusterHandle", "start_cluster", "start_controller"]

_REACH_S = 5.0
_ANSWER_S = 20.0
_START_S = 60.0
_OWNER_TIMEOUT_S = 30.0
_SHUTDOWN_S = 30.0
_SETTLE_S = 2.0
_LOOK_S = 0.2


class _OwnCodeOnly(JobConfig):
    """Ray puts the folder of the command and the current one on the search path of all its processes, unless the job brings one
    of its own. What stands there must not run in place of ours; ours is installed on every node."""

    def _runtime_env_has_working_dir(self) -> bool:
        return True


assert hasattr(JobConfig, "_runtime_env_has_working_dir")  # Ray's own: it must notice when this is not asked any more


@dataclass(frozen=True, slots=True)
class ClusterHandle:
    """A running controller. address: of its Membership service. log_folder: where the processes of this node write."""

    address: str
    log_folder: str
    _actor: Any
    _node: LocalNode

    @property
    def may_come_back(self) -> bool:
        """Ray starts a controller that died again; nobody starts Ray again."""
        return self._node.lives

    def overview(self) -> Overview:
        """What there is; also tells the controller that its owner lives.

        Raises:
            TandemError: the controller does not answer any more.
        """
        try:
            view: Overview = ray.get(self._actor.overview.remote(), timeout=_ANSWER_S)
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
            raise TandemError(f"the controller does not answer: {first_line(error)}") from error
        return view

    def shutdown(self) -> None:
        """Stop the workers in order, then the controller, then this process's Ray; bounded, also where the signal that ends us
        went to Ray's processes too."""
        node = self._node.now()
        if not self._stop_in_order(node) and node.raylet is not None:
            node.end(grace_s=0)  # Ray would wait for each of them
        if node.raylet is None:
            run_bounded(self._end_actors, _ANSWER_S)
        ray.shutdown()
        node.end()

    def _stop_in_order(self, node: LocalNode) -> bool:
        """Whether the controller could do it. Where the signal went to the workers too, there is soon nothing left to stop,
        while a controller whose Ray is ending waits for it."""
        ended, deadline_s = self._actor.shutdown.remote(), time.monotonic() + _SHUTDOWN_S
        while node.lives and time.monotonic() < deadline_s:
            if ray.wait([ended], timeout=_LOOK_S)[0]:
                return True
            if node.raylet is not None and not node.workers():
                deadline_s = min(deadline_s, time.monotonic() + _SETTLE_S)
        return False

    def _end_actors(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
        _end_left_over()


@own_signal_handler()
def start_cluster(config: ClusterConfig) -> ClusterHandle:
    """Begin to start the pools; returns when the controller runs, before workers are ready.

    Raises:
        TandemError: the cluster cannot be reached, offers too few units, or already serves.
    """
    joined = ray_address()
    if joined:
        log_folder = _join(joined)
        worker, host = beyond_loopback(config.worker), ""
    else:
        log_folder = _start_local(config)
        num_cores = len(os.sched_getaffinity(0))
        num_workers, most_workers = config.prefill + config.decode, sum(config.units.values())
        worker = divide(config.worker, num_workers, most_workers, num_cores, available_bytes())
        host = "127.0.0.1"
    try:
        if joined:
            _check_offer(config)
            _check_no_other()
        wishes: dict[str, int | None] = {PREFILL: config.prefill, DECODE: config.decode}
        address, actor = _start_controller(_new_id(), replace(config, worker=worker), wishes, host)
    except BaseException:
        ray.shutdown()
        raise
    return ClusterHandle(address, log_folder, actor, LocalNode.of_this_process())


@own_signal_handler()
def start_controller(config: ClusterConfig, address: str, host: str, port: int) -> ClusterHandle:
    """The controller of the Ray cluster whose head, at `address`, runs on this machine: it listens on `host`:`port`, stays on
    this node, and keeps one worker for each unit that nodes offer, now and later.

    Raises:
        TandemError: the head cannot be joined, or runs a controller already.
    """
    log_folder = _join(address)
    try:
        _check_no_other()
        config = replace(config, worker=beyond_loopback(config.worker))
        place = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        wishes: dict[str, int | None] = {PREFILL: None, DECODE: None}
        where, actor = _start_controller(_new_id(), config, wishes, host, port, scheduling_strategy=place)
    except BaseException:
        ray.shutdown()
        raise
    return ClusterHandle(where, log_folder, actor, LocalNode.of_this_process())


def _new_id() -> str:
    return f"cluster-{secrets.token_hex(8)}"


def _start_local(config: ClusterConfig) -> str:
    """Processes that end with this one, on the loopback interface only. Returns the folder of their logs."""
    num_processes = config.prefill + config.decode + 1
    return _init(
        "the local Ray cluster did not start",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=num_processes,  # Ray starts so many processes ahead: workers need not wait for theirs
        num_gpus=0,
        resources={resource(role): num_units for role, num_units in config.units.items()},
        object_store_memory=OBJECT_STORE_BYTES,
    )


def _join(address: str) -> str:
    _check_reachable(address)
    return _init(
        f"cannot join the Ray cluster at {address} (RAY_ADDRESS; if its nodes run with RAY_AUTH_MODE=token, set that and "
        "their token here too)",
        address=address,
    )


def _check_reachable(address: str) -> None:
    """Ray itself tries for minutes. Addresses that are no host:port ("auto", "local", ray://…) are left to it."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TandemError(f"nothing answers at {address} (RAY_ADDRESS): {reason}; unset it to start a cluster here") from error


def _init(failure: str, **options: Any) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            job = _OwnCodeOnly(ray_namespace=NAMESPACE)
            context: Any = ray.init(job_config=job, log_to_driver=False, logging_level=logging.ERROR, **options)
        except Exception as error:  # Ray raises just that when its node does not start in time
            raise TandemError(f"{failure}: {first_line(error)}") from error
    return f"{context.address_info['session_dir']}/logs"


def _check_offer(config: ClusterConfig) -> None:
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    for role, wanted in ((PREFILL, config.prefill), (DECODE, config.decode)):
        offered = int(resources.get(resource(role), 0))
        if offered < wanted:
            raise TandemError(
                f"the Ray cluster offers {offered} units of {resource(role)} and {wanted} are wanted; "
                f"start nodes with --resources='{{\"{resource(role)}\": N}}' or ask for fewer"
            )


def _end_left_over() -> None:
    """Workers outlive a controller that could not stop them. In our namespace there is nothing else."""
    names: list[str] = []
    with contextlib.suppress(ray.exceptions.RayError):
        names = ray.util.list_named_actors()
    for name in names:
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE))


def _check_no_other() -> None:
    """A controller whose owner is gone ends by itself; one that answers belongs to somebody."""
    try:
        other: Any = ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        _end_left_over()
        return
    try:
        address = ray.get(other.get_address.remote(), timeout=_ANSWER_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
        ray.kill(other)
        _end_left_over()
        return
    raise TandemError(
        f"this Ray cluster already runs a tandem controller at {address}; stop its `tandem up` first "
        f"(without one it ends by itself within {_OWNER_TIMEOUT_S:.0f} s)"
    )


def _start_controller(
    cluster_id: str, config: ClusterConfig, wishes: dict[str, int | None], host: str, port: int = 0, **options: Any
) -> tuple[str, Any]:
    actor_class: Any = ControllerActor
    worker_json, autoscale_json = dump(config.worker, with_secrets=True), dump(config.autoscale)
    actor = actor_class.options(name=NAME, namespace=NAMESPACE, lifetime="detached", **options).remote(
        cluster_id, wishes, worker_json, autoscale_json, host, _OWNER_TIMEOUT_S, port
    )
    try:
        address: str = ray.get(actor.open.remote(), timeout=_START_S)
    except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError) as error:
        raise TandemError(f"the controller did not start: {str(error).splitlines()[-1]}") from error
    return address, actor

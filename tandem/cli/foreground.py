"""A cluster that lives as long as this process: start, show, watch, stop in order."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from tandem.cli.errors import EXIT_FAILED, EXIT_OK
from tandem.cli.health import is_serving
from tandem.cli.progress import LoadingDisplay, loading_line
from tandem.cli.reaper import start_reaper
from tandem.cli.router_process import RouterProcess
from tandem.clock import Clock, MonotonicClock
from tandem.config import ClusterConfig
from tandem.errors import TandemError, first_line
from tandem.trust import Certificates

if TYPE_CHECKING:
    from controller.launch import ClusterHandle
    from controller.overview import Overview

__all__ = ["Incidents", "StopRequest", "patient_overview", "pools_line", "ready_line", "run_in_foreground"]

_LOOK_S = 0.2
_WATCH_S = 1.0
_ROUTER_READY_S = 60.0
_ROUTER_GRACE_S = 20.0
_TROUBLES = ("lost", "failed")
_TOLD = ("scaled", "replaced", "draining", "drained", "resumed")
_AWAY_S = 60.0
_START_GRACE_S = 5.0


class StopRequest:
    """SIGINT, SIGTERM: the first asks for a stop in order, the second ends this process at once (the reaper cleans up)."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._is_starting = False

    def install(self) -> None:
        """Again after Ray was started, which puts handlers of its own."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)

    def wait(self, seconds: float) -> bool:
        """True as soon as a stop was asked for."""
        return self._asked.wait(seconds)

    @contextlib.contextmanager
    def while_ray_starts(self) -> Iterator[None]:
        """Nothing of ours runs yet, and Ray cannot be asked to give up; it may even wait for a process of its own that the same
        signal has ended. So a stop that was asked for in here waits for a few seconds only."""
        self._is_starting = True
        try:
            yield
        finally:
            self._is_starting = False
            self.install()

    def _give_up_starting(self) -> None:
        if self._is_starting:
            os._exit(EXIT_OK)  # the reaper ends what Ray has started

    def _on_signal(self, number: int, frame: object) -> None:
        if self._asked.is_set():
            os._exit(EXIT_FAILED)
        self._asked.set()
        # Where Ray's C++ handler was there first, it has printed a trace, called ours, and set an alarm that aborts.
        signal.alarm(0)
        if self._is_starting:
            patience = threading.Timer(_START_GRACE_S, self._give_up_starting)
            patience.daemon = True
            patience.start()
        # Not with print: the signal may have interrupted one.
        os.write(2, b"tandem: stopping; a second signal ends it at once\n")


class Incidents:
    """Each event that people should know of is told once; what went wrong with the place of the logs."""

    def __init__(self, log_folder: str) -> None:
        self._log_folder = log_folder
        self._seen = 0

    def new(self, view: Overview) -> list[str]:
        unseen = [event for event in view.events if event.number > self._seen]
        self._seen = max([self._seen, *(event.number for event in unseen)])
        logs = f" (logs: {self._log_folder})"
        return [
            event.text + (logs if event.kind.value in _TROUBLES else "")
            for event in unseen
            if event.kind.value in _TROUBLES + _TOLD
        ]


def run_in_foreground(config: ClusterConfig) -> int:
    """Returns the exit code once nothing of the cluster is left.

    Raises:
        TandemError: the cluster could not be started, or broke in a way that it cannot repair.
    """
    start_reaper()
    out = sys.stdout
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):  # Ray prints to it whenever a worker dies
        return _run(config, out)


def _run(config: ClusterConfig, out: TextIO) -> int:
    stop = StopRequest()
    stop.install()
    clock = MonotonicClock()
    begin_s = clock.now()
    display = LoadingDisplay(sys.stderr, clock, live=sys.stderr.isatty())
    display.show("starting Ray")
    try:
        with stop.while_ray_starts():
            from controller.launch import start_cluster

            cluster = start_cluster(config)
    except Exception as error:  # Ray has errors of its own
        display.clear()
        if not stop.wait(0):
            raise
        # The signal has ended processes that Ray needs to start.
        print(f"tandem: stopped while it started: {first_line(error)}", file=sys.stderr, flush=True)
        return EXIT_OK
    router = RouterProcess(config.router, cluster.address, clock)
    foreground = _Foreground(config, cluster, router, stop, clock, display, Incidents(cluster.log_folder))
    try:
        if line := foreground.start():
            print(f"{line}, after {clock.now() - begin_s:.1f} s", file=out, flush=True)
            foreground.watch()
    finally:
        display.clear()
        router.stop(config.router.grace_s + _ROUTER_GRACE_S)
        cluster.shutdown()
    return EXIT_OK


@dataclass(frozen=True, slots=True)
class _Foreground:
    config: ClusterConfig
    cluster: ClusterHandle
    router: RouterProcess
    stop: StopRequest
    clock: Clock
    display: LoadingDisplay
    incidents: Incidents

    def start(self) -> str:
        """From nothing to the `ready` line, which it returns; empty: a stop was asked for before.

        Raises:
            TandemError: a pool gave up, or the router does not serve; says why.
        """
        if self.stop.wait(0):
            return ""
        self.router.start()  # it takes a while to begin; membership comes to it when there is some
        while (view := self._overview()) is not None and not view.is_ready():
            if failure := view.failure():
                raise TandemError(failure)
            self._tell(*self.incidents.new(view), self.router.restart_if_ended())
            self.display.show(loading_line(view))
            if self.stop.wait(_LOOK_S):
                return ""
        if view is None:
            return ""
        address, certificates = _address(self.config), _own_certificates(self.config)
        deadline_s = self.clock.now() + _ROUTER_READY_S
        while not is_serving(address, certificates):
            self._tell(self.router.restart_if_ended())
            self.display.show("workers are ready, the router starts")
            if self.clock.now() > deadline_s:
                raise TandemError(f"the router does not serve at {address} after {_ROUTER_READY_S:.0f} s")
            if self.stop.wait(_LOOK_S):
                return ""
        self.display.clear()
        return ready_line(address, _url(self.config), view)

    def watch(self) -> None:
        """Until a stop is asked for: keep the router, tell what went wrong and how the pools are since."""
        told = ""
        while not self.stop.wait(_WATCH_S) and (view := self._overview()) is not None:
            self._tell(self.router.restart_if_ended(), *self.incidents.new(view))
            line = pools_line(view)
            if told and line != told:
                self._tell(line)
            told = line

    def _overview(self) -> Overview | None:
        return patient_overview(
            self.cluster, self.stop, self.clock, lambda text: self._tell(text, self.router.restart_if_ended())
        )

    def _tell(self, *news: str) -> None:
        for text in filter(None, news):
            self.display.clear()
            print(f"tandem: {text}", file=sys.stderr, flush=True)


def patient_overview(cluster: ClusterHandle, stop: StopRequest, clock: Clock, tell: Callable[[str], None]) -> Overview | None:
    """Ray starts a controller that died again; it is waited for. None: a stop was asked for meanwhile.

    Raises:
        TandemError: it did not come back, or cannot, since Ray itself has ended.
    """
    deadline_s = clock.now() + _AWAY_S
    while True:
        try:
            return cluster.overview()
        except TandemError as error:
            if not cluster.may_come_back:
                raise TandemError("Ray's processes here have ended, and with them the cluster; start it again") from error
            if clock.now() > deadline_s:
                raise
            tell(str(error))
        if stop.wait(_WATCH_S):
            return None


def ready_line(address: str, url: str, view: Overview) -> str:
    pools = ", ".join(f"{pool.ready} {role}" for role, pool in view.pools.items())
    return f"ready at {address} (gRPC) and {url}: {view.model_name}, {pools}"


def pools_line(view: Overview) -> str:
    """Such as `prefill 1 of 1 ready · decode 0 of 1 ready (1 starting)`."""
    return " · ".join(
        f"{role} {pool.ready} of {pool.wanted} ready" + (f" ({pool.reason})" if pool.reason else "")
        for role, pool in view.pools.items()
    )


def _address(config: ClusterConfig) -> str:
    """Where this process reaches the router."""
    return f"{_host(config)}:{config.router.grpc_port}"


def _url(config: ClusterConfig) -> str:
    scheme = "https" if config.router.tls.cert_file else "http"
    return f"{scheme}://{_host(config)}:{config.router.http_port}"


def _host(config: ClusterConfig) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.router.host, config.router.host)
    return f"[{host}]" if ":" in host else host


def _own_certificates(config: ClusterConfig) -> Certificates | None:
    """What `up` shows to its own router: the router's certificate, which it also trusts where no authority is given."""
    certificates = Certificates.load(config.router.tls)
    return certificates and replace(certificates, ca=certificates.ca or certificates.cert)

"""NIXL with its UCX backend behind the `TransferAgent` seam. The only module that imports nixl.

What NIXL and UCX guarantee, and what not (from their source, NIXL 1.5):

- A write is DONE only after the endpoint was flushed, so its bytes are in the peer's memory.
- Without a progress thread nothing moves unless somebody polls; so both ends must, on transports that need the peer's CPU.
- Releasing a transfer in progress *asks* UCX to cancel; NIXL reports success, yet bytes may still land. So whoever needs
  silence must go on polling until DONE or FAILED.
- A FAILED transfer may consist of several requests of which some are still on their way. Silence is certain only after
  the connection to that peer is closed.
- A transfer made before a peer was removed and added again is refused by NIXL when posted.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.config import TransferConfig
from tandem.errors import ConfigError, PeerRefused, TransferFailed
from transfer.agent import XferHandle, XferState
from transfer.layout import CacheLayout
from transfer.plan import Indices
from transfer.ucx_log import chosen_transport, complaints, unavailable

__all__ = ["NixlAgent"]

_log = logging.getLogger(__name__)
_PROBE_BYTES = 64
_LOG_BYTES = 1 << 20
_STATES = {"DONE": XferState.DONE, "PROC": XferState.IN_PROGRESS, "ERR": XferState.FAILED}


@dataclass(slots=True)
class _Peer:
    remote: Any  # prepared descriptor list of the peer's items
    probe: Any  # … and of its first few bytes


class _UcxLog:
    """UCX's log in a file that has no name any more. UCX opens it once per process, when it is loaded."""

    def __init__(self) -> None:
        handle, name = tempfile.mkstemp(prefix="tandem-ucx-")
        os.close(handle)
        self.path = Path(name)
        self._text = ""
        self._reader: int | None = None  # kept for the life of the process, like the log itself
        self._lock = threading.Lock()  # the owner of the agent reads, and whoever asks for the transport

    def adopt(self) -> None:
        """UCX has opened the file by now: keep a reader, drop the name."""
        if self._reader is None:
            self._reader = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.path.unlink()

    def read(self) -> str:
        """All text so far; warnings in what is new go to our own log."""
        with self._lock:
            # UCX writes through a buffered C stream to which we hold no pointer; None flushes them all.
            ctypes.CDLL(None).fflush(None)
            if self._reader is not None and (data := os.read(self._reader, _LOG_BYTES)):
                new = data.decode("utf-8", errors="replace")
                self._text += new
                for line in complaints(new):
                    _log.warning("%s", line)
            return self._text


_ucx_log: _UcxLog | None = None


@contextlib.contextmanager
def _ucx_environment(config: TransferConfig) -> Iterator[_UcxLog]:
    """The settings that UCX reads while it is loaded and a context is made, and no longer: children must not inherit them.
    What the operator has set himself is left alone; if that is the log, then we have nothing to read in ours."""
    global _ucx_log
    if _ucx_log is None:
        _ucx_log = _UcxLog()
    ours = {"UCX_LOG_FILE": str(_ucx_log.path), "UCX_LOG_LEVEL": "info", "UCX_PROTO_INFO": "*put*multi*"}
    if "UCX_LOG_FILE" in os.environ or "UCX_LOG_LEVEL" in os.environ:
        ours = {}
    if config.ucx_tls:
        ours["UCX_TLS"] = config.ucx_tls
    if config.net_devices and "UCX_NET_DEVICES" not in os.environ:
        ours["UCX_NET_DEVICES"] = config.net_devices
    before = {key: os.environ.get(key) for key in ours}
    os.environ.update(ours)
    try:
        yield _ucx_log
    finally:
        _ucx_log.adopt()
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


def _import_nixl() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's Python API and the errors it raises. Not at the top, since the import loads UCX, which reads the environment."""
    import nixl._api as api
    import nixl._bindings as bindings

    # NIXL's Python part logs to stdout, which belongs to whoever runs us.
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)
    return api, tuple(v for k, v in vars(bindings).items() if k.startswith("nixl") and k.endswith("Error"))


class NixlAgent:
    """See `TransferAgent`. `name` must be unique to this life of the worker: peers keep connections by name.

    Raises:
        ConfigError: a transport or a device that was asked for is not there.
    """

    def __init__(self, name: str, config: TransferConfig) -> None:
        self.name = name
        self._nixl = self._make_agent(name, config)
        self._peers: dict[str, _Peer] = {}
        self._xfers: dict[XferHandle, Any] = {}
        self._xfer_peers: dict[XferHandle, str] = {}
        self._handles = itertools.count(1)
        self._scratch = torch.zeros(_PROBE_BYTES, dtype=torch.uint8)
        self._local: Any = None
        self._local_probe: Any = None
        self._registered: list[Any] = []
        self._mem_type = "DRAM"

    def _make_agent(self, name: str, config: TransferConfig) -> Any:
        """UCX itself goes on with what is left of what it was asked for, and only warns: TCP instead of RDMA, for example."""
        failure = ""
        before = len(_ucx_log.read()) if _ucx_log else 0
        with _ucx_environment(config) as self._ucx_log:
            api, self._errors = _import_nixl()
            self._tls = os.environ.get("UCX_TLS", "unset")
            # The progress thread spins on a core of its own; sender and receiver poll instead.
            agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
            try:
                # A peer is removed only when nothing is in flight to it or when it is dead: do not wait for it then.
                agent.create_backend("UCX", {"ucx_ep_close_force": "true"})
            except self._errors as error:
                failure = str(error)
        said = self._ucx_log.read()[before:]
        if (missing := unavailable(said)) or failure:
            reason = missing or next(iter(complaints(said)), failure)
            raise ConfigError(
                f"transfers cannot be set up as transfer.ucx_tls or UCX_TLS ({self._tls}) and transfer.net_devices or "
                f"UCX_NET_DEVICES ask for: {reason}"
            )
        return agent

    @property
    def metadata(self) -> bytes:
        data: bytes = self._nixl.get_agent_metadata()
        return data

    @property
    def transport(self) -> str:
        if chosen := chosen_transport(self._ucx_log.read()):
            return f"ucx: {chosen}"
        return f"ucx (UCX_TLS={self._tls}, no connection yet)"

    def register(self, tensors: Sequence[torch.Tensor], layout: CacheLayout) -> None:
        if self._local is not None:
            raise ValueError("memory is registered once")
        self._mem_type = "VRAM" if tensors[0].is_cuda else "DRAM"
        self._scratch = self._scratch.to(tensors[0].device)
        for part in (list(tensors), [self._scratch]):
            self._registered.append(self._nixl.register_memory(part, backends=["UCX"]))
        self._local = self._prepare("NIXL_INIT_AGENT", layout.descriptors())
        scratch = np.array([[self._scratch.data_ptr(), _PROBE_BYTES, 0]], dtype=np.uint64)
        self._local_probe = self._prepare("NIXL_INIT_AGENT", scratch)

    def add_peer(self, metadata: bytes, remote: CacheLayout) -> str:
        try:
            peer: str = _text(self._nixl.add_remote_agent(metadata))
            self._nixl.make_connection(peer)
            descriptors = remote.descriptors()
            first = descriptors[:1].copy()
            first[0, 1] = _PROBE_BYTES
            self._peers[peer] = _Peer(remote=self._prepare(peer, descriptors), probe=self._prepare(peer, first))
        except self._errors as error:
            raise PeerRefused(f"the peer's transfer metadata cannot be used: {error}") from error
        return peer

    def probe(self, peer: str) -> XferHandle:
        index = np.zeros(1, dtype=np.int32)
        return self._post("READ", peer, (self._local_probe, index), (self._peer(peer).probe, index))

    def remove_peer(self, peer: str) -> None:
        for handle in [h for h, name in self._xfer_peers.items() if name == peer]:
            self.release(handle)
        if (known := self._peers.pop(peer, None)) is None:
            return
        try:
            known.remote.release()
            known.probe.release()
            self._nixl.remove_remote_agent(peer)
        except self._errors as error:
            # NIXL forgets a peer by itself when its connection breaks.
            _log.info("peer %s was gone already: %s", peer, error)
        self._ucx_log.read()

    def post_write(self, peer: str, local: Indices, remote: Indices) -> XferHandle:
        return self._post("WRITE", peer, (self._local, local), (self._peer(peer).remote, remote))

    def poll(self, handle: XferHandle) -> XferState:
        try:
            return _STATES[self._nixl.check_xfer_state(self._xfers[handle])]
        except self._errors as error:
            _log.warning("transfer to %s failed: %s", self._xfer_peers[handle], error)
            self._ucx_log.read()
            return XferState.FAILED

    def release(self, handle: XferHandle) -> None:
        xfer = self._xfers.pop(handle)
        peer = self._xfer_peers.pop(handle)
        try:
            xfer.release()
        except self._errors as error:
            _log.warning("a transfer to %s cannot be released: %s", peer, error)

    def notify(self, peer: str, message: bytes) -> None:
        self._peer(peer)
        try:
            self._nixl.send_notif(peer, message)
        except self._errors as error:
            raise TransferFailed(f"cannot notify {peer}: {error}") from error

    def take_notifications(self) -> list[tuple[str, bytes]]:
        try:
            news = self._nixl.get_new_notifs()
        except self._errors as error:
            _log.warning("notifications cannot be read: %s", error)
            return []
        return [(_text(sender), message) for sender, messages in news.items() for message in messages]

    def close(self) -> None:
        for peer in tuple(self._peers):
            self.remove_peer(peer)
        for prepared in (self._local, self._local_probe):
            if prepared is not None:
                prepared.release()
        for registered in self._registered:
            self._nixl.deregister_memory(registered)
        self._registered.clear()
        self._ucx_log.read()
        del self._nixl

    def _prepare(self, agent: str, descriptors: Any) -> Any:
        return self._nixl.prep_xfer_dlist(agent, descriptors, self._mem_type, backends=["UCX"])

    def _peer(self, peer: str) -> _Peer:
        if peer not in self._peers:
            raise TransferFailed(f"no connection to {peer}")
        return self._peers[peer]

    def _post(self, operation: str, peer: str, local: tuple[Any, Indices], remote: tuple[Any, Indices]) -> XferHandle:
        try:
            xfer = self._nixl.make_prepped_xfer(operation, local[0], local[1], remote[0], remote[1])
            self._nixl.transfer(xfer)
        except self._errors as error:
            self._ucx_log.read()
            raise TransferFailed(f"cannot post to {peer}: {error}") from error
        handle = next(self._handles)
        self._xfers[handle] = xfer
        self._xfer_peers[handle] = peer
        return handle


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name

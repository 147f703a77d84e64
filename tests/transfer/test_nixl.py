"""The hand-off over real NIXL between two operating-system processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from tandem.cache.memory import CacheMemory
from tandem.clock import MonotonicClock
from tandem.config import TransferConfig
from tandem.errors import ConfigError, HandoffError, PeerRefused, TransferFailed
from tests.transfer.helpers import FINGERPRINT, fill, grant_of, sequence_bytes
from tests.transfer.nixl_process import SIZES, SPECS, decode_process
from transfer.handoff import HandoffResult, WriterIdentity
from transfer.layout import CacheLayout, group_tensors
from transfer.lease_state import Lease
from transfer.nixl_agent import NixlAgent
from transfer.sender import Sender

pytestmark = pytest.mark.slow
STATE_LAYERS = [index for index, layer in enumerate(SPECS.layers) if len(layer) == 2]
LOCAL_SLOT = 5


class Decode:
    """A decode worker's process, by its pipe."""

    def __init__(self, name: str, config: TransferConfig) -> None:
        context = multiprocessing.get_context("spawn")
        pipes: tuple[Connection, Connection] = context.Pipe()
        self.pipe, theirs = pipes
        self.process: BaseProcess = context.Process(target=decode_process, args=(name, config, theirs), daemon=True)
        self.process.start()
        self.metadata, self.groups, self.pid = self._answer()

    def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self._answer()

    def stop(self) -> None:
        if self.process.is_alive():
            self.pipe.send(("stop",))
        self.process.join(10)
        assert self.process.exitcode is not None, "the decode process does not end"

    def _answer(self) -> Any:
        assert self.pipe.poll(30), "the decode process does not answer"
        return self.pipe.recv()


class Prefill:
    def __init__(self, name: str, config: TransferConfig) -> None:
        self.memory = CacheMemory.allocate(SPECS, SIZES)
        fill(self.memory, seed=3)
        self.layout = CacheLayout.of(self.memory)
        self.agent = NixlAgent(name, config)
        self.agent.register(group_tensors(self.memory), self.layout)
        self.sender = Sender(self.agent, self.memory, self.layout, WriterIdentity("p", FINGERPRINT), config, MonotonicClock())
        self.sender.start()

    def connect(self, decode: Decode, peer_id: str = "d", timeout_s: float = 10.0) -> None:
        self.sender.connect(peer_id, decode.metadata, CacheLayout.from_wire(decode.groups, self.layout), timeout_s)

    def handoff(self, lease: Lease, blocks: tuple[int, ...]) -> HandoffResult | HandoffError:
        handoff = self.sender.begin(grant_of(lease), lease.request.request_id, 1, blocks, LOCAL_SLOT)
        for start in range(0, len(blocks) - 1, 64):
            handoff.push_kv(start, min(start + 64, len(blocks) - 1))
        for layer in STATE_LAYERS:
            handoff.push_state(layer)
        done, results = threading.Event(), []
        now = time.monotonic()
        handoff.finish(len(lease.request.tokens), 42, now, lambda result: (results.append(result), done.set())[0])
        assert done.wait(30)
        return results[0]

    def stop(self) -> None:
        self.sender.stop()
        self.agent.close()


@contextmanager
def pair(name: str, config: TransferConfig) -> Iterator[tuple[Prefill, Decode]]:
    decode = Decode(f"{name}-d", config)
    prefill = Prefill(f"{name}-p", config)
    try:
        yield prefill, decode
    finally:
        prefill.stop()
        decode.stop()


@pytest.mark.parametrize("ucx_tls", ["", "tcp"])
def test_hundreds_of_blocks_and_the_state_arrive_byte_for_byte(ucx_tls: str) -> None:
    with pair(f"bytes-{ucx_tls}", TransferConfig(ucx_tls=ucx_tls)) as (prefill, decode):
        prefill.connect(decode)
        exposed = []
        for round_, num_prompt in enumerate((32 * 400, 32 * 500 - 7, 1, 33)):
            blocks = tuple(reversed(range(3, 3 + SPECS.blocks_for(num_prompt))))
            lease = decode.ask("reserve", num_prompt, 4, f"r{round_}")
            result = prefill.handoff(lease, blocks)
            assert isinstance(result, HandoffResult)
            assert result.kv_bytes == len(blocks) * SPECS.block_bytes
            lease_id, first_token, exposed_s = decode.ask("outcome")
            assert (lease_id, first_token) == (lease.id, 42)
            exposed.append(exposed_s)
            theirs = decode.ask("bytes", lease.block_ids[: len(blocks)], lease.slot)
            assert theirs == sequence_bytes(prefill.memory, blocks, LOCAL_SLOT)
            decode.ask("finish", lease.id)
        transport, counts, wrong, _ = decode.ask("state")
        assert wrong == []
        assert not any(counts.values())
        for said in (transport, prefill.agent.transport):
            assert said.startswith("ucx: ")
            if ucx_tls == "tcp":
                assert "tcp/" in said
                assert "cma" not in said
        assert all(0 < seconds < 5 for seconds in exposed)


def test_without_overlap_the_same_bytes_arrive() -> None:
    with pair("late", TransferConfig(overlap=False)) as (prefill, decode):
        prefill.connect(decode)
        blocks = tuple(range(100))
        lease = decode.ask("reserve", 3200, 4, "r")
        assert isinstance(prefill.handoff(lease, blocks), HandoffResult)
        assert decode.ask("outcome")[0] == lease.id
        assert decode.ask("bytes", lease.block_ids[:100], lease.slot) == sequence_bytes(prefill.memory, blocks, LOCAL_SLOT)


def test_a_killed_decode_worker_fails_the_handoff_and_its_successor_is_served() -> None:
    config = TransferConfig(ucx_tls="tcp", timeout_s=5.0)
    with pair("killed", config) as (prefill, decode):
        prefill.connect(decode)
        lease = decode.ask("reserve", 3200, 4, "r")
        os.kill(decode.pid, signal.SIGKILL)
        decode.process.join(10)
        result = prefill.handoff(lease, tuple(range(100)))
        assert isinstance(result, TransferFailed)
        prefill.sender.disconnect("d", dead=True)
        successor = Decode("killed-d2", config)
        try:
            prefill.connect(successor)
            lease = successor.ask("reserve", 3200, 4, "r")
            assert isinstance(prefill.handoff(lease, tuple(range(100))), HandoffResult)
            assert successor.ask("outcome")[0] == lease.id
        finally:
            successor.stop()


def test_a_frozen_decode_worker_fails_in_time_and_is_not_called_quiet() -> None:
    config = TransferConfig(ucx_tls="tcp", timeout_s=1.0)
    with pair("frozen", config) as (prefill, decode):
        prefill.connect(decode)
        lease = decode.ask("reserve", 32 * 600, 4, "r")
        os.kill(decode.pid, signal.SIGSTOP)
        quiet = threading.Event()
        try:
            handoff = prefill.sender.begin(grant_of(lease), "r", 1, tuple(range(600)), LOCAL_SLOT)
            failed = threading.Event()
            results: list[HandoffResult | HandoffError] = []
            handoff.finish(32 * 600, 42, time.monotonic(), lambda result: (results.append(result), failed.set())[0])
            assert failed.wait(10)
            assert isinstance(results[0], TransferFailed)
            handoff.abort(quiet.set)
            assert not quiet.wait(1.0)
        finally:
            os.kill(decode.pid, signal.SIGCONT)
        # It thaws: the writes end, the connection is closed, and only then is it quiet.
        assert quiet.wait(20)


def test_a_peer_that_is_not_there_is_refused_or_times_out() -> None:
    with pair("absent", TransferConfig()) as (prefill, decode):
        with pytest.raises(PeerRefused):
            prefill.sender.connect("x", b"no metadata", prefill.layout)
        os.kill(decode.pid, signal.SIGSTOP)
        try:
            with pytest.raises(TransferFailed, match="took too long"):
                prefill.connect(decode, timeout_s=0.5)
        finally:
            os.kill(decode.pid, signal.SIGCONT)
        prefill.connect(decode)
        lease = decode.ask("reserve", 10, 4, "r")
        assert isinstance(prefill.handoff(lease, (0,)), HandoffResult)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (TransferConfig(ucx_tls="rc_mlx5,tcp"), "rc_mlx5"),
        (TransferConfig(ucx_tls="no_such_transport"), "no_such_transport"),
        (TransferConfig(ucx_tls="tcp", net_devices="eth99"), "eth99"),
    ],
)
def test_a_transport_that_is_not_there_is_an_error_and_no_other_is_taken_silently(config: TransferConfig, missing: str) -> None:
    with pytest.raises(ConfigError, match=f"UCX_TLS.*{missing}"):
        NixlAgent("p-missing", config)


def test_one_that_is_there_is_taken_after_one_that_was_not() -> None:
    with pytest.raises(ConfigError):
        NixlAgent("p-missing-first", TransferConfig(ucx_tls="rc_mlx5"))
    agent = NixlAgent("p-there", TransferConfig(ucx_tls="tcp", net_devices="lo"))
    assert agent._tls == "tcp"
    assert agent.metadata
    agent.close()

"""Metrics of the pools: read from the loads when asked, summed over workers, present from the start."""

import socket
import urllib.request

import pytest

from tandem.errors import ConfigError
from tandem.metrics import PoolCollector, serve_metrics
from tandem.v1 import worker_pb2 as pb

DECODE = pb.WorkerLoad(
    kv_blocks_used=3,
    kv_blocks_total=10,
    state_slots_used=1,
    state_slots_total=4,
    leases={"running": 1, "quarantined": 0},
    pool_mismatches=2,
    queue=1,
    running=2,
    evictions={"host": 3, "prefill": 0},
)


def shown(collector: PoolCollector) -> dict[str, float]:
    return {
        sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }


def test_workers_of_a_pool_are_summed_and_states_without_leases_are_there_too() -> None:
    pools = PoolCollector()
    pools.add(lambda: [("decode", DECODE), ("decode", DECODE)])
    pools.add(lambda: [("prefill", pb.WorkerLoad(kv_blocks_total=7, queue_tokens=9))])
    assert shown(pools) == {
        "tandem_kv_blocks,decode,used": 6,
        "tandem_kv_blocks,decode,free": 14,
        "tandem_kv_blocks,prefill,used": 0,
        "tandem_kv_blocks,prefill,free": 7,
        "tandem_state_slots,decode,used": 2,
        "tandem_state_slots,decode,free": 6,
        "tandem_state_slots,prefill,used": 0,
        "tandem_state_slots,prefill,free": 0,
        "tandem_worker_requests,decode,waiting": 2,
        "tandem_worker_requests,decode,running": 4,
        "tandem_worker_requests,prefill,waiting": 0,
        "tandem_worker_requests,prefill,running": 0,
        "tandem_queue_tokens,decode": 0,
        "tandem_queue_tokens,prefill": 9,
        "tandem_leases,running": 2,
        "tandem_leases,quarantined": 0,
        "tandem_pool_mismatches_total,decode": 4,
        "tandem_pool_mismatches_total,prefill": 0,
        "tandem_decode_evictions_total,host": 6,
        "tandem_decode_evictions_total,prefill": 0,
    }


def test_what_is_shown_is_the_newest_and_a_worker_that_stops_leaves() -> None:
    pools, load = PoolCollector(), pb.WorkerLoad(kv_blocks_total=5)
    remove = pools.add(lambda: [("decode", load)])
    load.kv_blocks_used = 4
    assert shown(pools)["tandem_kv_blocks,decode,used"] == 4
    remove()
    remove()
    assert shown(pools) == {}


def test_a_worker_can_show_its_own_metrics_and_a_port_that_is_taken_is_named(free_port: int) -> None:
    endpoint = serve_metrics("127.0.0.1", free_port)
    other = serve_metrics("127.0.0.1", -1)
    try:
        assert endpoint.address == f"127.0.0.1:{free_port}"
        assert other.address != endpoint.address
        for address in (endpoint.address, other.address):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
                assert b"tandem_kv_blocks" in reply.read()
        with pytest.raises(ConfigError, match=f"127.0.0.1:{free_port}.*metrics_port"):
            serve_metrics("127.0.0.1", free_port)
    finally:
        endpoint.stop()
        other.stop()
    assert serve_metrics("127.0.0.1", 0).address == ""
    serve_metrics("127.0.0.1", 0).stop()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port

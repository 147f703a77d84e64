"""A load generator that nobody here wrote finishes its run, and sees what our metrics say."""

import shutil

import pytest

from bench.checkpoints import bench_checkpoint
from bench.loadgen import Agreement, Load, grown_means, measure, tool_means
from bench.up import up_cluster

AIPERF = shutil.which("aiperf")
_TRIES = 3

BEFORE = """
# TYPE tandem_time_to_first_token_seconds histogram
tandem_time_to_first_token_seconds_bucket{class="interactive",le="+Inf"} 2
tandem_time_to_first_token_seconds_sum{class="interactive"} 10
tandem_time_to_first_token_seconds_count{class="interactive"} 2
"""
AFTER = """
# TYPE tandem_time_to_first_token_seconds histogram
tandem_time_to_first_token_seconds_bucket{class="interactive",le="+Inf"} 4
tandem_time_to_first_token_seconds_sum{class="interactive"} 11
tandem_time_to_first_token_seconds_count{class="interactive"} 4
tandem_time_to_first_token_seconds_bucket{class="batch",le="+Inf"} 2
tandem_time_to_first_token_seconds_sum{class="batch"} 3
tandem_time_to_first_token_seconds_count{class="batch"} 2
# TYPE tandem_inter_token_latency_seconds histogram
tandem_inter_token_latency_seconds_bucket{le="+Inf"} 4
tandem_inter_token_latency_seconds_sum 0.1
tandem_inter_token_latency_seconds_count 4
"""


def test_only_what_came_between_the_two_counts_whatever_its_labels() -> None:
    assert grown_means(BEFORE, AFTER) == {"time_to_first_token": 1.0, "inter_token_latency": 0.025}


def test_the_tools_units_are_believed_and_a_failed_request_is_not_passed_over() -> None:
    result = {
        "request_count": {"unit": "requests", "avg": 3.0},
        "time_to_first_token": {"unit": "ms", "avg": 250.0},
        "inter_token_latency": {"unit": "us", "avg": 2500.0},
    }
    assert tool_means(result, 3) == {"time_to_first_token": 0.25, "inter_token_latency": 0.0025}
    with pytest.raises(RuntimeError, match="only 3 of 4"):
        tool_means(result, 4)


def test_a_tenth_is_close_and_more_is_not() -> None:
    assert Agreement("x", 1.09, 1.0).is_close
    assert Agreement("x", 0.91, 1.0).is_close
    assert not Agreement("x", 1.12, 1.0).is_close
    assert not Agreement("x", 0.88, 1.0).is_close


@pytest.mark.cluster
@pytest.mark.alone
@pytest.mark.skipif(AIPERF is None, reason="no aiperf here (.ci/run installs it)")
async def test_aiperf_is_served_and_sees_the_latencies_of_our_metrics() -> None:
    """Every request of every try is served. Where something else takes the processor from the tool, it sees tokens late: then
    it may try again, on the same cluster."""
    assert AIPERF is not None
    load = Load(bench_checkpoint(), requests=20, concurrency=2, prompt_tokens=512, answer_tokens=32)
    tried = []
    async with up_cluster("--model", str(load.model), "--memory-gib", "0.5") as cluster:
        for _ in range(_TRIES):
            tried.append(await measure(cluster, AIPERF, load))
            if all(each.is_close for each in tried[-1]):
                return
    pytest.fail(f"not within a tenth in {_TRIES} tries: {tried}")

"""`tandem verify` as an operator runs it: real Ray, real NIXL, separate processes, token for token with one process."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


def verify(*options: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.cli.main", "verify", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def test_the_cluster_answers_as_one_process_does() -> None:
    """Lengths around every edge, greedy and sampled, then 32 requests at once, over two workers of each kind."""
    done = verify("--prefill", "2", "--decode", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32 at once" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("equal: ")


def test_without_a_cluster_at_the_address_it_says_so_in_one_sentence() -> None:
    done = verify("--address", "127.0.0.1:1", timeout_s=120)
    assert done.returncode == 1
    (sentence,) = done.stderr.strip().splitlines()
    assert "127.0.0.1:1" in sentence
    assert "tandem up" in sentence

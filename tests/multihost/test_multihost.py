"""In `make chaos` (the network alone: in `make test`) where network namespaces can be made (root, CAP_NET_ADMIN, iproute2);
elsewhere skipped, with what is missing.

By hand, with times: `python -m tests.multihost`.
"""

import subprocess
from pathlib import Path

import pytest

from tests.multihost.hosts import Host, network, why_not
from tests.multihost.scenario import run_scenario

REASON = why_not()
needs_namespaces = pytest.mark.skipif(bool(REASON), reason=f"several hosts: {REASON}")

_LISTEN = "import socket; s = socket.create_server(('', 7000)); print(1, flush=True); [s.accept() for _ in range(9)]"
_CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 1).close()"


def reaches(source: Host, target: Host) -> bool:
    return source.start_python("-S", "-c", _CONNECT, target.address).wait(20) == 0


@needs_namespaces
def test_hosts_reach_each_other_but_for_one_that_is_cut_off(tmp_path: Path) -> None:
    with network(3, tmp_path) as net:
        first, second, third = net.hosts
        server = second.start_python("-S", "-c", _LISTEN, stdout=subprocess.PIPE)
        assert server.stdout is not None
        server.stdout.readline()
        assert (reaches(first, second), reaches(third, second)) == (True, True)
        net.cut(second)
        assert (reaches(first, second), reaches(third, second)) == (False, False)
        net.heal(second)
        assert (reaches(first, second), reaches(third, second)) == (True, True)
        server.kill()
        server.communicate()


@needs_namespaces
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.chaos
def test_a_cluster_of_several_hosts_serves_and_survives_a_cut(tmp_path: Path) -> None:
    assert len(list(run_scenario(tmp_path))) == 9

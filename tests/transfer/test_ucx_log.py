"""The transport that is reported is the one that UCX's own log names."""

from __future__ import annotations

import pytest

from transfer.ucx_log import chosen_transport, complaints, unavailable

HEAD = "[1.0] [vm:1 :0]     ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from libucp.so)\n"
SELF = "[1.0] [vm:1 :0]  ucp_worker.c:1997 UCX  INFO    p self cfg#0 rma_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)\n"
CMA = "[1.0] [vm:1 :0]  ucp_worker.c:1997 UCX  INFO    p intra-node cfg#1 rma_am(tcp/lo)  am(tcp/lo cma/memory)  ka(tcp/lo)\n"
RDMA = "[1.0] [vm:1 :0]  ucp_worker.c:1997 UCX  INFO    p inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  am(rc_mlx5/mlx5_0:1)\n"


def table(operation: str, *rows: str) -> str:
    lines = [
        "| p intra-node cfg#1      |",
        f"| {operation} from host memory to host |",
        "| Range | Description | Config |",
        *rows,
    ]
    return "".join(f"[1.0] [vm:1 :0]   {line}\n" for line in lines)


WRITE = "remote memory write by ucp_put*(multi)"


@pytest.mark.parametrize(
    ("log", "transport"),
    [
        ("", None),
        (HEAD + SELF, None),
        (HEAD + SELF + CMA, "lanes tcp/lo, cma/memory"),
        (CMA + RDMA, "lanes rc_mlx5/mlx5_0:1"),
        (CMA + table(WRITE, "| 0..inf | zero-copy   | cma/memory    |"), "cma/memory (zero-copy)"),
        (
            CMA + table(WRITE, "| 0..inf | zero-copy | 52% on tcp/lo and 48% on tcp/eth0 |"),
            "52% on tcp/lo and 48% on tcp/eth0 (zero-copy)",
        ),
        (
            table(WRITE, "| 0..2038 | short | a/b |", "| 2039..8K | copy-in | c/d |", "| 8193..inf | zero-copy | e/f |"),
            "e/f (zero-copy)",
        ),
        (CMA + table("remote memory read by ucp_get*(multi)", "| 0..inf | zero-copy | x/y |"), "lanes tcp/lo, cma/memory"),
        (
            table(WRITE, "| 0..inf | zero-copy | a/b |") + table("active message by ucp_am", "| 0..inf | short | x/y |"),
            "a/b (zero-copy)",
        ),
        (table(WRITE, "| 0..inf | zero-copy | a/b |") + table(WRITE, "| 0..inf | copy-in | c/d |"), "c/d (copy-in)"),
    ],
)
def test_the_newest_table_of_a_remote_write_decides_and_lanes_stand_in(log: str, transport: str | None) -> None:
    assert chosen_transport(log) == transport


def test_warnings_and_errors_are_found_and_nothing_else() -> None:
    bad = [
        "[1.0] [vm:1:0] tcp_ep.c:1 UCX  ERROR tcp failed",
        "[1.0] [vm:1:0] x.c:2 UCX  WARN  slow",
        "[1.0] [vm:1:0] y.c:3 UCX  FATAL no",
    ]
    assert complaints(HEAD + CMA + "\n".join(bad)) == bad


WARNING = "[1.0] [vm:1 :0] ucp_context.c:1125 UCX  WARN  "


@pytest.mark.parametrize(
    "what",
    [
        "transport 'rc_mlx5' is not available, please use one or more of: tcp",
        "transports 'rc','ud' are not available, please use one or more of: tcp",
        "network device 'eth9' is not available, please use one or more of: 'lo'(tcp)",
    ],
)
def test_what_was_asked_for_and_is_not_there_is_found(what: str) -> None:
    assert unavailable(f"{HEAD}{WARNING}{what}\n{SELF}") == what


@pytest.mark.parametrize("line", ["", f"{WARNING}unused environment variable: UCX_FOO\n"])
def test_other_warnings_are_not_taken_for_it(line: str) -> None:
    assert unavailable(HEAD + line + SELF) is None

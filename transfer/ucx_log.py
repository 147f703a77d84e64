"""Reading from UCX's own log which transports it chose. Pure text work.

UCX offers no cheap call that names the transport of an endpoint which NIXL owns. With UCX_LOG_LEVEL=info it logs the lanes
of each new endpoint (`<agent> intra-node cfg#1 … am(tcp/lo cma/memory)`), and with UCX_PROTO_INFO the table of each protocol
that it selects (`remote memory write by ucp_put*(multi) … | 0..inf | zero-copy | cma/memory`). The table says what carries our
writes; the lanes are what it may use.
"""

from __future__ import annotations

import re

__all__ = ["chosen_transport", "complaints", "unavailable"]

_LANES = re.compile(r"(?:intra|inter)-node cfg#\d+ (?P<lanes>.*)$")
_LANE = re.compile(r"[a-z0-9_]+/[A-Za-z0-9_:.\-]+")
_ROW = re.compile(r"\| +\d+\.\.[\dKMGinf.]+ +\| (?P<how>[^|]+)\| (?P<config>[^|]+)\|\s*$")
_MISSING = re.compile(r"UCX +WARN +(?P<what>.*(?:transport|device)s? .*(?:is|are) not available.*)$")
_SEVERE = re.compile(r"UCX +(?:WARN|ERROR|FATAL)\b")


def chosen_transport(log: str) -> str | None:
    """E.g. `cma/memory (zero-copy)`: where the newest table of a remote write sends large messages; else the lanes of the
    newest endpoint, e.g. `lanes tcp/lo, cma/memory`; None: the log names neither."""
    table, lanes, in_write_table = None, None, False
    for line in log.splitlines():
        if found := _LANES.search(line):
            names = list(dict.fromkeys(_LANE.findall(found["lanes"])))
            lanes = f"lanes {', '.join(names)}" if names else lanes
        if "remote memory" in line or "active message" in line:
            in_write_table = "remote memory write" in line
        elif in_write_table and (row := _ROW.search(line)):
            table = f"{row['config'].strip()} ({row['how'].strip()})"
    return table or lanes


def complaints(log: str) -> list[str]:
    """Lines by which UCX warns of something or reports an error."""
    return [line for line in log.splitlines() if _SEVERE.search(line)]


def unavailable(log: str) -> str | None:
    """What UCX was asked to use and does not find, in its words (`transport 'rc' is not available, …`); None: nothing. By
    itself it goes on with whatever else it was allowed."""
    return next((found["what"].strip() for line in log.splitlines() if (found := _MISSING.search(line))), None)

"""What a cluster costs while nobody asks it anything, and how long it takes until it can serve.

    python -m bench.idle [--seconds 60] [--json FILE]

`tandem up` with one worker of each kind and a small random checkpoint. Processor time is that of every process below `up`, over
the given seconds, in shares of one core; memory is what is the process's own (its unique set: what would be free if it ended).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import asdict, dataclass

import psutil

from bench.up import up_cluster, words_of

__all__ = ["Cost", "main", "measure"]

_SETTLE_S = 15.0
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Cost:
    """cores: processor seconds per second. own_mib: memory."""

    name: str
    num_processes: int
    cores: float
    own_mib: float


async def measure(seconds: float) -> tuple[float, list[Cost]]:
    """Seconds until ready, and the cost of each kind of process."""
    begin_s = time.monotonic()
    async with up_cluster("--memory-gib", "0.3") as cluster:
        ready_s = time.monotonic() - begin_s
        await asyncio.sleep(_SETTLE_S)
        root = psutil.Process(cluster.process.pid)
        processes = {process.pid: process for process in (root, *root.children(recursive=True))}
        before = {pid: _cpu_s(process) for pid, process in processes.items()}
        await asyncio.sleep(seconds)
        costs: dict[str, list[tuple[float, float]]] = {}
        for pid, process in processes.items():
            used = (_cpu_s(process) - before[pid]) / seconds
            costs.setdefault(_kind(process, root.pid), []).append((used, _own_mib(process)))
    return ready_s, [
        Cost(name, len(each), sum(cores for cores, _ in each), sum(mib for _, mib in each))
        for name, each in sorted(costs.items())
    ]


def _kind(process: psutil.Process, root: int) -> str:
    words = " ".join(words_of(process))
    if not words:
        return "ended"
    for mark, kind in (
        ("ControllerActor", "controller"),
        ("PrefillWorkerActor", "prefill worker"),
        ("DecodeWorkerActor", "decode worker"),
        ("tandem.cli.main router", "router"),
    ):
        if mark in words:
            return kind
    return "up" if process.pid == root else "Ray"


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _own_mib(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().uss) / _MIB
    except psutil.Error:
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    ready_s, costs = asyncio.run(measure(args.seconds))
    print(f"ready after {ready_s:.1f} s\n\n{'processes':<18}{'number':>7}{'of one core':>13}{'own memory':>14}")
    for cost in costs:
        print(f"{cost.name:<18}{cost.num_processes:>7}{cost.cores:>13.2%}{cost.own_mib:>10.0f} MiB")
    ours = [cost for cost in costs if cost.name not in ("Ray", "up", "ended")]
    total = sum(cost.cores for cost in ours)
    print(f"{'tandem, without up':<18}{'':>7}{total:>13.2%}{sum(cost.own_mib for cost in ours):>10.0f} MiB")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"ready_s": ready_s, "costs": [asdict(cost) for cost in costs]}, file, indent=1)


if __name__ == "__main__":
    main()

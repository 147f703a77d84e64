"""Workers die while streams run: `python -m tests.chaos --seconds 300 --seed 1`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tests.chaos.run import Plan, run, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of load and faults (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, faults and their moments (default %(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="requests at once (default %(default)s)")
    parser.add_argument("--prefill", type=int, default=2, help="prefill workers (default %(default)s)")
    parser.add_argument("--decode", type=int, default=2, help="decode workers (default %(default)s)")
    parser.add_argument("--spare", type=int, default=1, help="workers of each pool that are never harmed at a time (default 1)")
    parser.add_argument("--log", metavar="FILE", help="write there what `up` and the router say")
    args = parser.parse_args()
    plan = Plan(args.seconds, args.seed, args.streams, args.prefill, args.decode, args.spare)
    result = asyncio.run(run(plan, _say))
    if args.log:
        Path(args.log).write_text(result.log, encoding="utf-8")
    _say(table(result))
    for problem in result.problems:
        _say(f"PROBLEM  {problem}")
    return 1 if result.problems else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

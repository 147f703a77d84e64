"""Random requests through every door of a router: `python -m tests.router.fuzz --seconds 600 --seed 1`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.router.fuzz.run import Plan, fuzz


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of sending (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of what is sent (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=8, help="clients (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        findings = asyncio.run(fuzz(Plan(args.seconds, args.seed, args.at_once), Path(folder)))
    sys.stdout.write(findings.table() + "\n")
    for problem in findings.problems:
        sys.stdout.write(f"PROBLEM  {problem}\n")
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())

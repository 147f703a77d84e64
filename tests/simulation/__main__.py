"""Many runs, each of another seed: `python -m tests.simulation --runs 100000 --seed 1`.

Stops at the first seed whose run breaks an invariant, prints what broke and the smallest scenario found that breaks it too.
`--show SEED` plays one seed and prints what its processes log.
"""

from __future__ import annotations

import argparse
import gc
import pprint
import random
import sys
import time
from collections import Counter

from tests.simulation.runner import Report, run
from tests.simulation.scenario import Scenario, draw
from tests.simulation.shrink import shrunk

_PROGRESS_S = 10.0
_COLLECT_EVERY = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulated clusters, at random.")
    parser.add_argument("--runs", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count on from it")
    parser.add_argument("--show", type=int, metavar="SEED", help="play this one only, with its log")
    args = parser.parse_args()
    if args.show is not None:
        scenario = draw(random.Random(args.show))
        _say(pprint.pformat(scenario, width=128))
        report = run(scenario, tell=_say)
        _say(pprint.pformat(report, width=128))
        return bool(report.violations)
    return _search(args.seed, args.runs)


def _search(first: int, runs: int) -> int:
    began_s = told_s = time.monotonic()
    ends: Counter[str] = Counter()
    attempts = events = 0
    for number, seed in enumerate(range(first, first + runs), start=1):
        scenario = draw(random.Random(seed))
        report = run(scenario)
        if report.violations:
            _explain(seed, scenario, report)
            return 1
        ends.update(error.partition(":")[0] or "served" for error in report.ends)
        attempts += report.attempts
        events += report.num_events
        if number % _COLLECT_EVERY == 0:
            gc.collect()
        now_s = time.monotonic()
        if now_s - told_s >= _PROGRESS_S or number == runs:
            told_s = now_s
            rate = number / (now_s - began_s)
            pace = f"{rate:.1f}/s, {(runs - number) / rate:.0f} s left"
            _say(f"{number:,} of {runs:,} runs, {pace}; {events:,} events, {attempts:,} attempts, {dict(ends)}")
    return 0


def _explain(seed: int, scenario: Scenario, report: Report) -> None:
    _say(f"\nseed {seed} breaks an invariant; see it with: python -m tests.simulation --show {seed}")
    for violation in report.violations:
        _say(f"  {violation}")
    _say("\nthe smallest found that breaks one:")
    smallest = shrunk(scenario, lambda candidate: bool(run(candidate).violations))
    _say(pprint.pformat(smallest, width=128))
    _say(pprint.pformat(run(smallest).violations, width=128))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

"""`python -m tests.multihost`: the scenario with its times, on network namespaces. As root."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from tests.multihost.hosts import why_not
from tests.multihost.scenario import run_scenario


def main() -> int:
    argparse.ArgumentParser(prog="python -m tests.multihost", description=__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no namespace stays
    if reason := why_not():
        sys.stderr.write(f"several hosts cannot be made here: {reason}\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="tandem-hosts-") as folder:
        try:
            for line in run_scenario(Path(folder)):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
        except BaseException:
            for log in sorted(Path(folder).glob("*.log")):
                sys.stderr.write(f"--- {log.name}\n{log.read_text()[-4000:]}\n")
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Whatever comes through whatever door of a real router: never an internal error, never a traceback, nothing left behind."""

import random
import sys
from pathlib import Path

import pytest

from tests.router.fuzz.run import Plan, fuzz

_SECONDS = 60.0


@pytest.mark.slow
async def test_no_request_finds_a_bug(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another seed each time; the one that found something is in the output."""
    seed = random.SystemRandom().randrange(10**6)
    findings = await fuzz(Plan(_SECONDS, seed), tmp_path)
    with capsys.disabled():
        sys.stdout.write(f"\npython -m tests.router.fuzz --seed {seed}: {findings.answers.total()} requests\n")
    assert findings.problems == [], f"seed {seed}\n{findings.table()}"
    answered = {name.split(" ")[0] for name in findings.answers}
    assert {"Generate", "ModelInfer", "ModelStreamInfer", "POST", "GET", "raw"} <= answered
    for good in ("POST /v1/completions 200", "POST /v1/chat/completions 200", "Generate OK", "ModelInfer OK"):
        assert findings.answers[good], findings.table()
    for bad in ("POST /v1/completions 400", "POST /v1/chat/completions 400", "Generate INVALID_ARGUMENT"):
        assert findings.answers[bad], findings.table()

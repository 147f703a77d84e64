"""Real processes are killed and frozen while streams run: no token is wrong, no request hangs, nothing is left behind."""

import pytest

from tests.chaos.run import Plan, run, table

pytestmark = [pytest.mark.chaos, pytest.mark.cluster, pytest.mark.slow]


async def test_streams_survive_the_loss_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    result = await run(Plan(seconds=60, seed=1))
    with capsys.disabled():
        print(f"\n{table(result)}")
    assert result.problems == [], result.log
    assert result.injected.total() >= 5
    assert any(record.resumed for record in result.records)
    assert sum(record.status is None for record in result.records) > 20

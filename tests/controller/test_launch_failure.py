import pytest
import ray

from controller.launch import start_cluster
from tandem.config import ClusterConfig
from tandem.errors import TandemError


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def time_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore of it.")

    monkeypatch.setattr(ray, "init", time_out)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(TandemError, match="The current node timed out during startup") as failure:
        start_cluster(ClusterConfig())
    assert "\n" not in str(failure.value)

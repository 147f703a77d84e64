"""The import rules catch what they say they catch, wherever the import hides."""

from pathlib import Path

import pytest

from tools.check_imports import ONLY_IN, PURE, UNSAFE, breaches, check_source, main


@pytest.mark.parametrize(
    "source",
    [
        "import ray",
        "import ray.util",
        "from ray.util import state",
        "def late():\n    import ray\n",
        "try:\n    import ray as r\nexcept ImportError:\n    pass\n",
    ],
)
def test_ray_outside_its_modules_is_refused_even_inside_a_function(source: str) -> None:
    (breach,) = check_source("router/server.py", source)
    assert "ray belongs to the actors" in breach.message


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_the_named_modules_may_import(package: str) -> None:
    for path in ONLY_IN[package].files:
        assert check_source(path, f"import {package}") == []


def test_generated_service_stubs_count_as_grpc_and_messages_do_not() -> None:
    assert check_source("router/pipeline.py", "from tandem.v1 import worker_pb2") == []
    (breach,) = check_source("router/pipeline.py", "from tandem.v1 import worker_pb2_grpc")
    assert "grpc belongs to" in breach.message


@pytest.mark.parametrize("package", ["torch", "transformers", "torch.nn.functional"])
def test_decision_modules_import_no_machinery(package: str) -> None:
    for path in PURE:
        (breach,) = check_source(path, f"x = 1\nimport {package}\n")
        assert breach.line == 2
        assert "decides only" in breach.message


def test_an_import_for_the_type_checker_alone_is_allowed_and_its_else_branch_is_not() -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray\nelse:\n    import nixl\n"
    (breach,) = check_source("router/server.py", guarded)
    assert (breach.line, "nixl" in breach.message) == (5, True)


@pytest.mark.parametrize("package", UNSAFE)
def test_no_format_that_runs_code_when_read_is_imported_anywhere(package: str) -> None:
    for path in ("router/server.py", "prefill_worker/actor.py", "tandem/rpc.py"):
        (breach,) = check_source(path, f"def read():\n    from {package} import loads\n")
        assert "can run code" in breach.message


def test_a_name_that_only_begins_alike_and_a_relative_import_are_free() -> None:
    assert check_source("router/server.py", "import rayon\nfrom .ray import x\n") == []


def test_a_breach_ends_the_check_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "placement.py").write_text("import torch\n")
    assert main(["check_imports", str(tmp_path)]) == 1
    assert "router/placement.py:1: imports torch" in capsys.readouterr().out
    (tmp_path / "router" / "placement.py").write_text("import math\n")
    assert main(["check_imports", str(tmp_path)]) == 0
    assert breaches(tmp_path) == []

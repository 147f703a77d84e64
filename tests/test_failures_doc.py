"""Every test that docs/failures.md and docs/security.md name exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = sorted(
    {
        (page.name, *match)
        for page in (ROOT / "docs" / "failures.md", ROOT / "docs" / "security.md")
        for match in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    }
)


@cache
def defined_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize(("page", "file", "test"), NAMED, ids=[f"{page}-{test}" for page, _, test in NAMED])
def test_a_named_test_exists(page: str, file: str, test: str) -> None:
    assert test in defined_in(ROOT / file)


def test_many_are_named() -> None:
    assert len(NAMED) > 40

"""What the repository declares about itself is true."""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from tools.check_imports import ROOMS, breaches

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "tandem" / "v1"
MODULES = [
    path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
    if GENERATED not in path.parents and path.name != "__init__.py"
]


def _declared(path: Path) -> list[str] | None:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return None


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_all_names_what_the_module_defines_in_order(path: Path) -> None:
    declared = _declared(path)
    assert declared is not None, "no __all__"
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    assert set(declared) <= names
    assert len(declared) == len(set(declared))


def test_import_rules_hold() -> None:
    assert [str(breach) for breach in breaches(ROOT)] == []


def test_every_make_command_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z]+)`|^make ([a-z]+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    used = {a or b for a, b in named}
    assert {"demo", "test"} <= used <= targets


def test_every_tandem_command_of_the_readme_exists() -> None:
    from tandem.cli.main import COMMANDS

    blocks = re.findall(r"^```.*?^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    used = set(re.findall(r"^(?:\$ )?tandem ([a-z]+)", "\n".join(blocks), re.MULTILINE))
    assert "up" in used
    assert used <= set(COMMANDS)


def test_every_command_has_its_module() -> None:
    from tandem.cli.main import COMMANDS

    for command in COMMANDS.values():
        module = importlib.import_module(command.module)
        assert callable(module.add_parser)
        assert callable(module.run)


def test_constraints_pin_every_direct_dependency_to_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = project["dependencies"] + extras["dev"] + extras["tracing"]
    assert set(extras["tracing"]) <= set(extras["dev"])
    pinned = re.findall(r"^([A-Za-z0-9_.-]+)==\S+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)

    def name(requirement: str) -> str:
        return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")

    assert {name(requirement) for requirement in wanted} <= {name(pin) for pin in pinned}


def test_the_licence_is_the_declared_one() -> None:
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")

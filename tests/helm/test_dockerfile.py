"""The image: what a linter says of it, and facts that the chart relies on."""

import re
import subprocess
import sys
from pathlib import Path

import yaml

from tandem.cli.main import COMMANDS
from tests.helm.charts import CHART, ROOT
from tools.check_imports import ROOMS

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LAST_STAGE = TEXT[TEXT.rindex("\nFROM ") :]


def test_the_linter_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, "Dockerfile"], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_it_runs_as_the_user_of_the_chart() -> None:
    context = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["podSecurityContext"]
    assert re.findall(r"^USER (.+)$", LAST_STAGE, re.MULTILINE) == [f"{context['runAsUser']}:{context['runAsGroup']}"]


def test_no_base_image_is_the_latest() -> None:
    images = re.findall(r"^FROM (\S+)", TEXT, re.MULTILINE)
    assert images
    assert all(re.fullmatch(r"[\w./-]+:\d[\w.-]*", image) for image in images)


def test_every_package_is_copied_and_let_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    for room in ROOMS:
        assert f"COPY {room} {room}" in TEXT
        assert f"!{room}" in ignored
    for files in re.findall(r"^COPY (?!--from)(.+) \S+$", TEXT, re.MULTILINE):
        for file in files.split():
            assert (ROOT / file).exists()
            assert f"!{file}" in ignored


def test_the_entry_point_is_the_cli() -> None:
    assert re.findall(r"^ENTRYPOINT (.+)$", LAST_STAGE, re.MULTILINE) == ['["tandem"]']
    assert {"head", "node", "leave", "probe", "router"} <= set(COMMANDS)


def test_installs_are_bound_to_the_tested_versions() -> None:
    for line in re.findall(r"pip install[^\\\n]*", TEXT):
        assert "-c constraints.txt" in line or "--no-deps" in line

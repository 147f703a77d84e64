"""A cluster with TLS everywhere: it serves, and its secret is on no command line, in no log."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.certificates import Authority

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECRET = "5ec2e7-of-this-test-that-must-not-show"


def test_a_cluster_with_tls_serves_and_shows_its_secret_nowhere(tmp_path: Path) -> None:
    tls = Authority.make(tmp_path / "ca").issue("cluster")
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "config.json").write_text(json.dumps({"trust": {"tls": files}, "router": {"tls": files}}))
    command = [sys.executable, "-m", "tandem.cli.main"]
    up = [
        *command,
        "up",
        "--config",
        "config.json",
        "--cluster-secret-file",
        "secret",
        "--grpc-port",
        "0",
        "--http-port",
        "0",
        "--memory-gib",
        "0.5",
    ]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(up, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready"), (tmp_path / "log").read_text()
        address = line.split()[2].rstrip(":,")
        ask = [*command, "generate", "Once", "--max-new-tokens", "4", "--json", "--address", address]
        options = ["--tls-ca", tls.ca_file, "--tls-cert", tls.cert_file, "--tls-key", tls.key_file]
        answered = subprocess.run([*ask, *options], capture_output=True, text=True, timeout=60, check=False)
        assert json.loads(answered.stdout)["usage"]["completion_tokens"] == 4, answered.stderr
        refused = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=False)
        assert (refused.returncode, refused.stdout) == (1, "")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        shown = [text for member in family if (text := _shown(member))]
        assert len(shown) > 4
        assert SECRET not in "\n".join(shown)
    finally:
        process.terminate()
        with process:  # closes its pipe
            assert process.wait(60) == 0
    assert SECRET not in (tmp_path / "log").read_text()
    assert SECRET not in ray_logs()


def test_what_stands_in_the_users_folder_runs_in_place_of_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    for name in ("tandem", "controller", "router", "prefill_worker", "decode_worker", "transfer", "ray", "torch", "logging"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + '\\n')\nraise ImportError")
    up = [str(Path(sys.executable).with_name("tandem")), "up", "--grpc-port", "0", "--http-port", "0", "--memory-gib", "0.5"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(up, cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready"), (tmp_path / "log").read_text()
    finally:
        process.terminate()
        with process:
            assert process.wait(60) == 0
    assert not ran.exists(), ran.read_text()


def ray_logs() -> str:
    """What Ray and the workers under it wrote in its newest session on this machine."""
    logs = Path("/tmp/ray/session_latest/logs")
    return "\n".join(file.read_text(errors="replace") for file in logs.rglob("*") if file.is_file())


def _shown(process: psutil.Process) -> str:
    """What other users may see of it; nothing where it has just ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join([*process.cmdline(), *process.environ().values()])
    return ""

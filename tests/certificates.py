"""Certificates for tests, made on the spot with the `openssl` binary."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.config import TlsConfig

__all__ = ["Authority"]

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Authority:
    """Signs certificates under `folder`."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Authority:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl binary is not installed")
        folder.mkdir()
        _openssl(
            "req",
            "-x509",
            *_KEY,
            "-days",
            "2",
            "-subj",
            "/CN=test authority",
            "-keyout",
            "ca.key",
            "-out",
            "ca.pem",
            cwd=folder,
        )
        return cls(folder)

    def issue(self, name: str, alt_name: str = "IP:127.0.0.1") -> TlsConfig:
        """A certificate for servers and clients, with its key and this authority."""
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        _openssl("req", *_KEY, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", request.name, cwd=self.folder)
        extensions.write_text(f"subjectAltName={alt_name}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl(
            *("x509", "-req", "-in", request.name, "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"),
            *("-extfile", extensions.name, "-out", f"{name}.pem"),
            cwd=self.folder,
        )
        return TlsConfig(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"), str(self.folder / "ca.pem"))


def _openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)

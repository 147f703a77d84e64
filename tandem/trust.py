"""Who may speak to whom: the cluster's secret and certificates, read and checked once at start.

Pure but for the reading of files; `tandem.rpc` puts it to work.
"""

from __future__ import annotations

import ssl
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tandem.config import TlsConfig, TrustConfig
from tandem.errors import ConfigError
from tandem.secret import Secret

__all__ = ["MIN_SECRET_CHARS", "Certificates", "Trust", "read_secret"]

MIN_SECRET_CHARS = 16
_PEM_MARK = b"-----BEGIN "


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM texts; empty where none was given. cert, key: what this side shows. ca: who must have signed what the other shows;
    a client without it trusts the system's authorities. server_name: see `TlsConfig`."""

    cert: bytes = b""
    key: bytes = field(default=b"", repr=False)
    ca: bytes = b""
    server_name: str = ""

    @classmethod
    def load(cls, tls: TlsConfig) -> Certificates | None:
        """None: no TLS is wanted.

        Raises:
            ConfigError: a file is missing, cannot be used, or does not belong to another; names it.
        """
        if tls == TlsConfig():
            return None
        if bool(tls.cert_file) != bool(tls.key_file):
            raise ConfigError("TLS needs a certificate and its key: give both cert_file and key_file")
        read = cls(_read_pem(tls.cert_file), _read_pem(tls.key_file), _read_pem(tls.ca_file), tls.server_name)
        _check_pair(tls)
        return read


@dataclass(frozen=True, slots=True)
class Trust:
    """What a process of the cluster shows to the others, and asks of them. certificates: None without TLS."""

    secret: Secret
    certificates: Certificates | None = None

    @classmethod
    def load(cls, config: TrustConfig) -> Trust:
        """
        Raises:
            ConfigError: there is no secret, or a file cannot be used; says which.
        """
        secret = config.secret or (read_secret(config.secret_file) if config.secret_file else Secret())
        if not secret:
            raise ConfigError("no cluster secret was given: name its file with --cluster-secret-file or trust.secret_file")
        certificates = Certificates.load(config.tls)
        if certificates and not (certificates.cert and certificates.ca):
            raise ConfigError("TLS between processes is mutual: give cert_file, key_file and ca_file in trust.tls")
        return cls(secret, certificates)


def read_secret(path: str) -> Secret:
    """The text of a file, or of standard input for "-", without white space around it.

    Raises:
        ConfigError: it cannot be read, or is too short to be a secret.
    """
    try:
        text = (sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the cluster secret {path}: {_reason(error)}") from error
    if len(text) < MIN_SECRET_CHARS:
        raise ConfigError(f"the cluster secret in {path} is too short: {MIN_SECRET_CHARS} characters at least")
    return Secret(text)


def _read_pem(path: str) -> bytes:
    if not path:
        return b""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {_reason(error)}") from error
    if _PEM_MARK not in data:
        raise ConfigError(f"{path} is no PEM file")
    return data


def _check_pair(tls: TlsConfig) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if tls.cert_file:
            context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{tls.cert_file} and {tls.key_file} cannot be used together: {_reason(error)}") from error
    try:
        if tls.ca_file:
            context.load_verify_locations(tls.ca_file)
    except ssl.SSLError as error:
        raise ConfigError(f"{tls.ca_file} holds no usable certificate: {_reason(error)}") from error


def _no_password() -> str:
    """Instead of a question on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return (getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)).replace("_", " ").lower()

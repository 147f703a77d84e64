"""Addresses as options have them."""

from __future__ import annotations

from tandem.errors import ConfigError

__all__ = ["check_address"]


def check_address(address: str, option: str) -> tuple[str, int]:
    """Host and port. Raises ConfigError: `address` is no HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{option} {address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)

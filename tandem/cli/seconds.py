"""Options that are numbers of seconds."""

from __future__ import annotations

from tandem.errors import ConfigError

__all__ = ["require_seconds"]

_LONGEST_S = 86_400


def require_seconds(option: str, value: float | None) -> None:
    """Raises ConfigError: `value` is given and no number of seconds up to a day."""
    if value is not None and not 0 <= value <= _LONGEST_S:
        raise ConfigError(f"{option} must be from 0 to {_LONGEST_S} seconds, not {value:g}")

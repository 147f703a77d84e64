"""A configuration as JSON, in which it travels between processes and operators write it. Unknown keys are refused by name."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import ConfigError
from tandem.secret import Secret

__all__ = ["dump", "load", "load_file"]

T = TypeVar("T")


def dump(config: Any, *, with_secrets: bool = False) -> str:
    """JSON of a configuration. with_secrets: for another process, over a channel that nobody else reads; otherwise they
    come out empty."""

    def plain(value: object) -> str:
        if isinstance(value, Secret):
            return value.reveal() if with_secrets else ""
        raise TypeError(f"{type(value).__name__} cannot stand in a configuration")

    return json.dumps(dataclasses.asdict(config), default=plain)


def load(cls: type[T], text: str, where: str = "configuration") -> T:
    """Parse what `dump` wrote, or what an operator wrote.

    Raises:
        ConfigError: not JSON, an unknown key, or a value of the wrong type or out of range; names it.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from error
    return _build(cls, data, where)


def load_file(cls: type[T], path: str) -> T:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {error}") from error
    return load(cls, text, path)


def _build(cls: type[T], data: object, where: str) -> T:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: an object was expected, not {type(data).__name__}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(hints))}")
    values = {key: _value(hints[key], value, f"{where}.{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _value(hint: Any, value: object, where: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast("type[Any]", hint), value, where)
    if hint is Secret:
        if not isinstance(value, str):
            raise ConfigError(f"{where}: text expected, not {type(value).__name__}")
        return Secret(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, types.UnionType) or not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where}: {hint.__name__} expected, got {value!r}")
    return value

"""Reading JSON that a client wrote: every value checked, every error naming the parameter, nothing unknown passed over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from router.json_text import parse_json
from tandem.errors import InvalidRequest

__all__ = ["Fields", "is_tokens", "parse_object", "utf8"]

_INT32 = 2**31


def parse_object(body: bytes) -> dict[str, Any]:
    """
    Raises:
        InvalidRequest: not UTF-8, no JSON, no object, or nested too deeply.
    """
    data = parse_json(body, "body")
    if not isinstance(data, dict):
        raise InvalidRequest("body", "must be a JSON object")
    return data


class Fields:
    """One object of a request. A parameter that is null counts as not given. `done` refuses what nobody has asked for.

    where: prefix of the names in errors.
    """

    def __init__(self, data: Mapping[str, Any], where: str = "") -> None:
        self._data = data
        self._where = where
        self._seen: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self._where}{key}"

    def get(self, key: str) -> Any:
        self._seen.add(key)
        return self._data.get(key)

    def ignore(self, *keys: str) -> None:
        self._seen.update(keys)

    def flag(self, key: str) -> bool | None:
        value: bool | None = self._typed(key, "true or false", lambda value: isinstance(value, bool))
        return value

    def text(self, key: str) -> str | None:
        value = self._typed(key, "a string", lambda value: isinstance(value, str))
        return None if value is None else utf8(value, self.name(key))

    def integer(self, key: str) -> int | None:
        """Within 32 bits; the pipeline checks the narrower range."""
        value: int | None = self._typed(key, "an integer", _is_integer)
        if value is not None and not -_INT32 <= value < _INT32:
            raise InvalidRequest(self.name(key), f"{value} is out of range")
        return value

    def number(self, key: str) -> float | None:
        value = self._typed(key, "a number", _is_number)
        return None if value is None else float(value)

    def strings(self, key: str) -> list[str]:
        """One string, or a list of strings."""
        value = self.get(key)
        if value is None:
            return []
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise InvalidRequest(self.name(key), "must be a string or a list of strings")
        return [utf8(item, self.name(key)) for item in values]

    def integers(self, key: str) -> list[int]:
        value = self.get(key)
        if value is None:
            return []
        if not is_tokens(value):
            raise InvalidRequest(self.name(key), "must be a list of integers")
        return list(value)

    def inner(self, key: str) -> Fields | None:
        """An object within."""
        value = self._typed(key, "an object", lambda value: isinstance(value, dict))
        return None if value is None else Fields(value, f"{self.name(key)}.")

    def only(self, key: str, *allowed: object) -> None:
        """For what is accepted in its neutral form only."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise InvalidRequest(self.name(key), f"{value!r} is not supported here")

    def done(self) -> None:
        """
        Raises:
            InvalidRequest: a parameter that nothing has read.
        """
        if unknown := sorted(set(self._data) - self._seen):
            raise InvalidRequest(self.name(unknown[0]), "is no parameter that is known here")

    def _typed(self, key: str, what: str, fits: Callable[[Any], bool]) -> Any:
        value = self.get(key)
        if value is not None and not fits(value):
            raise InvalidRequest(self.name(key), f"must be {what}")
        return value


def utf8(text: str, name: str) -> str:
    """JSON can spell half of a surrogate pair, which is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(name, "holds half of a surrogate pair, which is no text") from error
    return text


def is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and -_INT32 <= item < _INT32 for item in value
    )


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""A value that no log, no repr and no message for people ever shows."""

from __future__ import annotations

import hmac
import secrets

__all__ = ["Secret"]

_MADE_BYTES = 32


class Secret:
    """Text known to the processes of one cluster. Empty: none was given. Only `reveal` shows it."""

    __slots__ = ("_value",)

    def __init__(self, value: str = "") -> None:
        self._value = value

    @classmethod
    def make(cls) -> Secret:
        """A new random one."""
        return cls(secrets.token_hex(_MADE_BYTES))

    def reveal(self) -> str:
        """The value itself, for another process or for a comparison. Never for people."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        """Takes as long for a near miss as for a far one."""
        return isinstance(other, Secret) and hmac.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash(Secret)

    def __deepcopy__(self, memo: object) -> Secret:
        return self

    def __repr__(self) -> str:
        return "Secret(set)" if self._value else "Secret(unset)"

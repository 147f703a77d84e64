"""Who may call, and how much at once. Keys come from a file; without one everybody may.

One key a line: its name, the key, how many answers it may have under way at once, and how many of those may wait for a worker
(0 or nothing: as many as there is room for)::

    # name        key                                   at once   waiting
    team-a        sk-3f9c0b7a51e24d0f8a6c               16        4
    dashboard     sk-a81d7be2c40948d8b1f3
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import ConfigError, Overloaded, Unauthenticated

__all__ = ["ANYONE", "Caller", "Callers"]

MIN_KEY_CHARS = 16
_RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Caller:
    """name: for logs; the key itself is kept nowhere. num_at_once: answers under way. num_queued: those of them that no worker
    has yet. max_at_once, max_queued: the most of each; 0: no limit of its own."""

    name: str
    max_at_once: int = 0
    max_queued: int = 0
    num_at_once: int = 0
    num_queued: int = 0

    @contextlib.contextmanager
    def admitted(self, num_answers: int) -> Iterator[None]:
        """
        Raises:
            Overloaded: it has as many under way as it may.
        """
        if self.max_at_once and self.num_at_once + num_answers > self.max_at_once:
            reason = f"this API key may have {self.max_at_once} answers under way at once (max_at_once); try again later"
            raise Overloaded(reason, _RETRY_AFTER_S)
        self.num_at_once += num_answers
        try:
            yield
        finally:
            self.num_at_once -= num_answers

    def require_place_in_queue(self, retry_after_s: Callable[[], float]) -> None:
        """For a new answer; one that is placed again keeps its place, whatever has come since.

        Raises:
            Overloaded: it has as many waiting as it may.
        """
        if self.max_queued and self.num_queued >= self.max_queued:
            reason = f"this API key may have {self.max_queued} answers waiting at once (max_queued); try again later"
            raise Overloaded(reason, retry_after_s())

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """While an answer waits for a worker."""
        self.num_queued += 1
        try:
            yield
        finally:
            self.num_queued -= 1


ANYONE = Caller("anyone")


@dataclass(frozen=True)
class Callers:
    """by_digest: SHA-256 of a key → who it is. Empty: nobody is asked for one."""

    by_digest: dict[bytes, Caller] = field(default_factory=dict)

    @classmethod
    def load(cls, path: str) -> Callers:
        """path: of the file; empty: everybody may call.

        Raises:
            ConfigError: it cannot be read, or a line cannot be used; names the line, never the key.
        """
        if not path:
            return cls()
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API keys {path}: {getattr(error, 'strerror', None) or error}") from error
        callers: dict[bytes, Caller] = {}
        for number, line in enumerate(lines, start=1):
            if words := line.partition("#")[0].split():
                digest, caller = _entry(words, f"{path}, line {number}")
                if digest in callers:
                    raise ConfigError(f"{path}, line {number}: the key is that of {callers[digest].name} already")
                callers[digest] = caller
        if not callers:
            raise ConfigError(f"{path} holds no API key, so nobody could call")
        return cls(callers)

    def identify(self, headers: Iterable[tuple[str, str | bytes]]) -> Caller:
        """headers: (name in lower case, value), `authorization: Bearer KEY` or `x-api-key: KEY` among them.

        Raises:
            Unauthenticated: no key, or none that is known.
        """
        if not self.by_digest:
            return ANYONE
        given = next(filter(None, (_key_of(name, value) for name, value in headers)), None)
        if given is None:
            raise Unauthenticated("no API key was given; send it as `authorization: Bearer KEY`")
        digest, found = hashlib.sha256(given).digest(), None
        # Every one is compared, each in constant time: how long it takes tells nothing.
        for known, caller in self.by_digest.items():
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None:
            raise Unauthenticated("the API key is not known here")
        return found


def _key_of(name: str, value: str | bytes) -> bytes | None:
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    if name == "x-api-key":
        return raw.strip()
    scheme, _, key = raw.partition(b" ")
    return key.strip() if name == "authorization" and scheme.lower() == b"bearer" else None


def _entry(words: list[str], where: str) -> tuple[bytes, Caller]:
    if not 2 <= len(words) <= 4:
        raise ConfigError(f"{where}: a name, a key and perhaps one or two numbers are expected")
    name, key, *numbers = words
    if len(key) < MIN_KEY_CHARS:
        raise ConfigError(f"{where}: the key of {name} is too short: {MIN_KEY_CHARS} characters at least")
    for number in numbers:
        if not number.isascii() or not number.isdigit() or len(number) > 9:
            raise ConfigError(f"{where}: {number!r} is no number of answers")
    return hashlib.sha256(key.encode()).digest(), Caller(name, *map(int, numbers))

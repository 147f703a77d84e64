"""What the step loop has been told, and what of it must wait until a suspended step has ended."""

from __future__ import annotations

from collections.abc import Set

from prefill_worker.inbox import CancelTask, Drain, HandOver, Message, RouterGone, Stop
from prefill_worker.prompt import Key
from tandem.mailbox import Inbox

__all__ = ["Mail"]

# These may end any prompt.
_FOR_MANY = (RouterGone, Drain, HandOver, Stop)


class Mail:
    """For the thread of the step loop."""

    def __init__(self) -> None:
        self._put_off: list[Message] = []

    @property
    def is_held_up(self) -> bool:
        """Something that concerns many waits for the end of the suspended step; nothing may overtake it."""
        return any(isinstance(message, _FOR_MANY) for message in self._put_off)

    def take(self, inbox: Inbox[Message], wait_s: float) -> list[Message]:
        """All there is, in the order in which it came; if there is nothing, wait so long for the first."""
        put_off, self._put_off = self._put_off, []
        return put_off + inbox.take(0.0 if put_off else wait_s)

    def take_during_step(self, inbox: Inbox[Message], wait_s: float, suspended: Set[Key]) -> list[Message]:
        """What may be acted upon while a step is suspended. suspended: whose; what could end these is put off."""
        now: list[Message] = []
        for message in inbox.take(wait_s):
            is_theirs = isinstance(message, CancelTask) and message.key in suspended
            is_for_many = bool(suspended) and isinstance(message, _FOR_MANY)
            (self._put_off if self.is_held_up or is_theirs or is_for_many else now).append(message)
        return now

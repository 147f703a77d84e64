"""What the step loop has been told, and what of it must wait until a suspended step has ended."""

from __future__ import annotations

from prefill_worker.inbox import CancelTask, Drain, HandOver, Message, RouterGone, Stop
from tandem.mailbox import Inbox

__all__ = ["Mail"]

# These may end prompts, and those of the suspended step are still computed.
_ENDS_PROMPTS = (CancelTask, RouterGone, Drain, HandOver, Stop)


class Mail:
    """For the thread of the step loop."""

    def __init__(self) -> None:
        self._put_off: list[Message] = []

    def take(self, inbox: Inbox[Message], wait_s: float) -> list[Message]:
        """All there is, in the order in which it came; if there is nothing, wait so long for the first."""
        put_off, self._put_off = self._put_off, []
        return put_off + inbox.take(0.0 if put_off else wait_s)

    def take_during_step(self, inbox: Inbox[Message], wait_s: float) -> list[Message]:
        """What may be acted upon while a step is suspended; the rest is put off. A cancelled task is no other's concern, but
        nothing overtakes a message that concerns many."""
        now: list[Message] = []
        for message in inbox.take(wait_s):
            is_held_up = any(not isinstance(earlier, CancelTask) for earlier in self._put_off)
            (self._put_off if is_held_up or isinstance(message, _ENDS_PROMPTS) else now).append(message)
        return now

"""An HTTP/1.1 connection whose patience ends. uvicorn's own waits for ever for the rest of a head or a body, and for a client
that does not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from router.http.errors import Refusal, body_of

__all__ = ["BoundedConnection"]


class BoundedConnection(H11Protocol):
    """patience_s: the longest that a client may take to send a request's head, then again its body, and that it may leave what
    was written to it untouched. most: connections that the server holds at once; one more is closed unserved.

    Both are set in a subclass, since the server makes the connections. Nothing is buffered beyond what the system takes: a
    response's writer waits instead.
    """

    patience_s = 60.0
    most = 4096

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._awaited: object = None
        self._reading: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._reading, self._writing):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_client()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def _await_client(self) -> None:
        """One timer for each head and each body, however many pieces it comes in."""
        awaited = (self.conn.their_state, self.cycle)
        if awaited == self._awaited or self.transport.is_closing():
            return
        self._awaited = awaited
        if self._reading is not None:
            self._reading.cancel()
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._reading = self.loop.call_later(self.patience_s, self._stop_reading)

    def _stop_reading(self) -> None:
        if self.transport.is_closing():
            return
        has_begun = self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]
        if has_begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse()
        self.transport.close()

    def _refuse(self) -> None:
        refusal = Refusal(408, "timeout_error", f"the request did not come within {self.patience_s:g} s")
        body = json.dumps(body_of(refusal)).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=refusal.status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))

    def _watch_reader(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._writing = self.loop.call_later(self.patience_s, self._look_at_reader, unread)

    def _look_at_reader(self, unread: int) -> None:
        """As much as before: not a byte was taken. Closing would wait for the client to read the rest."""
        if self.transport.get_write_buffer_size() == unread:
            self.transport.abort()
        else:
            self._watch_reader()

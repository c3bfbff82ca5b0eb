"""Connections of clients that are slow to send a request are closed.

uvicorn has a limit for a connection that is idle between two requests, and none for a client that never ends its
headers or its body: each such client would hold a connection, and a file descriptor, for as long as it likes.
`TimedProtocol` wraps uvicorn's own protocol and adds a limit. It bounds:

headers   from the first moment of the connection, or the first byte of a later request, to their end
body      the time between two pieces; where the answer was sent already, the time to its end

Once a request is whole there is no limit, neither for the answer nor for a client that does not read it. A request that
was sent together with the one before it is first looked at when that limit has passed once.
"""

import asyncio
from functools import partial
from typing import Any


def timed(seconds: float) -> Any:
    """What uvicorn calls to make the protocol of a connection."""
    return partial(TimedProtocol, seconds)


class TimedProtocol(asyncio.Protocol):
    """uvicorn's protocol of one connection, with a limit on how long it waits for a request."""

    def __init__(self, seconds: float, **options: Any) -> None:
        import h11
        from uvicorn.protocols.http.h11_impl import H11Protocol

        self._http, self._h11 = H11Protocol(**options), h11
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for the headers."""
        self._http.connection_made(transport)  # type: ignore[arg-type]
        self._start()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on; then go on waiting, begin anew, or stop."""
        self._look_no_more()
        self._http.data_received(data)
        theirs = self._http.conn.their_state
        if theirs is self._h11.SEND_BODY and not self._http.cycle.response_complete:
            self._stop()
            self._start()
        elif theirs in (self._h11.IDLE, self._h11.SEND_BODY):
            self._start()
        else:
            self._stop()
            self._look_later()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody is waited for any more."""
        self._stop()
        self._look_no_more()
        self._http.connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends nothing more."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """The client reads more slowly than it is sent to."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """The client has read what was sent."""
        self._http.resume_writing()

    def _start(self) -> None:
        if self._timer is None and not self._http.transport.is_closing():
            self._timer = self._http.loop.call_later(self._seconds, self._http.transport.close)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        """Look again by and by: uvicorn begins a request that came together with this one when this one is answered."""
        self._look = self._http.loop.call_later(self._seconds, self._look_again)

    def _look_again(self) -> None:
        if self._http.conn.their_state is self._h11.SEND_BODY:
            self._start()
        elif not self._http.transport.is_closing():
            self._look_later()

    def _look_no_more(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

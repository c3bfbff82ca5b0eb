"""Limit how long a client may keep the server waiting, and how many connections are
open.

uvicorn closes a connection that is idle between two requests. It has no limit for a
client that never finishes its request or never reads its answers, and accepts
connections until there are no descriptors left. Hypercorn waits for a slow reader
without a limit too, and Granian stops accepting, so another server would not help.
`LimitedProtocol` wraps uvicorn's own protocol and bounds:

headers      from connecting, or the first byte of a later request, to their end
body         the time between two pieces; where the answer was sent already, the time to its end
answers      a client must read all of them, or at least 64 KiB, in the same time
connections  beyond the limit, a new one takes the place of another: see `Connections`

Between a whole request and its answer there is no limit: an analysis takes as long as
it takes.
"""

import asyncio
from collections import Counter
from typing import Any

from hiddenscope.app.guard import ADMITTED

MIN_READ_BYTES = 64 * 1024


class Connections:
    """The open connections of one server. uvicorn calls it to make the protocol of a
    new one.

    At most `limit` stay open. One more closes another: the oldest whose last request
    had no token, of the address that has most of these, or else the oldest of all. So
    whoever has the token gets in and stays in, however many connections others hold.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit, self.seconds = limit, seconds
        # In the order in which they were opened.
        self._open: dict[LimitedProtocol, None] = {}

    def __call__(self, **options: Any) -> "LimitedProtocol":
        """Make the protocol of a connection."""
        return LimitedProtocol(self, **options)

    def add(self, connection: "LimitedProtocol") -> None:
        """Count a new connection, and close another where there are too many."""
        self._open[connection] = None
        if len(self._open) > self.limit:
            crowded_out = self._least_entitled(connection)
            self.remove(crowded_out)
            crowded_out.abort()

    def remove(self, connection: "LimitedProtocol") -> None:
        """Forget a connection that is closed."""
        self._open.pop(connection, None)

    def _least_entitled(self, newcomer: "LimitedProtocol") -> "LimitedProtocol":
        """Choose which of the other connections to close."""
        others = [connection for connection in self._open if connection is not newcomer]
        candidates = [
            connection for connection in others if not connection.is_admitted
        ] or others
        counts = Counter(connection.address for connection in candidates)
        crowd = max(counts, key=counts.__getitem__)
        return next(
            connection for connection in candidates if connection.address == crowd
        )


class LimitedProtocol(asyncio.Protocol):
    """uvicorn's protocol of one connection, with limits on how long it waits for its
    client.
    """

    def __init__(self, connections: Connections, **options: Any) -> None:
        import h11
        from uvicorn.protocols.http.h11_impl import H11Protocol

        self._http, self._h11 = H11Protocol(**options), h11
        self._connections = connections
        self._seconds = connections.seconds
        self._request_timer: asyncio.TimerHandle | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._drained = False

    @property
    def address(self) -> str:
        """The IP address of the client."""
        client = self._http.client
        return "" if client is None else client[0]

    @property
    def is_admitted(self) -> bool:
        """Whether the last request had the token."""
        scope: Any = self._http.scope
        return scope is not None and ADMITTED in scope

    def abort(self) -> None:
        """Close the connection at once, without sending what is left."""
        self._http.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start to wait for the headers."""
        self._http.connection_made(transport)  # type: ignore[arg-type]
        self._connections.add(self)
        self._start_request_timer()
        self._check_later()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on; then restart, keep or stop the timer of the request."""
        self._http.data_received(data)
        their_state = self._http.conn.their_state
        if (
            their_state is self._h11.SEND_BODY
            and not self._http.cycle.response_complete
        ):
            self._stop_request_timer()
            self._start_request_timer()
        elif their_state in (self._h11.IDLE, self._h11.SEND_BODY):
            self._start_request_timer()
        else:
            self._stop_request_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._connections.remove(self)
        self._stop_request_timer()
        if self._check_timer is not None:
            self._check_timer.cancel()
        self._http.connection_lost(exc)

    def eof_received(self) -> None:
        """Pass on that the client sends nothing more."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """Pass on that the client reads more slowly than it is sent to."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Pass on that the client has read most of what was sent."""
        self._drained = True
        self._http.resume_writing()

    def _start_request_timer(self) -> None:
        if self._request_timer is None and not self._http.transport.is_closing():
            self._request_timer = self._http.loop.call_later(
                self._seconds, self._http.transport.close
            )

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _check_later(self) -> None:
        self._check_timer = self._http.loop.call_later(self._seconds, self._check)

    def _check(self) -> None:
        """Abort the connection if its client reads too little. Also start the timer of
        a pipelined request.
        """
        # A transport that is closing stays open until its client has read everything:
        # it is checked all the same.
        unsent = self._http.transport.get_write_buffer_size()
        has_read = self._drained or unsent <= self._unsent - MIN_READ_BYTES
        if unsent and self._unsent and not has_read:
            self.abort()
            return
        self._unsent = unsent
        self._drained = False
        # uvicorn starts a pipelined request only after it has answered the one before,
        # and no data is received then.
        if self._http.conn.their_state is self._h11.SEND_BODY:
            self._start_request_timer()
        self._check_later()

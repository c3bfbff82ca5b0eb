"""Connections: how many may be open, and how long each may keep the server waiting.

uvicorn closes a connection that is idle between two requests. It has no limit for a
client that never finishes its request or never reads its answers, and accepts
connections until there are no descriptors left. Hypercorn waits for a slow reader
without a limit too, and Granian stops accepting, so another server would not help.
`LimitedProtocol` wraps uvicorn's own protocol and bounds:

headers      from connecting, or the first byte of a later request, to their end
body         the time between two pieces; once the answer has been sent, to the end
answers      a client must read all of them, or at least 64 KiB, in the same time
connections  beyond the limit, a new one takes the place of another: see `Connections`

Between a whole request and its answer there is no limit: an analysis takes as long as
it takes.
"""

import asyncio
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from hiddenscope.app.guard import ADMITTED

MIN_READ_BYTES = 64 * 1024


class Connections:
    """The open connections of one server. uvicorn calls it for each new one.

    At most `limit` stay open. One more closes another: of the connections whose last
    request had no token, the oldest of the address that has most of them, or else the
    oldest of all. So whoever has the token gets in and stays in, however many
    connections others hold.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self.limit = limit
        self.seconds = seconds
        # In the order in which they were opened.
        self._open: dict[LimitedProtocol, None] = {}

    def __call__(self, **options: Any) -> "LimitedProtocol":
        """Return the protocol of a new connection."""
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
        strangers = [connection for connection in others if not connection.is_admitted]
        candidates = strangers or others
        counts = Counter(connection.address for connection in candidates)
        crowd = max(counts, key=counts.__getitem__)
        return next(
            connection for connection in candidates if connection.address == crowd
        )


class LimitedProtocol(asyncio.Protocol):
    """uvicorn's protocol of one connection, with limits on waiting for its client."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        import h11
        from uvicorn.protocols.http.h11_impl import H11Protocol

        self._http = H11Protocol(**options)
        self._h11 = h11
        self._connections = connections
        self._seconds = connections.seconds
        self._request_timer: asyncio.TimerHandle | None = None
        self._check_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._drained = False

    @property
    def address(self) -> str:
        """Return the IP address of the client."""
        client = self._http.client
        return "" if client is None else client[0]

    @property
    def is_admitted(self) -> bool:
        """Return whether the last request had the token."""
        # uvicorn has no scope before the first request, though its types say so.
        scope: MutableMapping[str, object] | None = self._http.scope  # type: ignore[assignment]
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
        client_state = self._http.conn.their_state
        sends_body = client_state is self._h11.SEND_BODY
        if sends_body and not self._http.cycle.response_complete:
            # Every piece of a body buys more time, as long as somebody waits for it.
            self._stop_request_timer()
            self._start_request_timer()
        elif sends_body or client_state is self._h11.IDLE:
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
        """Abort the connection if its client reads too little."""
        # Also of a transport that is closing: it stays open until its client has read
        # everything.
        unsent = self._http.transport.get_write_buffer_size()
        has_read = self._drained or unsent <= self._unsent - MIN_READ_BYTES
        if unsent and self._unsent and not has_read:
            self.abort()
            return
        self._unsent = unsent
        self._drained = False
        # uvicorn starts a pipelined request only after it has answered the current one,
        # and no data arrives then that would start the timer.
        if self._http.conn.their_state is self._h11.SEND_BODY:
            self._start_request_timer()
        self._check_later()

"""How long a client may keep the server waiting, and who is closed where there are too
many: with a clock and a transport of the test.
"""

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import uvicorn
from uvicorn.server import ServerState

from hiddenscope.app.connections import Connections
from hiddenscope.app.guard import ADMITTED
from tests.workbench.inside import apart

BEGUN = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
LIMIT = 30.0


class Clock:
    """The part of an event loop that a protocol uses; time passes when it is told."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Mock] = []

    def call_later(self, seconds: float, call: Callable[[], Any]) -> Mock:
        timer = Mock(at=self.now + seconds, call=call)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def pass_(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= until]:
            timer = min(due, key=lambda timer: timer.at)
            self.now = timer.at
            # As in asyncio, cancelling it later does nothing.
            timer.cancel()
            timer.cancel = lambda: None
            timer.call()
        self.now = until

    def create_task(self, work: Any, **options: Any) -> Mock:
        # What answers never ends here: it takes as long as it takes.
        work.close()
        return Mock()


class Client:
    """A connection to a server, and whether the server has ended it."""

    def __init__(self, connections: Connections, address: str = "127.0.0.1") -> None:
        self.clock = Clock()
        self.transport = Mock(spec=asyncio.Transport)
        self.transport.get_extra_info.side_effect = {
            "peername": (address, 1),
            "sockname": ("127.0.0.1", 2),
        }.get
        self.transport.get_write_buffer_size.return_value = 0
        self.transport.is_closing.side_effect = lambda: self.ended
        config = uvicorn.Config(Mock(), lifespan="off", ws="none", interface="asgi3")
        config.load()
        self.protocol = connections(
            config=config, server_state=ServerState(), app_state={}, _loop=self.clock
        )
        self.protocol.connection_made(self.transport)

    @property
    def ended(self) -> bool:
        return bool(self.transport.close.called or self.transport.abort.called)

    def has_token(self) -> None:
        self.protocol._http.scope = {ADMITTED: True}  # type: ignore[assignment]


def test_a_request_that_never_ends_is_closed() -> None:
    for begun, drip, closes in (
        (b"", b"", True),  # nothing is ever sent
        (b"", b"\r\n", True),  # empty lines before a request
        (BEGUN, b"", True),  # headers that do not end
        (BEGUN + b"X-Slow: ", b"x", True),  # and go on and on
        (BODY, b"", True),  # a body that does not come
        (BODY, b"x", False),  # one that comes in pieces
        (BEGUN + b"\r\n", b"", False),  # a whole request may take any time
    ):
        client = Client(Connections(9, LIMIT))
        if begun:
            client.protocol.data_received(begun)
        for _ in range(4):
            client.clock.pass_(LIMIT / 3)
            if drip and not client.ended:
                client.protocol.data_received(drip)
        assert client.ended == closes, (begun, drip)
        client.protocol.connection_lost(None)
        assert client.clock.timers == []


def test_a_client_that_reads_too_little_is_dropped() -> None:
    """It must read all, or at least 64 KiB, in the same time."""
    for left, drained, dropped in (
        ([10**6, 10**6], False, True),
        ([10**6, 10**6 - 65_535], False, True),
        ([10**6, 10**6 - 65_536], False, False),
        ([10**6, 0, 10**6, 0], False, False),
        ([10**6, 10**6], True, False),  # it read most of it, and was sent more
    ):
        client = Client(Connections(9, LIMIT))
        client.protocol.data_received(BEGUN + b"\r\n")
        for unsent in left:
            client.transport.get_write_buffer_size.return_value = unsent
            if drained:
                client.protocol.resume_writing()
            client.clock.pass_(LIMIT)
        assert client.transport.abort.called == dropped, (left, drained)


@apart
async def test_a_crowd_without_the_token_closes_no_connection_that_has_it() -> None:
    """One more than there may be closes the oldest stranger of the address that has
    most of them; where there are no strangers, the oldest of such an address.
    """
    connections = Connections(4, LIMIT)
    owner = Client(connections)
    owner.has_token()
    few = Client(connections, "10.0.0.1")
    many = [Client(connections, "10.0.0.2") for _ in range(4)]
    ended = [client.ended for client in (owner, few, *many)]
    assert ended == [False, False, True, True, False, False]
    for client in (few, *many[2:]):
        client.has_token()
    Client(connections, "10.0.0.3")
    assert many[2].ended and not many[3].ended
    many[3].protocol.connection_lost(None)
    Client(connections, "10.0.0.4")
    assert not few.ended and not owner.ended

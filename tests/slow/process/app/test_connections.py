"""No client keeps the server waiting: real connections that send too slowly, read
nothing, or are too many.
"""

import http.client
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.workbench.serving import SECONDS, TOKEN, Answer, Bench, linux, served

BEGUN = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = BEGUN + b"\r\n"
BODY = b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"
BEARER = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()


@pytest.fixture
def impatient(another: Callable[..., Any]) -> Iterator[Bench]:
    with another(request_seconds=0.5) as bench:
        yield bench


def closes(connection: socket.socket, drip: bytes) -> bool:
    """Whether the server closes a connection on which a byte comes now and then, or
    nothing at all; what it says before counts for nothing.
    """
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            if connection.recv(65_536) == b"":
                return True
        except TimeoutError:
            pass
        except ConnectionError:
            return True
        with suppress(ConnectionError):
            connection.sendall(drip)
    return False


def answered(bench: Bench) -> Answer:
    """An answer, sooner or later: a request that this process could not send in time is
    closed too.
    """
    while True:
        with suppress(ConnectionError, http.client.HTTPException):
            return bench.raw("GET", "/")


@pytest.mark.parametrize(
    ("begun", "drip"),
    [
        (b"", b""),  # nothing is ever sent
        (BEGUN + b"X-Slow: ", b"x"),  # headers that go on and on
        (BODY + b"\r\n", b"x"),  # refused for want of a token, and the body goes on
        (BODY + BEARER, b""),  # let in, and the body does not come
        (WHOLE + BEGUN, b""),  # a second request in the same connection
        (WHOLE + BODY + BEARER, b""),  # the same, and its body does not come
    ],
)
def test_a_request_that_never_ends_is_closed(
    impatient: Bench, begun: bytes, drip: bytes
) -> None:
    address = ("127.0.0.1", impatient.settings.port)
    with socket.create_connection(address, timeout=SECONDS) as connection:
        connection.settimeout(0.05)
        connection.sendall(begun)
        assert closes(connection, drip)
    assert answered(impatient).status == 401  # the next one is answered


def flooding(port: int) -> socket.socket:
    """Connect, send requests until no more fit into the connection, and read none of
    the answers.
    """
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(SECONDS)
    connection.connect(("127.0.0.1", port))
    connection.settimeout(0.05)
    with suppress(TimeoutError, ConnectionError):
        while True:
            connection.sendall(WHOLE * 1000)
    return connection


def is_dropped(connection: socket.socket) -> bool:
    """Whether the server closes a connection without being read from."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            connection.sendall(WHOLE)
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def test_a_client_that_reads_no_answer_is_dropped(impatient: Bench) -> None:
    with flooding(impatient.settings.port) as connection:
        assert is_dropped(connection)
    assert answered(impatient).status == 401


@linux
def test_more_clients_than_descriptors_keep_nobody_out(tmp_path: Path) -> None:
    """They send requests and read no answers, and whoever has the token still gets in."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    with served(tmp_path, "--no-open", before=limit) as server, ExitStack() as clients:
        for _ in range(200):
            clients.enter_context(flooding(server.bench.settings.port))
        assert server.bench.ask("GET", "/api/analyses").status == 200

"""A client that never ends its request is not waited for: real connections that send a byte now and then, or none."""

import http.client
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from .asking import SLOW
from .serving import SECONDS, TOKEN, Answer, Bench

LIMIT = 0.5
LONGER = 5.0  # where the request does end: a busy machine may let nobody run for longer than the other
BEGUN = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"
WHOLE = BEGUN + b"\r\n"
BODY = b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100000\r\n"
BEARER = f"Authorization: Bearer {TOKEN}\r\n\r\n".encode()


@pytest.fixture
def impatient(another: Callable[..., Any]) -> Iterator[Bench]:
    with another(request_seconds=LIMIT) as bench:
        yield bench


@pytest.fixture
def patient(another: Callable[..., Any]) -> Iterator[Bench]:
    with another(request_seconds=LONGER) as bench:
        yield bench


@contextmanager
def connected(bench: Bench) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", bench.settings.port), timeout=0.05) as connection:
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed it; what it says before counts for nothing."""
    try:
        return connection.recv(65_536) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def closes(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the server closes a connection on which a byte comes now and then, or nothing at all."""
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        if is_closed(connection):
            return True
        try:
            connection.sendall(drip)
        except ConnectionError:
            return True
    return False


@pytest.mark.parametrize(
    ("begun", "drip"),
    [
        (b"", b""),  # nothing is ever sent
        (b"", b"\r\n"),  # empty lines before a request
        (BEGUN, b""),  # headers that do not end
        (BEGUN + b"X-Slow: ", b"x"),  # and go on and on
        (BODY + b"\r\n", b"x"),  # refused for want of a token, and the body goes on
        (BODY + BEARER, b""),  # let in, and the body does not come
        (WHOLE + BEGUN, b""),  # a second request in the same connection
        (WHOLE + BODY + BEARER, b""),  # the same, and its body does not come
    ],
)
def test_a_request_that_never_ends_is_closed(impatient: Bench, begun: bytes, drip: bytes) -> None:
    with connected(impatient) as connection:
        connection.sendall(begun)
        assert closes(connection, drip)
    assert answered(impatient).status == 401  # the next one is answered


def answered(bench: Bench) -> Answer:
    """An answer, sooner or later: a request that this process could not send in time is closed too."""
    while True:
        with suppress(ConnectionError, http.client.HTTPException):
            return bench.raw("GET", "/")


def test_a_body_that_comes_in_pieces_is_waited_for(patient: Bench) -> None:
    """All of it takes longer than the limit, which is for each piece."""
    content = b'{"analysis": "nothing"}'
    head = b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    with connected(patient) as connection:
        connection.sendall(head % len(content) + BEARER)
        for place in range(len(content)):
            time.sleep(1.2 * LONGER / len(content))
            connection.sendall(content[place : place + 1])
        connection.settimeout(SECONDS)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 422")


def test_an_answer_may_take_longer_than_a_request(patient: Bench) -> None:
    """The events of a job are followed for longer than the limit, and its end is told."""
    job = patient.submit("visibility", patient.folder("models/tiny"), **SLOW | {"seed": 9}).json["id"]
    with connected(patient) as connection:
        connection.settimeout(SECONDS)
        connection.sendall(f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode() + BEARER)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        time.sleep(1.5 * LONGER)
        patient.ask("DELETE", f"/api/jobs/{job}")
        told = b""
        while b'"cancelled"' not in told:
            piece = connection.recv(65_536)
            assert piece, told[-500:]
            told += piece

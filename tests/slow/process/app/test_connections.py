"""No client keeps the server waiting: real connections that send too slowly, read
nothing, or are too many.
"""

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.slow.process.app.test_serve import started, status
from tests.workbench.asking import SLOW
from tests.workbench.serving import SECONDS, TOKEN, Answer, Bench, linux

LIMIT = 0.5
# Where the request does end: a busy machine may let nobody run for longer than the
# other.
LONGER = 5.0
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
    with socket.create_connection(
        ("127.0.0.1", bench.settings.port), timeout=SECONDS
    ) as connection:
        connection.settimeout(0.05)
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
    """Whether the server closes a connection on which a byte comes now and then, or
    nothing at all.
    """
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
def test_a_request_that_never_ends_is_closed(
    impatient: Bench, begun: bytes, drip: bytes
) -> None:
    with connected(impatient) as connection:
        connection.sendall(begun)
        assert closes(connection, drip)
    assert answered(impatient).status == 401  # the next one is answered


def answered(bench: Bench) -> Answer:
    """An answer, sooner or later: a request that this process could not send in time is
    closed too.
    """
    while True:
        with suppress(ConnectionError, http.client.HTTPException):
            return bench.raw("GET", "/")


def test_a_body_that_comes_in_pieces_is_waited_for(patient: Bench) -> None:
    """All of it takes longer than the limit, which is for each piece."""
    content = b'{"analysis": "nothing"}'
    head = (
        b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type:"
        b" application/json\r\nContent-Length: %d\r\n"
    )
    with connected(patient) as connection:
        connection.sendall(head % len(content) + BEARER)
        for place in range(len(content)):
            time.sleep(1.2 * LONGER / len(content))
            connection.sendall(content[place : place + 1])
        connection.settimeout(SECONDS)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 422")


def test_an_answer_may_take_longer_than_a_request(patient: Bench) -> None:
    """The events of a job are followed for longer than the limit, and its end is told."""
    job = patient.submit(
        "visibility", patient.folder("models/tiny"), **SLOW | {"seed": 9}
    ).json["id"]
    with connected(patient) as connection:
        connection.settimeout(SECONDS)
        connection.sendall(
            f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
            + BEARER
        )
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")
        time.sleep(1.5 * LONGER)
        patient.ask("DELETE", f"/api/jobs/{job}")
        told = b""
        while b'"cancelled"' not in told:
            piece = connection.recv(65_536)
            assert piece, told[-500:]
            told += piece


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


def test_a_client_that_reads_slowly_gets_all_of_its_answers(
    another: Callable[..., Any],
) -> None:
    """What it takes now and then is enough, though reading everything takes longer than
    the limit.
    """
    limit = 2 * LONGER
    with another(request_seconds=limit) as bench:
        assert read_slowly(bench, 3000, 1.2 * limit).count(b"HTTP/1.1 401") == 3000


def read_slowly(bench: Bench, count: int, seconds: float) -> bytes:
    """Send so many requests at once, and take so long to read the answers."""
    asked = BEGUN + b"Connection: keep-alive\r\n\r\n"
    last = BEGUN + b"Connection: close\r\n\r\n"
    received = b""
    with socket.create_connection(("127.0.0.1", bench.settings.port)) as connection:
        connection.settimeout(SECONDS)
        sender = threading.Thread(
            target=connection.sendall, args=(asked * (count - 1) + last,)
        )
        sender.start()
        begun = time.monotonic()
        while piece := connection.recv(2**16):
            received += piece
            if time.monotonic() - begun < seconds:
                time.sleep(0.2)
        sender.join()
    return received


@linux
def test_more_clients_than_descriptors_keep_nobody_out(tmp_path: Path) -> None:
    """They send requests and read no answers, and whoever has the token still gets in."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"
    process, told = started(tmp_path, before=limit)
    port = int(told["address"].rstrip("/").rpartition(":")[2])
    try:
        with ExitStack() as clients:
            for _ in range(200):
                clients.enter_context(flooding(port))
            assert (
                status(port, "/api/analyses", Authorization=f"Bearer {told['token']}")
                == 200
            )
    finally:
        process.kill()
        process.communicate()


def test_a_crowd_without_the_token_closes_no_connection_that_has_it(
    another: Callable[..., Any],
) -> None:
    with another(connections=4) as small, ExitStack() as crowd:
        job = small.submit(
            "visibility", small.folder("models/tiny"), **SLOW | {"seed": 10}
        ).json["id"]
        events = crowd.enter_context(connected(small))
        events.settimeout(SECONDS)
        events.sendall(
            f"GET /api/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n".encode()
            + BEARER
        )
        assert events.recv(65_536).startswith(b"HTTP/1.1 200")
        idle = [crowd.enter_context(connected(small)) for _ in range(20)]
        for connection in idle[:16]:
            assert closes(connection)
        small.ask("DELETE", f"/api/jobs/{job}")
        told = b""
        while b'"cancelled"' not in told:
            piece = events.recv(65_536)
            assert piece, told[-500:]
            told += piece

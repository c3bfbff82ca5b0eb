"""Nobody gets in who does not belong: requests with the headers that an attacker can
have a browser send.
"""

from typing import Any

import pytest
from starlette.exceptions import HTTPException

from hiddenscope.app.guard import Guard
from hiddenscope.app.settings import Settings
from tests.workbench.inside import requested, run_apart
from tests.workbench.serving import TOKEN, Answer

HOST = ("Host", "127.0.0.1:8765")
COOKIE = ("Cookie", f"a=b; hiddenscope-8765={TOKEN}")
BEARER = ("Authorization", f"Bearer {TOKEN}")
ORIGIN = ("Origin", "http://127.0.0.1:8765")
ROOM = 100


async def read_all(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the body, and says what it has let in."""
    more = True
    while more:
        more = (await receive())["more_body"]
    own = [(b"content-security-policy", b"sandbox")] if scope["path"] == "/file" else []
    await send({"type": "http.response.start", "status": 200, "headers": own})
    await send({"type": "http.response.body", "body": b"let in"})


class Door:
    """A guard, and requests to it with exactly these headers."""

    def __init__(self, **options: Any) -> None:
        limits = {"request_bytes": ROOM, "upload_bytes": 2 * ROOM}
        settings = Settings(token=TOKEN, ticket="a-ticket", **limits, **options)
        self.guard = Guard(read_all, settings)

    def ask(
        self,
        path: str,
        *headers: tuple[str, str],
        method: str = "GET",
        pieces: tuple[bytes, ...] = (),
    ) -> Answer:
        asked = requested(self.guard, method, path, list(headers), list(pieces))
        return run_apart(asked)

    def status(self, path: str, *headers: tuple[str, str], **options: Any) -> int:
        return self.ask(path, *headers, **options).status


def test_the_first_visit_moves_the_token_into_a_cookie() -> None:
    door = Door()
    answer = door.ask(f"/?token={TOKEN}&x=1", HOST)
    assert (answer.status, answer.headers["location"]) == (303, "/?x=1")
    assert answer.headers["set-cookie"] == (
        f"hiddenscope-8765={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    )
    assert door.ask(f"/?token={TOKEN}", HOST).headers["location"] == "/"
    assert door.status("/", HOST, COOKIE) == door.status("/", HOST, BEARER) == 200


def test_the_ticket_of_a_browser_is_good_for_one_visit() -> None:
    """A browser is started with it, and everybody on the machine can read its
    arguments.
    """
    door = Door()
    assert door.status("/api/models", HOST, ("Authorization", "Bearer a-ticket")) == 401
    for method in ("HEAD", "POST", "OPTIONS", "HEAD"):  # none of them is a visit
        answer = door.ask("/?token=a-ticket", HOST, method=method)
        assert answer.status == 401 and "set-cookie" not in answer.headers
    first = door.ask("/?token=a-ticket", HOST)
    assert first.status == 303 and TOKEN in first.headers["set-cookie"]
    again = door.ask("/?token=a-ticket", HOST)
    assert again.status == 401 and "set-cookie" not in again.headers


def test_without_the_token_nothing_is_served() -> None:
    door = Door()
    for path in ("/", "/?token=wrong", "/?token=", f"/?token={TOKEN}x"):
        answer = door.ask(path, HOST)
        assert answer.status == 401 and "set-cookie" not in answer.headers
        assert b"hiddenscope serve" in answer.body
    for wrong in (
        ("X", "y"),
        ("Authorization", "Bearer wrong"),
        ("Authorization", TOKEN),
        ("Authorization", f"Basic {TOKEN}"),
        ("Cookie", "a=b"),
        ("Cookie", f"hiddenscope-1={TOKEN}"),  # that of another port
        ("Cookie", f"hiddenscope-8765={TOKEN}x"),
    ):
        for path in ("/api/models", "/app/static/index.html", "/nothing", "//"):
            assert door.status(path, HOST, wrong) == 401, (path, wrong)


def test_a_rebound_host_gets_nothing() -> None:
    """A name that an attacker has resolve to this machine: the browser sends the
    attacker's name as the Host.
    """
    door = Door()
    foreign = "evil.example 127.0.0.1.evil.example localhost.evil.example"
    foreign += " evil.example:8765 127.0.0.1@evil.example 0.0.0.0 0x7f.0.0.1 127.1"
    foreign += " 2130706433 192.168.0.1 [::2] [::1 localhost:99999 localhost:x"
    for host in (*foreign.split(), "", "local host", "localhost#"):
        for path in ("/", f"/?token={TOKEN}", "/api/models"):
            answer = door.ask(path, ("Host", host), COOKIE)
            assert answer.status == 421 and "set-cookie" not in answer.headers, host
    assert door.status("/api/models", COOKIE) == 421
    assert door.status("/api/models", HOST, HOST, COOKIE) == 421
    own = "localhost localhost:9 127.0.0.1 127.8.8.8:80 [::1]:8765 LOCALHOST"
    for host in (*own.split(), "localhost:65535"):
        assert door.status("/api/models", ("Host", host), COOKIE) == 200, host


def test_others_reach_a_remote_workbench_by_its_name_or_an_address_in_digits() -> None:
    """An attacker can rebind a name, but not an address."""
    door = Door(remote=True, host="lab.example")
    for host, status in {
        "LAB.example:8765": 200,
        "192.168.0.1:8765": 200,
        "[fe80::1]": 200,
        "evil.example": 421,
        "192.168.0.1.evil.example": 421,
    }.items():
        assert door.status("/api/models", ("Host", host), COOKIE) == status, host


def test_a_page_of_another_origin_gets_nothing() -> None:
    """Even with the cookie, which SameSite=Strict withholds from other sites but not
    from other ports.
    """
    door = Door()
    own = "127.0.0.1:8765"
    foreign = "http://evil.example null http://127.0.0.1:1 http://localhost:8765"
    for origin in (*foreign.split(), f"https://{own}", "", f"http://{own}@evil", "//["):
        headers = HOST, ("Origin", origin), COOKIE
        for method, path in (
            ("POST", "/api/jobs"),
            ("DELETE", "/api/jobs/x"),
            ("GET", "/api/jobs/x/events"),
            ("GET", "/api/models"),
        ):
            assert door.status(path, *headers, method=method) == 403, (origin, method)
        answer = door.ask("/api/jobs", *headers, method="OPTIONS")
        assert "access-control-allow-origin" not in answer.headers
    other = ("Origin", "http://evil.example")
    assert door.status("/api/models", HOST, ORIGIN, other, BEARER) == 403
    for site in ("cross-site", "same-site"):
        marked = ("Sec-Fetch-Site", site)
        for path in ("/api/models", "/app/static/index.html", "/api/jobs/x/events"):
            assert door.status(path, HOST, marked, COOKIE) == 403
        assert door.status("/", HOST, marked, COOKIE, method="POST") == 403
        # A link on another site may lead to the page.
        assert door.status("/", HOST, marked, COOKIE) == 200


def test_a_change_by_cookie_needs_an_origin() -> None:
    door = Door()
    for more in (
        (),
        (("Authorization", "Basic x"),),
        (("Authorization", "Bearer wrong"),),
    ):
        assert door.status("/api/jobs/x", HOST, COOKIE, *more, method="DELETE") == 403
    own = HOST, COOKIE, ORIGIN, ("Sec-Fetch-Site", "same-origin")
    assert door.status("/api/jobs/x", *own, method="DELETE") == 200
    assert door.status("/api/jobs/x", HOST, BEARER, method="DELETE") == 200
    assert door.status("/api/models", HOST, COOKIE, method="HEAD") == 200


def test_every_answer_has_a_strict_policy() -> None:
    door = Door()
    for path in ("/", "/api/models", f"/?token={TOKEN}", "/file"):
        for headers in ((HOST, COOKIE), (HOST,), (COOKIE,)):
            told = door.ask(path, *headers).headers
            policy = told["content-security-policy"]
            # That of the application itself is kept.
            if policy != "sandbox":
                own = "default-src 'none'; script-src 'self'; style-src 'self';"
                assert policy.startswith(own) and "frame-ancestors 'none'" in policy
                assert "unsafe" not in policy
            assert told["x-content-type-options"] == "nosniff"
            assert told["referrer-policy"] == "no-referrer"
            assert told["cache-control"] == "no-store"
            assert "access-control-allow-origin" not in told


def test_a_body_that_is_too_large_is_cut_off() -> None:
    door = Door()
    for path, most in (("/api/jobs", ROOM), ("/api/datasets", 2 * ROOM)):
        pieces = b"x" * 60, b"x" * (most - 60)
        assert door.status(path, HOST, BEARER, method="POST", pieces=pieces) == 200
        with pytest.raises(HTTPException, match=f"at most {most} bytes") as refused:
            door.ask(path, HOST, BEARER, method="POST", pieces=(*pieces, b"x"))
        assert refused.value.status_code == 413


def test_what_is_no_request_is_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    run_apart(Door().guard({"type": "websocket"}, None, send))  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]

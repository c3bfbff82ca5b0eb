"""Nobody gets in who does not belong: real requests with the headers that an attacker
can have a browser send.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.workbench.serving import TOKEN, Bench

JOB = b'{"analysis":"grid","model":{"name":"smollm2"},"arguments":{"text":"x"}}'
JSON = {"Content-Type": "application/json"}


def cookie(bench: Bench) -> dict[str, str]:
    return {"Cookie": f"{bench.settings.cookie}={TOKEN}"}


def test_the_first_visit_moves_the_token_into_a_cookie(bench: Bench) -> None:
    answer = bench.raw("GET", f"/?token={TOKEN}&x=1")
    assert answer.status == 303
    assert answer.headers["location"] == "/?x=1"
    kept = answer.headers["set-cookie"]
    assert kept == f"{bench.settings.cookie}={TOKEN}; Path=/; HttpOnly; SameSite=Strict"
    assert bench.raw("GET", "/", cookie(bench)).status == 200


def test_the_ticket_of_a_browser_is_good_for_one_visit(
    another: Callable[..., Any],
) -> None:
    """A browser is started with it, and its arguments can be read by everybody on the
    machine.
    """
    with another(ticket="a-ticket") as bench:
        assert (
            bench.raw(
                "GET", "/api/analyses", {"Authorization": "Bearer a-ticket"}
            ).status
            == 401
        )
        for method in ("HEAD", "POST", "OPTIONS", "HEAD"):  # none of them is a visit
            answer = bench.raw(method, "/?token=a-ticket")
            assert answer.status in (401, 403) and "set-cookie" not in answer.headers
        first = bench.raw("GET", "/?token=a-ticket")
        assert first.status == 303 and TOKEN in first.headers["set-cookie"]
        again = bench.raw("GET", "/?token=a-ticket")
        assert again.status == 401 and "set-cookie" not in again.headers


@pytest.mark.parametrize(
    "path", ["/", "/?token=wrong", "/?token=", f"/?token={TOKEN}x"]
)
def test_without_the_token_there_is_a_page_that_says_what_to_do(
    bench: Bench, path: str
) -> None:
    answer = bench.raw("GET", path)
    assert answer.status == 401
    assert b"hiddenscope serve" in answer.body and "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/api/models",
        "/api/openapi.json",
        "/app/static/index.html",
        "/views/static/grid.js",
        "/nothing",
        "//",
    ],
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": TOKEN},
        {"Cookie": "a=b"},
    ],
)
def test_without_the_token_nothing_is_served(
    bench: Bench, path: str, headers: dict[str, str]
) -> None:
    assert bench.raw("GET", path, headers).status == 401


def test_the_cookie_of_another_port_is_not_ours(bench: Bench) -> None:
    assert (
        bench.raw("GET", "/api/models", {"Cookie": f"hiddenscope-1={TOKEN}"}).status
        == 401
    )


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example:8765",
        "127.0.0.1@evil.example",
        "0.0.0.0",
        "0x7f.0.0.1",
        "127.1",
        "2130706433",
        "192.168.0.1",
        "[::2]",
        "[::1",
        "localhost:99999",
        "localhost:x",
        "",
        "local host",
        "localhost#",
    ],
)
def test_a_rebound_host_gets_nothing(bench: Bench, host: str) -> None:
    """A name that an attacker has resolve to this machine: the browser sends the
    attacker's name as the Host.
    """
    for path in ("/", f"/?token={TOKEN}", "/api/models"):
        answer = bench.raw("GET", path, {"Host": host, **cookie(bench)})
        assert answer.status in (400, 421)
        assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9",
        "127.0.0.1",
        "127.8.8.8:80",
        "[::1]:8765",
        "LOCALHOST",
    ],
)
def test_names_of_this_machine_are_welcome(bench: Bench, host: str) -> None:
    assert (
        bench.raw("GET", "/api/models", {"Host": host, **cookie(bench)}).status == 200
    )


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        "https://{netloc}",
        "http://localhost:{port}",
        "",
    ],
)
def test_a_page_of_another_origin_gets_nothing(bench: Bench, origin: str) -> None:
    """Even with the cookie, which SameSite=Strict withholds from other sites but not
    from other ports.
    """
    own = {
        "Origin": origin.format(netloc=bench.netloc, port=bench.settings.port),
        **cookie(bench),
        **JSON,
    }
    assert bench.raw("POST", "/api/jobs", own, JOB).status == 403
    assert bench.raw("DELETE", "/api/jobs/x", own).status == 403
    assert bench.raw("GET", "/api/jobs/x/events", own).status == 403
    assert bench.raw("GET", "/api/models", own).status == 403
    assert (
        "access-control-allow-origin"
        not in bench.raw("OPTIONS", "/api/jobs", own).headers
    )


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_request_that_a_browser_marks_as_foreign_gets_nothing(
    bench: Bench, site: str
) -> None:
    for path in ("/api/models", "/app/static/index.html", "/api/jobs/x/events"):
        assert (
            bench.raw("GET", path, {"Sec-Fetch-Site": site, **cookie(bench)}).status
            == 403
        )


def test_a_change_by_cookie_needs_an_origin(bench: Bench) -> None:
    assert bench.raw("DELETE", "/api/jobs/x", cookie(bench)).status == 403
    for other in ("Basic x", "Bearer wrong"):
        assert (
            bench.raw(
                "DELETE", "/api/jobs/x", {"Authorization": other, **cookie(bench)}
            ).status
            == 403
        )
    own = {
        "Origin": f"http://{bench.netloc}",
        "Sec-Fetch-Site": "same-origin",
        **cookie(bench),
    }
    # Let in, and there is no such job.
    assert bench.raw("DELETE", "/api/jobs/x", own).status == 404


def test_two_hosts_or_two_origins_are_none(bench: Bench) -> None:
    import socket

    lines = (
        f"GET /api/models HTTP/1.1\r\nHost: {bench.netloc}\r\nOrigin:"
        f" http://{bench.netloc}\r\n"
    )
    lines += (
        f"Origin: http://evil.example\r\nAuthorization: Bearer {TOKEN}\r\nConnection:"
        " close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", bench.settings.port), 300) as line:
        line.sendall(lines.encode())
        assert b" 403 " in line.makefile("rb").readline()


def test_every_answer_has_a_strict_policy(bench: Bench) -> None:
    for path in ("/", "/api/models", "/app/static/index.html", "/nothing"):
        headers = bench.raw("GET", path, cookie(bench)).headers
        policy = headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self';"
        )
        assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert (
            headers["x-content-type-options"] == "nosniff"
            and headers["referrer-policy"] == "no-referrer"
        )
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers and "access-control-allow-origin" not in headers


def test_a_request_that_is_too_large_is_refused_unread(bench: Bench) -> None:
    own = {"Authorization": f"Bearer {TOKEN}", **JSON}
    answer = bench.raw("POST", "/api/jobs", own | {"Content-Length": "99999999999"})
    assert answer.status == 413 and "too large" in answer.json["detail"]
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    body = chunk * 80 + b"0\r\n\r\n"
    assert (
        bench.raw(
            "POST", "/api/jobs", own | {"Transfer-Encoding": "chunked"}, body
        ).status
        == 413
    )


def test_paths_lead_nowhere(bench: Bench) -> None:
    for path in (
        "/app/static/../__init__.py",
        "/app/static/%2e%2e%2f__init__.py",
        "/app/static/..%5c",
        "/x/static/y",
    ):
        assert bench.ask("GET", path).status == 404

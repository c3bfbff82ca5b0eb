"""Guard: a layer around the whole application that every request must pass.

Host    must be a loopback name or address, parsed: a name that an attacker rebinds to
        this machine reaches nothing
token   in the link of the first visit, then in a SameSite=Strict, HttpOnly cookie;
        programs send it as a bearer
ticket  replaces the token in the link that a browser is started with; good for one
        visit
Origin  must be this page, for everything that changes something and for streams; other
        sites and ports are refused
size    a body is cut off where it becomes too large

Every answer carries a strict content security policy. There is no CORS.

>>> parse_host("127.0.0.1:8765"), parse_host("[::1]"), parse_host("localhost:x")
(('127.0.0.1', 8765), ('::1', None), None)
>>> is_loopback("127.0.0.1"), is_loopback("localhost")
(True, True)
>>> is_loopback("127.0.0.1.evil.example"), is_loopback("0x7f.1")
(False, False)
"""

import hashlib
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hiddenscope.app.settings import Settings

CHANGES_NOTHING = {"GET", "HEAD"}
# What Sec-Fetch-Site says of a request of the page itself, or of an address that was
# typed.
TRUSTED_SITES = {"same-origin", "none"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:"
    " blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors"
    " 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}
DOORSTEP = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>hiddenscope</title>\n'
    "<h1>This page is private</h1>\n"
    "<p>Open the link that <code>hiddenscope serve</code> printed in your terminal: it"
    " holds a token.</p>\n"
    '<p>If you have just done that, <a href="/">continue</a>.</p></html>\n'
)
NO_TOKEN = (
    "No token: open the link that `hiddenscope serve` printed, or send it as"
    " `Authorization: Bearer TOKEN`."
)

_IPV6 = re.compile(r"\[([0-9a-fA-F:.]{2,45})\](?::([0-9]{1,5}))?")
_NAME = re.compile(r"([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?")


class Guard:
    """The application, behind its guard."""

    def __init__(self, application: ASGIApp, settings: Settings) -> None:
        self.application = application
        self.settings = settings
        self._token_digest = _digest(settings.token)
        self._ticket_digest: bytes | None = _digest(settings.ticket)
        self._machine_names = {settings.host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, answer it at the door, or refuse it."""
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        every = Headers(scope=scope)
        headers = {}
        for name in set(every.keys()):
            values = every.getlist(name)
            # One that comes twice counts as malformed.
            headers[name] = values[0] if len(values) == 1 else ""
        # The order matters: nothing is said about tokens to a request that was meant
        # for another machine or comes from another site.
        answer = (
            self._check_host(headers)
            or self._check_site(scope, headers)
            or self._welcome(scope, headers)
        )
        if answer is None and not self._has_token(headers):
            answer = problem(401, NO_TOKEN)
        application = answer or self.application
        await application(scope, self._limit_body(receive, scope), _add_headers(send))

    def _check_host(self, headers: Mapping[str, str]) -> Response | None:
        """Refuse a request whose Host header names another machine."""
        host = parse_host(headers.get("host", ""))
        if host is not None:
            name = host[0]
            # Any address in digits will do from outside: an attacker can rebind a name,
            # but not an address.
            is_ours = name in self._machine_names or _parse_address(name) is not None
            if is_loopback(name) or (self.settings.remote and is_ours):
                return None
        return problem(
            421,
            "The Host header names another machine. Open the page as http://127.0.0.1"
            " or localhost.",
        )

    def _check_site(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """Refuse what another site, or a page on another port, is behind."""
        origin = headers.get("origin")
        changes_nothing = scope["method"] in CHANGES_NOTHING
        # A link on another site may lead to the page itself.
        is_visit = scope["path"] == "/" and changes_nothing
        site = headers.get("sec-fetch-site", "none")
        foreign = origin is not None and not _is_same(origin, headers["host"])
        if foreign or (site not in TRUSTED_SITES and not is_visit):
            return problem(
                403,
                "Another site may not ask this: the request does not come from the"
                " workbench's page.",
            )
        # A browser sends the cookie by itself, but it also sends an Origin with
        # everything that changes something. A bearer is sent by a program.
        if changes_nothing or origin is not None or self._has_bearer(headers):
            return None
        if not self._has_cookie(headers):
            return None
        return problem(
            403,
            "A request that changes something needs an Origin header, as browsers"
            " send it.",
        )

    def _welcome(self, scope: Scope, headers: Mapping[str, str]) -> Response | None:
        """Move the token of the first visit from the link into a cookie.

        Without a token in either, answer with a page that says what to do.
        """
        if scope["path"] != "/" or scope["method"] not in CHANGES_NOTHING:
            return None
        query = parse_qsl(
            scope["query_string"].decode("latin-1"), keep_blank_values=True
        )
        tokens = [value for name, value in query if name == "token"]
        if not tokens and self._has_token(headers):
            return None
        if not tokens or not self._accepts(scope, tokens[-1]):
            return HTMLResponse(DOORSTEP, 401)
        rest = [(name, value) for name, value in query if name != "token"]
        location = f"/?{urlencode(rest)}" if rest else "/"
        cookie = (
            f"{self.settings.cookie}={self.settings.token}; Path=/; HttpOnly;"
            " SameSite=Strict"
        )
        return Response(b"", 303, {"location": location, "set-cookie": cookie})

    def _accepts(self, scope: Scope, secret: str) -> bool:
        """Return whether a link has the token, or the ticket, which is then used up."""
        if self._is_token(secret):
            return True
        # A HEAD request is not a visit: it neither uses the ticket up nor gets the
        # token for it.
        if self._ticket_digest is None or scope["method"] != "GET":
            return False
        if not hmac.compare_digest(_digest(secret), self._ticket_digest):
            return False
        self._ticket_digest = None
        return True

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        return self._has_bearer(headers) or self._has_cookie(headers)

    def _has_cookie(self, headers: Mapping[str, str]) -> bool:
        for cookie in headers.get("cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == self.settings.cookie and self._is_token(value):
                return True
        return False

    def _has_bearer(self, headers: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(bearer.strip())

    def _is_token(self, secret: str) -> bool:
        return hmac.compare_digest(_digest(secret), self._token_digest)

    def _limit_body(self, receive: Receive, scope: Scope) -> Receive:
        """Cut off a body that is too long."""
        max_bytes = self.settings.request_bytes
        if scope["path"] == "/api/datasets":
            max_bytes = self.settings.upload_bytes
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise HTTPException(
                    413,
                    f"The request is too large: at most {max_bytes:,} bytes. Send less,"
                    " or use Python on the files themselves.",
                )
            return message

        return limited


def parse_host(header: str) -> tuple[str, int | None] | None:
    """Return the host and the port of a Host header, or None where it is malformed."""
    match = _IPV6.fullmatch(header) or _NAME.fullmatch(header)
    if match is None:
        return None
    name = match[1].lower()
    if match[2] is None:
        return name, None
    port = int(match[2])
    return (name, port) if port <= 65_535 else None


def is_loopback(name: str) -> bool:
    """Return whether a host is `localhost` or a loopback address in standard form."""
    address = _parse_address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def problem(
    status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an answer that says in a sentence why a request is refused."""
    # Half a surrogate pair, which JSON may hold, cannot be encoded.
    safe = message.encode("utf-8", "backslashreplace").decode("utf-8")
    body = json.dumps({"detail": safe})
    return Response(body, status, headers, media_type="application/json")


def _parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _is_same(origin: str, host: str) -> bool:
    """Return whether an origin is the page at this host."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    expected = parse_host(host)
    if expected is None or parts.scheme != "http":
        return False
    return parse_host(parts.netloc) == expected


def _digest(secret: str) -> bytes:
    # Digests have one length, so that comparing them takes the same time for all.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def _add_headers(send: Send) -> Send:
    """Add our headers to those of the application, which come first."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await send(message)

    return send_with_headers

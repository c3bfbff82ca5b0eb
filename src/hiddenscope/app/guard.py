"""Guard: nobody gets in who does not belong. A layer around the whole application;
every request passes it.

Host      must be a loopback name or address, parsed: so a name that is rebound to this machine reaches nothing
token     in the link of the first visit, then in a SameSite=Strict, HttpOnly cookie; programs send it as a bearer
ticket    in its place in the link that a browser is started with; good for one visit
Origin    must be this page, for everything that changes something and for streams; other sites and ports are refused
size      a request that is too large is refused before it is read

Every answer carries a strict content security policy. There is no CORS.

>>> host_of("127.0.0.1:8765"), host_of("[::1]"), host_of("localhost:x")
(('127.0.0.1', 8765), ('::1', None), None)
>>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("127.0.0.1.evil.example"), is_loopback("0x7f.1")
(True, True, False, False)
"""

import hashlib
import hmac
import ipaddress
import json
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.exceptions import HTTPException

from hiddenscope.app.settings import Settings

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

# The key that marks the scope of a request that had the token.
ADMITTED = "hiddenscope.admitted"
CHANGES_NOTHING = {"GET", "HEAD"}
OWN = {"same-origin", "none"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:"
    " blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors"
    " 'none'; require-trusted-types-for 'script'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
)
DOORSTEP = """<!doctype html><html lang="en"><meta charset="utf-8"><title>hiddenscope</title>
<h1>This page is private</h1>
<p>Open the link that <code>hiddenscope serve</code> printed in your terminal: it holds a token.</p>
<p>If you have just done that, <a href="/">continue</a>.</p></html>
"""
NO_TOKEN = (
    "No token: open the link that `hiddenscope serve` printed, or send it as"
    " `Authorization: Bearer TOKEN`."
)

_SIX = re.compile(r"\[([0-9a-fA-F:.]{2,45})\](?::([0-9]{1,5}))?")
_NAME = re.compile(r"([A-Za-z0-9.-]{1,253})(?::([0-9]{1,5}))?")


class Refusal(NamedTuple):
    """A status, and the sentence that says why."""

    status: int
    reason: str


class Guard:
    """The application, behind its guard."""

    worker: Any = None

    def __init__(self, application: Application, settings: Settings) -> None:
        self.application, self.settings = application, settings
        self._digest = _digest(settings.token)
        self._ticket: bytes | None = _digest(settings.ticket)
        self._names = (
            {settings.host.lower(), socket.gethostname().lower()}
            if settings.remote
            else set()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, answer it at the door, or refuse it."""
        if scope["type"] == "lifespan":
            await self.application(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _Headers(scope["headers"])
        refusal = self._host(headers) or self._site(scope, headers)
        if refusal is None and (answered := self._doorstep(scope, headers)) is not None:
            await _answer(send, *answered)
            return
        refusal = refusal or self._entry(scope, headers) or self._size(scope, headers)
        if refusal is not None:
            await _answer(
                send, refusal.status, json.dumps({"detail": refusal.reason}).encode()
            )
            return
        await self.application(
            scope, self._counted(receive, scope), _with_headers(send, scope)
        )

    def _host(self, headers: "_Headers") -> Refusal | None:
        """Whether the request was meant for this machine, by the one name that a
        browser was given.
        """
        named = host_of(headers.one("host") or "")
        if named is None or not (is_loopback(named[0]) or self._is_own(named[0])):
            return Refusal(
                421,
                "The Host header names another machine. Open the page as"
                " http://127.0.0.1 or localhost.",
            )
        return None

    def _is_own(self, name: str) -> bool:
        """With another address than loopback: that address, this machine's name, or any
        address in digits.

        A name that an attacker rebinds is a name; an address in digits cannot be
        rebound.
        """
        return self.settings.remote and (
            name in self._names or _address(name) is not None
        )

    def _site(self, scope: Scope, headers: "_Headers") -> Refusal | None:
        """Whether another site, or a page on another port of this machine, is behind
        the request.
        """
        origin, site = headers.one("origin"), headers.one("sec-fetch-site")
        refusal = Refusal(
            403,
            "Another site may not ask this: the request does not come from the"
            " workbench's page.",
        )
        if headers.many("origin") > 1 or (
            origin is not None and not _same(origin, headers.one("host") or "")
        ):
            return refusal
        arriving = scope["path"] == "/" and scope["method"] in CHANGES_NOTHING
        if site is not None and site not in OWN and not arriving:
            return refusal
        changes = scope["method"] not in CHANGES_NOTHING
        if (
            changes
            and origin is None
            and self._has_token(headers)
            and not self._is_bearer(headers)
        ):
            return Refusal(
                403,
                "A request that changes something needs an Origin header, as browsers"
                " send it.",
            )
        return None

    def _doorstep(
        self, scope: Scope, headers: "_Headers"
    ) -> tuple[int, bytes, list[tuple[bytes, bytes]]] | None:
        """The first visit: the token moves from the link into a cookie. Without either,
        a page says what to do.
        """
        if scope["path"] != "/" or scope["method"] not in CHANGES_NOTHING:
            return None
        query = parse_qsl(
            scope["query_string"].decode("latin-1"), keep_blank_values=True
        )
        given = [value for name, value in query if name == "token"]
        if given and (
            self._is_token(given[-1]) or self._takes_ticket(scope, given[-1])
        ):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            cookie = (
                f"{self.settings.cookie}={self.settings.token}; Path=/; HttpOnly;"
                " SameSite=Strict"
            )
            place = f"/?{rest}" if rest else "/"
            return (
                303,
                b"",
                [
                    (b"location", place.encode("latin-1", "replace")),
                    (b"set-cookie", cookie.encode()),
                ],
            )
        if given or not self._has_token(headers):
            return (
                401,
                DOORSTEP.encode(),
                [(b"content-type", b"text/html; charset=utf-8")],
            )
        return None

    def _takes_ticket(self, scope: Scope, ticket: str) -> bool:
        """Take the ticket of the browser that was started, which is good for one visit."""
        # A HEAD request is no visit: it neither uses the ticket up nor gets the token
        # for it.
        if self._ticket is None or scope["method"] != "GET":
            return False
        is_right = hmac.compare_digest(_digest(ticket), self._ticket)
        if is_right:
            self._ticket = None
        return is_right

    def _entry(self, scope: Scope, headers: "_Headers") -> Refusal | None:
        if not self._has_token(headers):
            return Refusal(401, NO_TOKEN)
        scope[ADMITTED] = True
        return None

    def _has_token(self, headers: "_Headers") -> bool:
        if self._is_bearer(headers):
            return True
        pairs = (
            piece.strip().partition("=")
            for piece in (headers.one("cookie") or "").split(";")
        )
        return any(
            name == self.settings.cookie and self._is_token(value)
            for name, _, value in pairs
        )

    def _is_bearer(self, headers: "_Headers") -> bool:
        """Whether a program sends the token itself; a browser adds no such header by
        itself.
        """
        scheme, _, bearer = (headers.one("authorization") or "").partition(" ")
        return scheme.lower() == "bearer" and self._is_token(bearer.strip())

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(_digest(given), self._digest)

    def _most(self, scope: Scope) -> int:
        return (
            self.settings.upload_bytes
            if scope["path"] == "/api/datasets"
            else self.settings.request_bytes
        )

    def _size(self, scope: Scope, headers: "_Headers") -> Refusal | None:
        length = headers.one("content-length")
        if length is not None and (
            not length.isdecimal() or int(length[:20]) > self._most(scope)
        ):
            return Refusal(413, _too_large(self._most(scope)))
        return None

    def _counted(self, receive: Receive, scope: Scope) -> Receive:
        """A body that does not say how long it is, cut off where it is too long."""
        most, seen = self._most(scope), 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > most:
                raise HTTPException(413, _too_large(most))
            return message

        return counted


class _Headers:
    """The headers of a request; one that comes twice is none."""

    def __init__(self, pairs: Any) -> None:
        self._pairs = [
            (name.decode("latin-1").lower(), value.decode("latin-1"))
            for name, value in pairs
        ]

    def many(self, name: str) -> int:
        return sum(known == name for known, _ in self._pairs)

    def one(self, name: str) -> str | None:
        values = [value for known, value in self._pairs if known == name]
        return values[0] if len(values) == 1 else None


def host_of(header: str) -> tuple[str, int | None] | None:
    """The host and the port of a Host header; None where it is no such thing."""
    match = _SIX.fullmatch(header) or _NAME.fullmatch(header)
    if match is None or (match[2] is not None and int(match[2]) > 65_535):
        return None
    return match[1].lower(), None if match[2] is None else int(match[2])


def is_loopback(name: str) -> bool:
    """Whether a host is this machine itself: `localhost`, or a loopback address as the
    standard writes it.
    """
    address = _address(name)
    return name == "localhost" or (address is not None and address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def _same(origin: str, host: str) -> bool:
    """Whether an origin is the page at this host."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme == "http" and host_of(parts.netloc) == host_of(host) is not None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _too_large(most: int) -> str:
    return (
        f"The request is too large: at most {most:,} bytes. Send less, or use Python on"
        " the files themselves."
    )


async def _answer(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    own = headers or [(b"content-type", b"application/json")]
    fixed = [
        *own,
        *HEADERS,
        (b"cache-control", b"no-store"),
        (b"content-length", str(len(body)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": fixed})
    await send({"type": "http.response.body", "body": body})


def _with_headers(send: Send, scope: Scope) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {name.lower() for name, _ in message.get("headers", ())}
            extra = [
                pair
                for pair in (*HEADERS, (b"cache-control", b"no-store"))
                if pair[0] not in known
            ]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await send(message)

    return sent

"""A running workbench, and a client that speaks plain HTTP to it, so that every header
is its own.
"""

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hiddenscope as hs
import hiddenscope.app as app

if sys.platform == "linux":
    import resource

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux limits another process"
)
TOKEN = "a-token-for-tests"
SECONDS = 300.0  # a busy machine starts a worker in minutes


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Bench:
    """A workbench that runs in a thread of the test."""

    settings: app.Settings
    guard: Any

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self.settings.port}"

    @property
    def worker(self) -> Any:
        return self.guard.worker

    def raw(
        self,
        method: str,
        path: str,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
    ) -> Answer:
        """A request with these headers and no others."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.settings.port, timeout=SECONDS
        )
        try:
            connection.putrequest(
                method, path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in {"Host": self.netloc, **(headers or {})}.items():
                connection.putheader(name, value)
            if body is not None and "Transfer-Encoding" not in (headers or {}):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(
                response.status,
                {k.lower(): v for k, v in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """A request of a program that has the token."""
        content = (
            body
            if isinstance(body, bytes) or body is None
            else json.dumps(body).encode()
        )
        own = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        return self.raw(method, path, own | headers, content)

    def submit(self, analysis: str, model: str, **arguments: Any) -> Answer:
        request = {
            "analysis": analysis,
            "model": {"name": model},
            "arguments": arguments,
        }
        return self.ask("POST", "/api/jobs", request)

    def wait(self, job: str, *states: str) -> dict[str, Any]:
        """Poll until a job is in one of these states, or over."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            said: dict[str, Any] = self.ask("GET", f"/api/jobs/{job}").json
            if said["state"] in (states or ("done", "failed", "cancelled")):
                return said
            time.sleep(0.02)
        raise AssertionError(f"still {said}")

    def answer(self, analysis: str, model: str, **arguments: Any) -> dict[str, Any]:
        """The result of a question, waited for."""
        submitted = self.submit(analysis, model, **arguments)
        assert submitted.status in (200, 202), submitted.body
        said = self.wait(submitted.json["id"])
        assert said["state"] == "done", said
        answered: dict[str, Any] = self.ask(
            "GET", f"/api/results/{said['result']}"
        ).json
        return answered

    def folder(self, label: str) -> str:
        """The opaque name of a model's folder."""
        return str(
            next(
                one["name"]
                for one in self.ask("GET", "/api/models").json
                if one["label"] == label
            )
        )


def running(folder: Path, **options: Any) -> Iterator[Bench]:
    # So that nobody else can have the port.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = settings_in(folder, port=listener.getsockname()[1], **options)
        server = app.server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield Bench(settings, server.config.app)
        finally:
            server.should_exit = True
            thread.join(SECONDS)


@contextmanager
def limited(pid: int, which: int, most: int) -> Iterator[None]:
    """A process that may have no more of something while the body runs."""
    before = resource.prlimit(pid, which)
    resource.prlimit(pid, which, (most, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, which, before)


def settings_in(folder: Path, **options: Any) -> app.Settings:
    return app.Settings(token=TOKEN, folder=folder / "cache", **options)


def computed(bench: Bench, id_: str, here: Path) -> hs.Result:
    path = here / "computed.nc"
    path.write_bytes(bench.ask("GET", f"/api/results/{id_}/file?format=nc").body)
    return hs.Result.load(path)


def same(first: hs.Result, second: hs.Result) -> bool:
    """The same numbers; texts know where they came from, and say so in attributes."""
    return bool(first.kind == second.kind and first.data.equals(second.data))

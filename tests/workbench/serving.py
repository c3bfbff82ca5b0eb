"""A running workbench, and a client that speaks plain HTTP to it, so that every header
is its own.
"""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

import hiddenscope as hs
import hiddenscope.app as app
from hiddenscope.app import application
from hiddenscope.app.jobs import ModelWorker
from hiddenscope.results.pictures import View
from hiddenscope.views import unpack

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
    """A workbench that runs in a thread of the test, or somewhere else."""

    settings: app.Settings
    guard: Any
    worker: Any

    @property
    def netloc(self) -> str:
        return f"127.0.0.1:{self.settings.port}"

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
            if body is not None:
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            response = connection.getresponse()
            return Answer(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        """A request of a program that has the token."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        bearer = f"Bearer {self.settings.token}"
        own = {"Authorization": bearer, "Content-Type": "application/json"}
        return self.raw(method, path, own, body)

    def submit(
        self, analysis: str, model: str | None = None, /, on: str = "", **arguments: Any
    ) -> Answer:
        """Ask about a model, about kept states, or about neither."""
        request: dict[str, Any] = {"analysis": analysis, "arguments": arguments}
        if model is not None:
            request["model"] = {"name": model}
        if on:
            request["store"] = on
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

    def over(
        self, analysis: str, model: str | None = None, /, **arguments: Any
    ) -> dict[str, Any]:
        """The job of a question, once it is over."""
        submitted = self.submit(analysis, model, **arguments)
        assert submitted.status in (200, 202), submitted.body
        return self.wait(submitted.json["id"])

    def answer(
        self, analysis: str, model: str | None = None, /, **arguments: Any
    ) -> dict[str, Any]:
        """The result of a question, waited for."""
        said = self.over(analysis, model, **arguments)
        assert said["state"] == "done", said
        answered: dict[str, Any] = self.ask(
            "GET", f"/api/results/{said['result']}"
        ).json
        return answered

    def views(self, answer: dict[str, Any]) -> list[View]:
        """The views of a result, as the page unpacks them."""
        payload = self.ask("GET", f"/api/results/{answer['id']}/payload").body
        return unpack(payload.decode("ascii"))

    def result(self, answer: dict[str, Any], folder: Path) -> hs.Result:
        """The numbers of a result, as somebody saves them."""
        path = folder / "computed.nc"
        file = self.ask("GET", f"/api/results/{answer['id']}/file?format=nc")
        path.write_bytes(file.body)
        return hs.Result.load(path)

    def folder(self, label: str) -> str:
        """The opaque name of a model's folder."""
        return self._named("/api/models", label)

    def store(self, label: str) -> str:
        """The opaque name of kept states."""
        return self._named("/api/stores", label)

    def dictionary(self, site: str) -> str:
        """The opaque name of a dictionary."""
        return self._named("/api/dictionaries", f"dictionaries/{site}")

    def _named(self, path: str, label: str) -> str:
        names = {one["label"]: one["name"] for one in self.ask("GET", path).json}
        return str(names[label])


def running(folder: Path, **options: Any) -> Iterator[Bench]:
    # So that nobody else can have the port.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings = settings_in(folder, port=listener.getsockname()[1], **options)
        worker = ModelWorker(settings)
        with patch.object(application, "ModelWorker", return_value=worker):
            server = app.server(settings)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield Bench(settings, server.config.app, worker)
        finally:
            server.should_exit = True
            thread.join(SECONDS)


class Served(NamedTuple):
    """`hiddenscope serve` in a process of its own, and the link that it printed."""

    process: subprocess.Popen[str]
    address: str
    bench: Bench


@contextmanager
def served(folder: Path, *options: str, before: str = "") -> Iterator[Served]:
    """Start the command, after the statements in `before`."""
    program = (
        f"{before}\nimport sys; from hiddenscope.cli.main import main; sys.argv[0] ="
        " 'hiddenscope'; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "serve", "--json", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )
    assert process.stdout is not None
    try:
        lines = ""
        while not lines.rstrip().endswith("}"):
            lines += process.stdout.readline() or pytest.fail(process.communicate()[1])
        told = json.loads(lines)
        port = int(told["address"].rstrip("/").rpartition(":")[2])
        settings = app.Settings(port=port, token=told["token"])
        yield Served(process, told["address"], Bench(settings, None, None))
    finally:
        process.kill()
        process.communicate()


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

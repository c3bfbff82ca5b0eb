"""Many clients at once, while a model works: nothing fails, memory is bounded, and what
is known is answered meanwhile.

`python -m labs.fuzz.load` serves a workbench in a process of its own and asks it for a
minute; a few seconds of the same are in the tests.
"""

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

CLIENTS = 20
TEXT = "The rest is here."
# It takes many minutes: every one of the texts takes seconds.
LONG = {
    "texts": ["a b c d e f g h i j " * 5 + str(k) for k in range(100, 999)],
    "influence": "frobenius",
}


@dataclass
class Client:
    """A program that has the token; every request is a connection of its own."""

    port: int
    token: str

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        """The status and the body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        headers = {
            "Authorization": f"Bearer {self.token}",
            "Content-Type": "application/json",
        }
        try:
            connection.request(
                method, path, None if body is None else json.dumps(body), headers
            )
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def submit(self, analysis: str, model: str, **arguments: Any) -> dict[str, Any]:
        """The job of a question."""
        request = {
            "analysis": analysis,
            "model": {"name": model},
            "arguments": arguments,
        }
        job: dict[str, Any] = json.loads(self.ask("POST", "/api/jobs", request)[1])
        return job

    def result(self, analysis: str, model: str, **arguments: Any) -> str:
        """The id of the result of a question, waited for."""
        job = self.submit(analysis, model, **arguments)
        while job["state"] in ("queued", "running"):
            time.sleep(0.05)
            job = json.loads(self.ask("GET", f"/api/jobs/{job['id']}")[1])
        if job["state"] != "done":
            raise RuntimeError(f"{analysis}: {job['error']}")
        return str(job["result"])


@dataclass
class Load:
    """What the clients saw: how often they asked, what failed, how long cached results
    took, and memory in bytes.
    """

    requests: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def __str__(self) -> str:
        ordered = sorted(self.seconds)
        median, late = (
            statistics.median(ordered),
            ordered[int(0.99 * (len(ordered) - 1))],
        )
        sizes = [
            " to ".join(f"{size / 2**20:,.0f}" for size in one)
            for one in zip(*self._ends(), strict=True)
        ]
        return (
            f"{self.requests:,} requests of {CLIENTS} clients, {len(self.failed)}"
            f" failed; a cached result in {1000 * median:.0f} ms (median),"
            f" {1000 * late:.0f} ms (99th percentile); memory, start to end: server"
            f" {sizes[0]} MiB, worker {sizes[1]} MiB; at most {self._most(0):,} and"
            f" {self._most(1):,} MiB"
        )

    def _ends(self) -> list[tuple[int, int]]:
        return [self.memory[0], self.memory[-1]]

    def _most(self, which: int) -> int:
        return max(one[which] for one in self.memory) // 2**20


def under_load(
    client: Client, model: str, seconds: float, memory: Callable[[], tuple[int, int]]
) -> Load:
    """Ask for cached results, lists and jobs for so long, from many threads, while one
    long job runs.
    """
    known = client.result("lens", model, texts=TEXT, k=2)
    busy = client.submit("visibility", model, **LONG)["id"]
    while json.loads(client.ask("GET", f"/api/jobs/{busy}")[1])["state"] == "queued":
        time.sleep(0.05)  # another job may be ending
    paths = [
        f"/api/results/{known}",
        f"/api/results/{known}/payload",
        "/api/analyses",
        f"/api/jobs/{busy}",
    ]
    load, until, lock = (
        Load(memory=[memory()]),
        time.monotonic() + seconds,
        threading.Lock(),
    )

    def one(number: int) -> None:
        last = False
        while not last:  # each asks at least once, on however busy a machine
            last = time.monotonic() >= until
            path, start = paths[number % len(paths)], time.perf_counter()
            try:
                status, body = client.ask("GET", path)
            except OSError as error:
                status, body = 0, str(error).encode()
            took, number = time.perf_counter() - start, number + 1
            with lock:
                load.requests += 1
                load.seconds += [took] if path.startswith("/api/results") else []
                load.failed += (
                    [] if status == 200 else [f"{path}: {status} {body[:200]!r}"]
                )

    threads = [
        threading.Thread(target=one, args=(number,)) for number in range(CLIENTS)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.5)
        load.memory.append(memory())
    state = json.loads(client.ask("GET", f"/api/jobs/{busy}")[1])["state"]
    load.failed += (
        []
        if state == "running"
        else [f"the long job is {state}: it did not run all the time"]
    )
    client.ask("DELETE", f"/api/jobs/{busy}")
    return load


@contextmanager
def served(folder: Path) -> Iterator[tuple[Client, str, psutil.Process]]:
    """A workbench over a tiny model, in a process of its own: a client, the model's
    name, the process.
    """
    from hiddenscope.testing import tiny_model, tiny_tokenizer

    tiny_model("llama").save_pretrained(folder / "root" / "tiny")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder / "root" / "tiny")
    words = ["serve", "--no-open", "--json", "--root", str(folder / "root")]
    own = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HIDDENSCOPE_CACHE": str(folder / "cache"),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "hiddenscope", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=own,
    )
    try:
        assert process.stdout is not None
        lines = ""
        while not lines.rstrip().endswith("}"):
            line = process.stdout.readline()
            if not line:
                raise RuntimeError("the workbench did not start")
            lines += line
        told = json.loads(lines)
        client = Client(
            int(told["address"].rstrip("/").rpartition(":")[2]), told["token"]
        )
        yield client, _model(client), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def _model(client: Client) -> str:
    """The opaque name of the one folder, as soon as the server answers."""
    while True:
        try:
            models = json.loads(client.ask("GET", "/api/models")[1])
            return str(next(one["name"] for one in models if one["source"] == "folder"))
        except ConnectionError:
            time.sleep(0.1)


def main() -> int:
    """Ask for so long; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.fuzz.load", description=__doc__
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="how long the clients ask"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as (client, model, process),
    ):

        def memory() -> tuple[int, int]:
            return process.memory_info().rss, sum(
                one.memory_info().rss for one in process.children()
            )

        load = under_load(client, model, options.seconds, memory)
    print(load)
    print(*load.failed[:20], sep="\n")
    return int(bool(load.failed))


if __name__ == "__main__":
    sys.exit(main())

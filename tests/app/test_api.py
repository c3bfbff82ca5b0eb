"""The API as its OpenAPI document has it: any request is answered as documented, and never with a 500."""

import threading
import time

import psutil

from fuzz.requests import try_requests

from .asking import SLOW, TEXT
from .serving import TOKEN, Bench

CLIENTS, SECONDS = 20, 4


def test_any_request_is_answered_as_documented(bench: Bench) -> None:
    """Requests that fit the document, and requests that do not; `make fuzz` tries thousands."""
    counts = try_requests(f"http://{bench.netloc}", TOKEN, examples=8)
    assert len(counts) == 13 and min(counts.values()) > 0


def test_twenty_clients_at_once_while_a_model_works(bench: Bench, tiny_name: str) -> None:
    """Cached results are answered while a job runs, nothing fails, and memory does not grow with the requests."""
    known = bench.answer("lens", tiny_name, text=TEXT, k=2)["id"]
    busy = bench.submit("visibility", tiny_name, **SLOW, seed=4)
    before, until = psutil.Process().memory_info().rss, time.monotonic() + SECONDS
    failed: list[str] = []
    asked = [0] * CLIENTS

    def client(number: int) -> None:
        paths = (
            f"/api/results/{known}",
            f"/api/results/{known}/payload",
            "/api/analyses",
            f"/api/jobs/{busy.json['id']}",
        )
        while time.monotonic() < until:
            answer = bench.ask("GET", paths[asked[number] % len(paths)])
            asked[number] += 1
            if answer.status != 200:
                failed.append(f"{answer.status} {answer.body[:200]!r}")

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    bench.ask("DELETE", f"/api/jobs/{busy.json['id']}")
    assert failed == [] and min(asked) > 0
    assert psutil.Process().memory_info().rss - before < 200 * 2**20
    assert bench.wait(busy.json["id"])["state"] == "cancelled"

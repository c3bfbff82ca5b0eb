"""The API as its OpenAPI document has it: any request is answered as documented, and
never with a 500.
"""

import os

import psutil

from labs.fuzz.load import CLIENTS, Client, under_load
from labs.fuzz.requests import Known, try_requests
from tests.workbench.asking import TEXT
from tests.workbench.serving import TOKEN, Bench

SECONDS = 4


def test_any_request_is_answered_as_documented(bench: Bench, tiny_name: str) -> None:
    """Requests that fit the document, and requests that do not; `make fuzz` tries
    thousands.
    """
    known = Known(tiny_name, [bench.answer("lens", tiny_name, texts=TEXT, k=2)["id"]])
    made = try_requests(f"http://{bench.netloc}", TOKEN, known, examples=8)
    assert len(made.counts) == 16 and min(made.counts.values()) > 0
    assert made.known.jobs and {"200", "202", "404", "422"} <= set(made.statuses)
    assert made.unexpected() == []
    for job in made.known.jobs:
        bench.ask("DELETE", f"/api/jobs/{job}")


def test_many_clients_at_once_while_a_model_works(bench: Bench, tiny_name: str) -> None:
    """Cached results are answered while a job runs, nothing fails, and memory does not
    grow with the requests.
    """

    def memory() -> tuple[int, int]:
        return psutil.Process(os.getpid()).memory_info().rss, psutil.Process(
            bench.worker.pid
        ).memory_info().rss

    load = under_load(Client(bench.settings.port, TOKEN), tiny_name, SECONDS, memory)
    assert load.failed == [] and load.requests >= CLIENTS
    assert load.memory[-1][0] - load.memory[0][0] < 200 * 2**20

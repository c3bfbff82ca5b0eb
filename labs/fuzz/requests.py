"""Requests to the workbench that follow its OpenAPI document, and requests that break
it, over real HTTP.

Every answer must be one that the document names, of the type that it names; a 500 is
none of them. Half of the requests name a model, a job or a result that is there. Jobs
that are asked for run on, so a full queue is an answer like any other; a job that fails
must say why, and no error may be one that nobody thought of.
"""

import argparse
import math
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as some
from hypothesis.errors import Unsatisfiable

from labs.fuzz.load import TEXT, Client, served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

# A request that fits the document may still name a dataset or a model that is not
# there.
NOT_ASKED = [positive_data_acceptance]
DATASET = "cities-incomplete"
# The operations that are asked this many times as often: this one has every analysis in
# it.
MORE = {"POST /api/jobs": 4}
UNEXPECTED = (
    # How the worker begins when it has no sentence for an error.
    "Unexpectedly"
)


@dataclass
class Known:
    """What is there and may be named: a model, results, and the jobs that were made on
    the way.
    """

    model: str
    results: list[str]
    jobs: list[str] = field(default_factory=list)

    def put_into(self, case: Any, choice: int) -> None:
        """Name something that is there in place of what was made up."""
        if isinstance(case.body, dict) and isinstance(case.body.get("arguments"), dict):
            case.body["model"] = {"name": self.model}
            case.body["arguments"] = {
                name: self._there(name, given)
                for name, given in case.body["arguments"].items()
            }
        there = self.results if "/results/" in case.path else self.jobs
        if there and case.path_parameters and "id" in case.path_parameters:
            case.path_parameters["id"] = there[choice % len(there)]

    def _there(self, name: str, given: Any) -> Any:
        if given is not None and name in ("candidate", "donor", "other"):
            return {"name": self.model}
        return DATASET if given is not None and name == "data" else given


@dataclass
class Requests:
    """A running workbench, what is known of it, and how often every operation was
    asked.
    """

    address: str
    token: str
    known: Known
    counts: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"}

    def ask(self, case: Any) -> None:
        """Send one request, and hold the answer against the document."""
        label = f"{case.method.upper()} {case.operation.path}"
        self.counts[label] = self.counts.get(label, 0) + 1
        # A job that runs would be followed until it is over.
        if label.endswith("/events"):
            self._cancel(str((case.path_parameters or {}).get("id")))
        answer = case.call_and_validate(
            headers=self.headers, timeout=120, excluded_checks=NOT_ASKED
        )
        self.statuses[str(answer.status_code)] = (
            self.statuses.get(str(answer.status_code), 0) + 1
        )
        if label == "POST /api/jobs" and answer.status_code in (200, 202):
            self.known.jobs.append(answer.json()["id"])

    def unexpected(self) -> list[str]:
        """The jobs whose errors nobody thought of."""
        answers = [self._request("GET", job) for job in self.known.jobs]
        told = [answer.json() for answer in answers if answer.status_code == 200]
        return [
            f"{one['analysis']}: {one['error']}"
            for one in told
            if (one["error"] or "").startswith(UNEXPECTED)
        ]

    def _cancel(self, job: str) -> None:
        if job in self.known.jobs:
            self._request("DELETE", job)

    def _request(self, method: str, job: str) -> requests.Response:
        return requests.request(
            method, f"{self.address}/api/jobs/{job}", headers=self.headers, timeout=120
        )


def try_requests(
    address: str, token: str, known: Known, examples: int, start: int = 0
) -> Requests:
    """Ask every operation this many times, rightly and wrongly. The first wrong answer is
    raised.
    """
    made = Requests(address, token, known)
    schema = schemathesis.openapi.from_url(
        f"{address}/api/openapi.json", headers=made.headers
    )
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            _try(made, operation, mode, examples * MORE.get(operation.label, 1), start)
        print(
            f"{made.counts.get(operation.label, 0):6,}  {operation.label}",
            file=sys.stderr,
            flush=True,
        )
    return made


def _try(made: Requests, operation: Any, mode: Any, examples: int, start: int) -> None:
    @seed(start)
    @given(
        case=operation.as_strategy(generation_mode=mode),
        there=some.booleans(),
        choice=some.integers(0, 1000),
    )
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any, there: bool, choice: int) -> None:
        if there and mode.is_positive:
            made.known.put_into(case, choice)
        made.ask(case)

    try:
        ask()
    except Unsatisfiable:  # an operation without parameters cannot be asked wrongly
        if operation.label in made.counts and mode.is_positive:
            raise


def main() -> int:
    """Serve a workbench and ask it this many times; 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.fuzz.requests", description=__doc__
    )
    parser.add_argument(
        "--cases", type=int, default=5_000, help="how many requests, at least"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed makes other requests"
    )
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as (client, model, _),
    ):
        known = Known(model, _results(client, model))
        # 9 operations or more can be asked wrongly, one of them is asked more.
        each = math.ceil(options.cases / 24)
        made = try_requests(
            f"http://127.0.0.1:{client.port}", client.token, known, each, options.seed
        )
        unexpected = made.unexpected()
    told = ", ".join(
        f"{count:,} of {status}" for status, count in sorted(made.statuses.items())
    )
    print(
        f"{sum(made.counts.values()):6,}  requests, each answered as documented: {told}"
    )
    print(
        f"{len(made.known.jobs):6,}  jobs, {len(unexpected)} with an error that nobody"
        " thought of",
        *unexpected,
        sep="\n",
    )
    return int(bool(unexpected))


def _results(client: Client, model: str) -> list[str]:
    return [
        client.result("lens", model, texts=TEXT, k=2),
        client.result("state", model, text=TEXT, site="final", token=0),
    ]


if __name__ == "__main__":
    sys.exit(main())

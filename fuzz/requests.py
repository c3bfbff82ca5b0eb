"""Requests to the workbench that follow its OpenAPI document, and requests that break it, over real HTTP.

Every answer must be one that the document names, of the type that it names; a 500 is none of them. Jobs that are asked
for run on, so a full queue is an answer like any other.
"""

import argparse
import os
import socket
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable

from hiddenscope import app

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import positive_data_acceptance

# A request that fits the document may still name a dataset or a model that is not there.
NOT_ASKED = [positive_data_acceptance]


def try_requests(address: str, token: str, examples: int, start: int = 0) -> dict[str, int]:
    """Ask every operation so many times; how often each was asked. The first wrong answer is raised."""
    headers = {"Authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_url(f"{address}/api/openapi.json", headers=headers)
    counts: dict[str, int] = {}
    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            _try(operation, mode, headers, examples, start, counts)
    return counts


def _try(operation: Any, mode: Any, headers: dict[str, str], examples: int, start: int, counts: dict[str, int]) -> None:
    @seed(start)
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: Any) -> None:
        counts[operation.label] = counts.get(operation.label, 0) + 1
        case.call_and_validate(headers=headers, timeout=120, excluded_checks=NOT_ASKED)

    try:
        ask()
    except Unsatisfiable:  # an operation without parameters cannot be asked wrongly
        if operation.label in counts and mode.is_positive:
            raise


def main() -> int:
    """Serve a workbench and ask it so many times; 1 if an answer was wrong."""
    parser = argparse.ArgumentParser(prog="python -m fuzz.requests", description=__doc__)
    parser.add_argument("--cases", type=int, default=5_000, help="how many requests, about")
    parser.add_argument("--seed", type=int, default=0, help="another seed makes other requests")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder, socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        port = int(trial.getsockname()[1])
        trial.close()
        settings = app.Settings(port=port, folder=Path(folder))
        server = app.server(settings)
        threading.Thread(target=server.run, daemon=True).start()
        while not server.started:
            time.sleep(0.05)
        counts = try_requests(f"http://127.0.0.1:{port}", settings.token, max(1, options.cases // 26), options.seed)
        server.should_exit = True
    for label, count in counts.items():
        print(f"{count:6,}  {label}")
    print(f"{sum(counts.values()):6,}  requests, each answered as documented")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Wrong arguments, flipped bits, damaged text files and interrupts: a short slice of
what `make fuzz` tries at length.

Folders and GGUF files are in loading/test_limits.py.
"""

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest

from labs.fuzz import adapters, calls, disk, interrupts, saved, texts
from labs.fuzz.sandbox import Case, sandboxed
from tests.slices import sliced

GOOD = {"loaded", "answered", "clean", "refused"}
# Calls that once ended in an error that was not ours.
ONCE_FOREIGN = [
    ("Result", "data", "empty array"),
    ("Inputs.batches", "model", "set"),
    ("Inputs.some", "indices", "range"),
    ("source", "stack", "empty string"),
    ("Probe.fit", "labels", "array of objects"),
    ("Probe.fit", "labels", "meta tensor"),
    ("story", "results", "site"),
    ("project", "data", "array of 0 axes"),
    ("cluster", "texts", "Site"),
    ("search", "texts", "nested list"),
    ("search", "texts", "another model"),
    ("edit projected", "tokens", "nested list"),
    ("edit projected", "tokens", "meta tensor"),
    ("capture_generation", "max_new_tokens", "nan"),
    ("read", "source", "scalar tensor"),
    ("Inputs.some", "indices", "site"),
    ("Tokens.select", "rows", "ragged list"),
    ("States.mix", "weights", "empty string"),
    ("Probe.fit", "labels", "nested list"),
    ("Probe.score", "labels", "nested list"),
    ("Contrast", "other", "surrogate"),
    ("lens", "target", "surrogate"),
    ("Inputs", "spans", "empty tuple"),
    ("recording", "sites", "scalar tensor"),
    ("patch", "sites", "empty list"),
    ("Direction.of", "vector", "meta tensor"),
    ("embed", "texts", "array of 0 axes"),
    ("embed", "texts", "meta tensor"),
    ("embed", "texts", "series"),
    ("edit", "inputs", "meta tensor"),
    ("edit values", "values", "meta tensor"),
    ("Direction.between", "away", "scalar tensor"),
    ("Adjustment.fit", "values", "tensor of integers"),
    ("capture_generation", "sites", "empty tuple"),
    ("Inputs", "ids", "empty tuple"),
    ("States.blocks", "rows", "0"),
    ("States.blocks", "rows", "10**30"),
    ("search", "query", "meta tensor"),
    ("probe", "seed", "-1"),
    ("patch", "window", "10**30"),
    ("cluster", "source", "meta tensor"),
    ("Lens.fit", "partial", "long string"),
    ("embed", "texts", "result"),
    ("visibility", "sites", "empty list"),
]


def wrong(cases: Iterable[Case], together: int = 1) -> list[tuple[str, str, str]]:
    """What went wrong, of so many cases."""
    outcomes = list(sandboxed(cases, together=together))
    assert outcomes
    return [
        (out.case.name, out.verdict, out.detail)
        for out in outcomes
        if out.verdict not in GOOD
    ]


def test_calls_that_once_ended_in_a_foreign_error(tmp_path: Path) -> None:
    named = {call.name: call for call in calls.calls()}
    cases = [
        Case(
            "calls",
            f"{name}({argument}={value})",
            partial(calls.called, named[name], {argument: value}, tmp_path),
        )
        for name, argument, value in ONCE_FOREIGN
    ]
    assert wrong(cases, together=50) == []


@pytest.mark.parametrize(
    ("make", "count", "together"),
    [
        (calls.cases, 60, 60),
        (saved.cases, 2, 1),
        (adapters.cases, 12, 1),
        (disk.cases, 1, 1),
        (texts.cases, 8, 1),
        (texts.sites, 300, 1),
        (interrupts.cases, 4, 1),
    ],
)
def test_a_slice_of_what_is_tried_at_length(
    tmp_path: Path,
    make: Callable[[int, int, Path], Iterable[Case]],
    count: int,
    together: int,
) -> None:
    assert wrong(make(count, 2026, tmp_path), together) == []


def killed() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return "loaded"


def spinning() -> str:
    while True:
        pass


def sleeping() -> str:
    time.sleep(60)
    return "loaded"


def greedy() -> str:
    return "loaded" if bytearray(2**30) else ""


def foreign() -> str:
    raise KeyError("x")


def test_what_this_process_has_mapped_does_not_hide_what_a_case_takes(
    tmp_path: Path,
) -> None:
    """Mapped files count for this process and not for its fork."""
    file = tmp_path / "mapped"
    with file.open("wb") as writing:
        writing.truncate(2**30)
    with (
        file.open("rb") as reading,
        mmap.mmap(reading.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
    ):
        assert not any(mapped[place] for place in range(0, 2**30, 2**12))
        (outcome,) = sandboxed([Case("", "greedy", greedy)], 1, memory=2**28)
    assert outcome.verdict == "memory"


@pytest.mark.parametrize("together", sliced([1, 3, 50], 1))
def test_the_sandbox_sees_what_goes_wrong(together: int) -> None:
    """And the case after it runs all the same."""
    bad = {"crashed": killed, "timeout": spinning, "memory": greedy, "foreign": foreign}
    bad |= {"slept": sleeping} if together == 1 else {}
    cases = [
        case
        for name, attempt in bad.items()
        for case in (Case("", name, attempt), Case("", "", lambda: "loaded"))
    ]
    outcomes = sandboxed(cases, 1, seconds=3, memory=2**28, together=together)
    found = [(out.case.name, out.verdict) for out in outcomes]
    expected = [(name, "timeout" if name == "slept" else name) for name in bad]
    assert found == [pair for bad_one in expected for pair in (bad_one, ("", "loaded"))]

"""Keep what was measured, by architecture, in labs/bench/results.json.

An architecture has rows with bars, the standings of peers, and exponents of growth. A
run replaces what it measured and leaves the rest.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labs.bench.measure import Row

PATH = Path(__file__).parent / "results.json"
Record = dict[str, Any]


def read() -> dict[str, Record]:
    """Return everything that was measured."""
    if not PATH.exists():
        return {}
    records: dict[str, Record] = json.loads(PATH.read_text("utf-8"))
    return records


def write(results: dict[str, Record]) -> None:
    """Replace the file."""
    PATH.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def keep_rows(
    results: dict[str, Record], machine: Record, rows: Sequence[Row], rounds: int
) -> None:
    """Keep rows under their architecture, and those of a GPU under "cuda"."""
    record = _record(results, machine)
    here = [row for row in rows if row.name != "gpu"]
    run = {"rows": _names(here), "repeats": rounds, "load": machine["load"]}
    record["runs"] = _runs(record["runs"], run)
    known = [Row.from_json(row) for row in record["rows"]]
    record["rows"] = [row.to_json() for row in _in_place(known, here)]
    on_gpu = [row for row in rows if row.name == "gpu"]
    if on_gpu and ":" in on_gpu[0].what:
        name = on_gpu[0].what.partition(":")[0]
        place = {**machine, "cpu": name, "architecture": "cuda"}
        gpu_rows = [row.to_json() for row in on_gpu]
        results["cuda"] = {"machine": place, "runs": [], "rows": gpu_rows}


def keep_standings(
    results: dict[str, Record], machine: Record, standings: Sequence[Record]
) -> None:
    """Keep standings of peers in place of those of the same task."""
    record = _record(results, machine)
    record["peers"] = _replaced(record.get("peers", []), standings, _task)


def keep_growths(
    results: dict[str, Record], machine: Record, growths: Sequence[Record]
) -> None:
    """Keep exponents in place of those of the same task and axis."""
    record = _record(results, machine)
    record["growth"] = _replaced(record.get("growth", []), growths, _task_and_axis)


def _task(record: Record) -> Any:
    return record["task"]


def _task_and_axis(record: Record) -> Any:
    return record["task"], record["axis"]


def _replaced(
    known: Sequence[Record], fresh: Sequence[Record], key: Callable[[Record], Any]
) -> list[Record]:
    """Return known records without those that were measured again, and the fresh."""
    measured = {key(record) for record in fresh}
    kept = [record for record in known if key(record) not in measured]
    return [*kept, *fresh]


def _record(results: dict[str, Record], machine: Record) -> Record:
    """Return the record of this architecture, with the machine as it is now."""
    empty: Record = {"machine": machine, "runs": [], "rows": []}
    record = results.setdefault(machine["architecture"], empty)
    record["machine"] = machine
    return record


def _in_place(known: Sequence[Row], fresh: Sequence[Row]) -> list[Row]:
    """Return known rows, and in their places those that were measured again."""
    measured = {row.name for row in fresh}
    rows = []
    for name in _names([*known, *fresh]):
        source = fresh if name in measured else known
        rows += [row for row in source if row.name == name]
    return rows


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def _runs(known: Sequence[Record], run: Record) -> list[Record]:
    """Return the runs that rows are from, without what was measured again."""
    runs = []
    for earlier in known:
        names = [name for name in earlier["rows"] if name not in run["rows"]]
        if names:
            runs.append({**earlier, "rows": names})
    if run["rows"]:
        runs.append(run)
    return runs

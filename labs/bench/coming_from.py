"""Run the ten tasks of docs/coming_from in every library, and compare the numbers.

    python -m labs.bench.coming_from            run all, compare, print the outcomes
    python -m labs.bench.coming_from --write    and write docs/coming_from/agreement.json

The scripts of TransformerLens and nnsight run in `.venv-peers`, which `make bench
PEERS=1` makes; the other two run in this environment. All load the same folder. What
a script computed is read from its variables, which have the same names in all four.
"""

import argparse
import json
import os
import platform
import runpy
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from docs.coming_from import LIBRARIES, RECORD, script

ROOT = Path(__file__).parents[2]
PEERS = ("transformer_lens", "nnsight")
PEERS_PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PACKAGES = ("torch", "transformers", "transformer-lens", "nnsight")
CITIES = ROOT / "src" / "hiddenscope" / "texts" / "datasets" / "cities-incomplete.csv"
# Thirty blocks in float32 with another attention kernel stay well below this.
TOLERANCE = 1e-4

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


@dataclass(frozen=True)
class Row:
    """The outcome of one task in one library beside hiddenscope."""

    task: str
    compared: str
    outcome: str
    # Nothing where the numbers are not meant to be equal.
    equal: bool | None


def main() -> None:
    """Run the scripts, compare and print; write the record if asked to."""
    options = _options()
    if options.run:
        np.savez(options.run[1], **run(options.run[0]))
        return
    if not PEERS_PYTHON.exists():
        sys.exit(
            f"There is no {PEERS_PYTHON}: `python -m labs.bench --peers` makes it."
        )
    rows = _all_rows(options.model)
    different = False
    for library, outcomes in rows.items():
        for row in outcomes:
            print(f"{library:17} {row.task:7} {row.compared}: {row.outcome}")
            different |= row.equal is False
    if options.write:
        _write(rows)
        print(
            f"Written: {RECORD.relative_to(ROOT)}. `make docs` puts it into the pages."
        )
    sys.exit(different)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m labs.bench.coming_from",
        description="Run the ten tasks in every library, and compare the numbers.",
    )
    parser.add_argument(
        "--write", action="store_true", help="write docs/coming_from/agreement.json"
    )
    parser.add_argument(
        "--model", type=Path, help="another folder than that of smollm2, of its depth"
    )
    # How this file runs itself in the environment of the peers.
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model and options.write:
        parser.error("--write records smollm2, and --model names another")
    return options


def run(library: str) -> Arrays:
    """Run a script in this process and folder; return what it computed."""
    names = runpy.run_path(str(script(library)), run_name="example")
    arrays = {}
    for k, states in enumerate(names["rows"]):
        arrays[f"rows {k}"] = np.asarray(states)
    for name in ("stream", "after_norm", "state", "probability", "logits", "effect"):
        arrays[name] = np.asarray(names[name])
    arrays["stored"] = np.asarray(names["stored"])
    arrays["words"] = np.asarray(names["words"], dtype=str)
    arrays["written"] = np.asarray(names["written"])
    arrays["accuracy"] = np.asarray(names["accuracy"])
    first = str(names["first"])
    arrays["first"] = np.asarray(f"layer.{first.removeprefix('layer.')}")
    return arrays


def prepare(folder: Path, model: Path) -> None:
    """Put the model and the labelled texts where the scripts look for them."""
    (folder / "smollm2").symlink_to(model, target_is_directory=True)
    (folder / "cities.csv").write_bytes(CITIES.read_bytes())


def compare(theirs: Arrays, ours: Arrays) -> list[Row]:
    """Compare what two scripts computed, task by task."""
    # Hiddenscope also has the effect of the last layer.
    effect = ours["effect"][: len(theirs["effect"])]
    ragged = [name for name in ours if name.startswith("rows")]
    apart = max(_relative(theirs[name], ours[name]) for name in ragged)
    accuracies = f"{theirs['accuracy']:.2f}, hiddenscope {ours['accuracy']:.2f}"
    return [
        _near("states", "every state", _relative(theirs["stream"], ours["stream"])),
        _near(
            "states",
            "every state after the final norm",
            _relative(theirs["after_norm"], ours["after_norm"]),
        ),
        _near("ragged", "every state of three texts", apart),
        _near("stop", "every state", _relative(theirs["state"], ours["state"])),
        _same("lens", "the top word of every layer", theirs["words"], ours["words"]),
        _near(
            "lens",
            "the probability of “ Paris”, absolute",
            _absolute(theirs["probability"], ours["probability"]),
        ),
        _near("edit", "the logits", _relative(theirs["logits"], ours["logits"])),
        _near(
            "patch",
            "the effect of every cell, over the largest",
            _over_largest(theirs["effect"], effect),
        ),
        _same("steer", "the text", theirs["written"], ours["written"]),
        Row(
            "probe",
            "the accuracy, with other folds and another penalty",
            accuracies,
            None,
        ),
        _near("store", "every state", _relative(theirs["stored"], ours["stored"])),
        _same("port", "the first layer apart", theirs["first"], ours["first"]),
    ]


def _near(task: str, compared: str, difference: float) -> Row:
    equal = difference <= TOLERANCE
    outcome = "equal, bit for bit"
    if difference:
        outcome = f"largest difference {difference:.1e}"
    if not equal:
        outcome = f"DIFFERENT: {outcome}"
    return Row(task, compared, outcome, equal)


def _same(task: str, compared: str, theirs: Array, ours: Array) -> Row:
    equal = np.array_equal(theirs, ours)
    outcome = "equal"
    if not equal:
        outcome = f"DIFFERENT: {theirs.tolist()} against {ours.tolist()}"
    return Row(task, compared, outcome, equal)


def _relative(theirs: Array, ours: Array) -> float:
    """Return the largest norm of a difference, over the norm of the state."""
    if theirs.shape != ours.shape:
        return float("inf")
    apart = np.linalg.norm(theirs.astype(float) - ours, axis=-1)
    return float(np.max(apart / np.linalg.norm(ours.astype(float), axis=-1)))


def _absolute(theirs: Array, ours: Array) -> float:
    if theirs.shape != ours.shape:
        return float("inf")
    return float(np.max(np.abs(theirs.astype(float) - ours)))


def _over_largest(theirs: Array, ours: Array) -> float:
    """Return the largest difference over the largest value.

    An effect is a difference of logits over that of the clean and the corrupted run. A
    model that hardly tells the prompts apart divides by little, and rounding grows with
    the effects. In the small model of tests/slow/labs/test_coming_from.py the divisor is a
    hundredth of the largest logit: effects go up to 23.5, and those of hiddenscope and
    TransformerLens are 1.6e-3 and 2.0e-3 away from float64, and 4.3e-4 from each other.
    """
    return _absolute(theirs, ours) / float(np.max(np.abs(ours)))


def _all_rows(model: Path | None) -> dict[str, list[Row]]:
    """Run every script in a folder of its own, and compare it with hiddenscope's."""
    # This file also runs where there is no hiddenscope.
    from hiddenscope.loading import zoo

    folder = model or zoo.zoo_folder("smollm2")
    arrays = {}
    for library in LIBRARIES:
        print(f"{LIBRARIES[library]} ...", file=sys.stderr)
        arrays[library] = _run_apart(library, folder.resolve())
    ours = arrays.pop("hiddenscope")
    return {library: compare(theirs, ours) for library, theirs in arrays.items()}


def _run_apart(library: str, model: Path) -> Arrays:
    """Run a script in another process, in the environment that it needs."""
    python = sys.executable
    if library in PEERS:
        python = str(PEERS_PYTHON)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "TQDM_DISABLE": "1",
    }
    with TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder, model)
        out = folder / "computed.npz"
        subprocess.run(
            [python, "-m", "labs.bench.coming_from", "--run", library, str(out)],
            cwd=folder,
            env=environment,
            check=True,
        )
        with np.load(out) as computed:
            return dict(computed)


def _write(rows: dict[str, list[Row]]) -> None:
    versions = {"hiddenscope": version("hiddenscope"), **_peer_versions()}
    outcomes = {}
    for library, compared in rows.items():
        outcomes[library] = [asdict(row) for row in compared]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "architecture": platform.machine(),
        "versions": versions,
        "rows": outcomes,
    }
    text = json.dumps(record, indent=1, ensure_ascii=False)
    RECORD.write_text(text + "\n", encoding="utf-8")


def _peer_versions() -> dict[str, str]:
    """Return the versions of the packages in the environment of the peers."""
    program = (
        "import json, sys; from importlib.metadata import version;"
        " print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    done = subprocess.run(
        [str(PEERS_PYTHON), "-c", program, *PACKAGES],
        capture_output=True,
        text=True,
        check=True,
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


if __name__ == "__main__":
    main()

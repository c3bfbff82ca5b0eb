"""Keep trained models in out/truth, so that each is trained once.

A model is trained again when the code that trains it has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from labs.truth.circuit import circuit_of
from labs.truth.known import KnownModel
from labs.truth.programs import PROGRAMS
from labs.truth.tally import Scorecard
from labs.truth.train import ACCURACY, INTERCHANGED, STRICT, Trained, train, untrained

FOLDER = Path(__file__).parents[2] / "out" / "truth"
SOURCES = ("program", "programs", "circuit", "exchange", "train")
# Programs whose circuit a small model learns within minutes. Parity is none of them: with
# everything else exchanged at once, it was not learned in 4,000 steps.
TRAINED = (
    "maximum",
    "skip_trigram",
    "induction",
    "histogram",
    "modular_sum",
)


def trained(name: str, folder: Path = FOLDER) -> Trained:
    """Return the trained model of a program, from the cache or from training."""
    path = folder / f"{name}-{_fingerprint()}.safetensors"
    facts = path.with_suffix(".json")
    # The facts are written last: without them the weights may be half written.
    if facts.exists():
        return _read(name, path, facts)
    made = train(PROGRAMS[name]())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made.known.module.state_dict(), path)
    kept = {
        "steps": made.steps,
        "examination": _as_dict(made.examination),
        "untaught": _as_dict(made.untaught),
    }
    facts.write_text(json.dumps(kept))
    return made


def _read(name: str, path: Path, facts: Path) -> Trained:
    kept = json.loads(facts.read_text())
    program = PROGRAMS[name]()
    circuit = circuit_of(program)
    module = untrained(program, circuit).eval()
    module.load_state_dict(load_file(path))
    known = KnownModel("trained", program, circuit, module)
    examination = _as_card(kept["examination"])
    return Trained(known, kept["steps"], examination, _as_card(kept["untaught"]))


def _as_dict(card: Scorecard) -> dict[str, list[float]]:
    return {question.asked: cases for question, cases in card.cases.items()}


def _as_card(kept: dict[str, list[float]]) -> Scorecard:
    card = Scorecard()
    for question in (ACCURACY, INTERCHANGED, STRICT):
        for number in kept[question.asked]:
            card.add(question, number)
    return card


def _fingerprint() -> str:
    """Return a short hash of the code that decides what a trained model is."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]

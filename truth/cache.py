"""Keep trained models in out/truth, so that each is trained once.

A model is trained again when the code that trains it has changed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from truth.circuit import circuit_of
from truth.known import KnownModel
from truth.programs import PROGRAMS
from truth.tally import Scorecard
from truth.train import ACCURACY, INTERCHANGED, STRICT, Trained, Trainer, untrained

FOLDER = Path(__file__).parent.parent / "out" / "truth"
SOURCES = ("program", "programs", "circuit", "exchange", "train")
# Programs whose circuit a small model learns within minutes.
TRAINED = (
    "maximum",
    "skip_trigram",
    "induction",
    "histogram",
    "parity",
    "modular_sum",
)


def trained(name: str, folder: Path = FOLDER) -> Trained:
    """Return the trained model of a program, from the cache or from training."""
    path = folder / f"{name}-{_fingerprint()}.safetensors"
    facts = path.with_suffix(".json")
    # The facts are written last: without them the weights may be half written.
    if facts.exists():
        return _read(name, path, facts)
    made = Trainer(PROGRAMS[name]()).train()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(made.known.module.state_dict(), path)
    cases = {}
    for question, numbers in made.examination.cases.items():
        cases[question.asked] = numbers
    facts.write_text(json.dumps({"steps": made.steps, "cases": cases}))
    return made


def _read(name: str, path: Path, facts: Path) -> Trained:
    kept = json.loads(facts.read_text())
    program = PROGRAMS[name]()
    circuit = circuit_of(program)
    module = untrained(program, circuit).eval()
    module.load_state_dict(load_file(path))
    card = Scorecard()
    for question in (ACCURACY, INTERCHANGED, STRICT):
        for number in kept["cases"].get(question.asked, []):
            card.add(question, number)
    known = KnownModel("trained", program, circuit, module)
    return Trained(known, card, kept["steps"])


def _fingerprint() -> str:
    """Return a short hash of the code that decides what a trained model is."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()[:12]

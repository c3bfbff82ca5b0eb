"""Try one pair: what was declared of it, and what drift says."""

import copy
import json
import logging
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import hiddenscope as hs
from labs.faults import ports
from labs.faults.models import Subject, in_float64, subject
from labs.faults.oracle import FACTOR, moved, noise, objection
from labs.faults.pairs import SOUND, Spec
from labs.faults.planted import HARMLESS, KINDS, UNNAMED, Planted
from labs.faults.port_oracle import objection as port_objection
from labs.faults.ports import PORTS, PlantedInPort

Verdict = dict[str, Any]
Drift = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What came of one pair. `moved` is how far the output moved, in units of the
    reference's rounding noise.

    For a fault in a port, `blame` says what the named module is: right, larger than
    need be, wrong, or none.
    """

    spec: Spec
    moved: float
    site: str | None = None
    paths: tuple[str, ...] = ()
    detail: str = ""
    drifted: bool = False
    first_site: str | None = None
    module: str | None = None
    beyond: float = 0.0
    passes: Any = None
    error: str = ""
    seconds: float = 0.0
    sites: tuple[str, ...] = ()
    blame: str = ""
    own_code: bool = False
    hints: tuple[str, ...] = ()
    false_claim: bool = False
    false_hints: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Outcome":
        values = json.loads(line)
        lists = {
            name: tuple(value)
            for name, value in values.items()
            if isinstance(value, list)
        }
        return cls(**{**values, **lists, "spec": Spec(**values["spec"])})

    @property
    def effective(self) -> bool:
        """Return whether the output moves beyond the noise."""
        return self.moved > FACTOR

    @property
    def site_exact(self) -> bool:
        return self.drifted and self.first_site in (self.site, *self.sites)

    @property
    def module_exact(self) -> bool:
        return self.drifted and self.module in self.paths

    @property
    def false_alarm(self) -> bool:
        """Return whether a harmless pair was called drift, or was not compared."""
        return not self.spec.fault and (self.drifted or bool(self.error))


def prepare() -> None:
    """Keep a worker to one core, and silence warnings about tiny random models."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


def attempt(spec: Spec) -> Outcome:
    """Build the pair, check it, and compare it with drift."""
    start = time.monotonic()
    of = subject(*spec.reference)
    truth: Verdict = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            reference, candidate, truth = _pair(spec, of)
            planted = truth.pop("planted", None)
            facts = hs.drift(
                reference, candidate, _texts(model(*spec.reference), of)
            ).facts
            truth |= _facts(facts)
            truth |= {} if planted is None else _judged(planted, truth)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            truth["error"] = (
                f"{type(error).__name__}: {error} at"
                f" {Path(place.filename).name}:{place.lineno}"
            )
            truth.pop("planted", None)
    return Outcome(spec, **{"moved": 0.0, **truth}, seconds=time.monotonic() - start)


def check(spec: Spec) -> str:
    """Say how an independent check contradicts the declaration of a fault."""
    if spec.group == "port":
        return port_objection(
            PORTS[spec.subject], subject(*spec.reference).module, plant_in_port(spec)
        )
    of, planted = subject(*spec.reference), plant(spec)
    effective = moved(of, planted.module) / level(*spec.reference) > FACTOR
    message = objection(of, planted) if effective else ""
    return message and f"{spec.subject}, {spec.kind}, seed {spec.seed} {message}"


def _facts(facts: Any) -> Verdict:
    return {
        "drifted": bool(facts["drifted"]),
        "first_site": facts["first_site"],
        "module": facts["module"],
        "beyond": _number(facts["beyond"]),
        "passes": facts["passes"],
        "own_code": bool(facts["own_code"]),
        "hints": tuple(hint["fault"] for hint in facts["hints"]),
    }


def _judged(planted: PlantedInPort, verdict: Verdict) -> Verdict:
    """Hold what drift says of a fault in a port against what is true."""
    module, hints, own_code = verdict["module"], verdict["hints"], verdict["own_code"]
    return {
        "blame": planted.names(module, hints),
        "false_claim": planted.claims_falsely(module, own_code=own_code),
        "false_hints": tuple(planted.false_hints(hints)),
    }


def _number(value: Any) -> float:
    return float("inf") if value is None or isinstance(value, str) else float(value)


def _pair(spec: Spec, of: Subject) -> tuple[Any, Any, Verdict]:
    """Return the reference, the candidate, and what is true of the pair."""
    if spec.group == "run":
        return _run(spec.kind, of)
    reference = model(*spec.reference)
    if spec.group == "port":
        return _port(spec, of, reference)
    if spec.group == "harmless":
        candidate = (
            HARMLESS[spec.kind].make(of.module, spec.rng).to(spec.candidate_device)
        )
        side = candidate if spec.kind == "compiled" else (candidate, of.tokenizer)
        return (
            reference,
            side,
            {"moved": moved(of, candidate) / level(*spec.reference)},
        )
    planted = plant(spec)
    truth = {
        "site": planted.first_site,
        "paths": planted.paths,
        "detail": planted.detail,
    }
    candidate = planted.module.to(spec.candidate_device)
    truth["moved"] = moved(of, candidate) / level(*spec.reference)
    return reference, (candidate, of.tokenizer), truth


def _port(spec: Spec, of: Subject, reference: hs.Model) -> tuple[Any, Any, Verdict]:
    """Return a port of the reference, with a fault or without."""
    if spec.kind == SOUND:
        candidate: Any = PORTS[spec.subject].port(of.module).to(spec.candidate_device)
        return (
            reference,
            candidate,
            {"moved": moved(of, candidate) / level(*spec.reference)},
        )
    planted = plant_in_port(spec)
    candidate = planted.module.to(spec.candidate_device)
    truth = {
        "site": planted.first_site,
        "sites": planted.sites,
        "paths": planted.paths,
        "detail": planted.detail,
    }
    truth |= {
        "moved": moved(of, candidate) / level(*spec.reference),
        "planted": planted,
    }
    return reference, candidate, truth


def plant_in_port(spec: Spec) -> PlantedInPort:
    """Return the port of a pair, with its fault."""
    return ports.plant(
        PORTS[spec.subject], subject(*spec.reference).module, spec.kind, spec.seed
    )


def plant(spec: Spec) -> Planted:
    """Plant the fault of a pair in a copy."""
    kind = (KINDS if spec.group == "named" else UNNAMED)[spec.kind]
    return kind.plant(subject(*spec.reference).module, rng=spec.rng)


def _run(kind: str, of: Subject) -> tuple[Any, Any, Verdict]:
    """Return the same module, run in another way."""
    reference = model(of.name)
    if kind == "padding_side":
        tokenizer = copy.deepcopy(of.tokenizer)
        tokenizer.padding_side = "left"
        return reference, (copy.deepcopy(of.module), tokenizer), {}
    if kind.startswith("from_"):
        wide = (
            in_float64(of.module)
            if kind == "from_fp64"
            else copy.deepcopy(of.module).to(torch.bfloat16)
        )
        return (wide, of.tokenizer), (copy.deepcopy(of.module), of.tokenizer), {}
    texts = _texts(reference, of)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1 if kind == "more_threads" else threads)
        batch_tokens = 1 if kind == "one_at_a_time" else None
        return reference, reference.capture(texts, batch_tokens=batch_tokens), {}
    finally:
        torch.set_num_threads(threads)


@cache
def model(
    name: str, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> hs.Model:
    """Load a reference once."""
    of = subject(name, dtype, device, seed)
    return hs.load((of.module, of.tokenizer))


@cache
def level(
    name: str, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> float:
    """Measure the rounding noise of a reference's output."""
    return noise(subject(name, dtype, device, seed))


def _texts(reference: hs.Model, of: Subject) -> Any:
    inputs = reference.encode(of.ids, targets=of.target_ids)
    return inputs if of.targets is not None else list(of.texts)

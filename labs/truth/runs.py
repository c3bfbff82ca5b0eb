"""Put every analysis on every model whose answer is known."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hiddenscope.errors import Error
from labs.truth.cache import TRAINED, trained
from labs.truth.hosts import HOSTS, compile_into
from labs.truth.known import KnownModel
from labs.truth.outputs import Outputs, check_outputs
from labs.truth.programs import PROGRAMS
from labs.truth.scores.attention import score_attention
from labs.truth.scores.contributions import score_contributions
from labs.truth.scores.drift import score_drift
from labs.truth.scores.edges import score_edges
from labs.truth.scores.lens import score_lens
from labs.truth.scores.maps import score_maps
from labs.truth.scores.patch import score_patch
from labs.truth.scores.probe import score_probe
from labs.truth.scores.steer import score_steer
from labs.truth.scores.variable import score_variable
from labs.truth.scores.visibility import score_visibility
from labs.truth.tally import Scorecard

SCORES: dict[str, Callable[[KnownModel, Scorecard], None]] = {
    "probe": score_probe,
    "patch": score_patch,
    "edges": score_edges,
    "visibility": score_visibility,
    "lens": score_lens,
    "attention": score_attention,
    "contributions": score_contributions,
    "drift": score_drift,
    "steer": score_steer,
    "variable": score_variable,
    "maps": score_maps,
}


@dataclass(frozen=True)
class Job:
    """One model: a program, and its host or "trained"."""

    program: str
    host: str


@dataclass
class Outcome:
    """What came of one model.

    `outputs` are of a compiled model, and `training` is of a trained one. An analysis
    that refuses a model says why in `refused`.
    """

    job: Job
    seconds: float = 0.0
    outputs: Outputs | None = None
    training: Training | None = None
    card: Scorecard = field(default_factory=Scorecard)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Training:
    """How a training went: its steps, and its examination beside an untaught model's."""

    steps: int
    examination: Scorecard
    untaught: Scorecard


def every_job() -> list[Job]:
    """Return all models, those that take the longest first."""
    jobs = [Job(program, "trained") for program in reversed(TRAINED)]
    for program in PROGRAMS:
        jobs += [Job(program, host) for host in HOSTS]
    return jobs


def begin_worker() -> None:
    """Take one thread, and end at once with Ctrl-C: a pool would go on to other jobs."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(job: Job, device: str = "cpu", scores: Sequence[str] = ()) -> Outcome:
    """Make a model, check that it is its program, and score analyses on it: all or some."""
    start = time.monotonic()
    outcome = Outcome(job)
    known = _known(job, outcome, device)
    for name in scores or SCORES:
        try:
            SCORES[name](known, outcome.card)
        except Error as refusal:
            outcome.refused[name] = str(refusal)
    outcome.seconds = time.monotonic() - start
    return outcome


def _known(job: Job, outcome: Outcome, device: str) -> KnownModel:
    """Make the model of a job, and note how near it is to its program."""
    if job.host == "trained":
        made = trained(job.program)
        made.known.module.to(device)
        outcome.training = Training(made.steps, made.examination, made.untaught)
        return made.known
    known = compile_into(job.host, PROGRAMS[job.program]())
    known.module.to(device)
    outcome.outputs = check_outputs(known)
    require_program(known, outcome.outputs)
    return known


def require_program(known: KnownModel, outputs: Outputs) -> None:
    """Stop if a compiled model is not its program."""
    if outputs.wrong or outputs.logit_error > known.program.tolerance:
        name = f"{known.program.name} in {known.host}"
        raise RuntimeError(f"{name} is not its program: {outputs}")

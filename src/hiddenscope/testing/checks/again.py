"""A second call of the usual question, watched from all sides, once for all laws."""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from hiddenscope.testing.checks.law import usual_answer
from hiddenscope.testing.entries import Entry, Outcome, outcome_of
from hiddenscope.testing.subjects import Subject
from hiddenscope.testing.untouched import modes, state_of


@dataclass(frozen=True)
class Again:
    """What a second call came to, and what of the user's was another after it."""

    outcome: Outcome
    changed: list[str]
    modes_changed: bool
    generators_moved: bool


@cache
def again(entry: Entry, subject: Subject) -> Again:
    """Ask a second time, with other global seeds, and with gradients switched on."""
    usual_answer(entry, subject)  # what is tried once has been tried
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()
    torch.manual_seed(991)
    np.random.seed(992)
    module = subject.module
    try:
        with torch.enable_grad():
            before, modes_before, seeds = state_of(module), modes(), _generators()
            came = outcome_of(lambda: entry.run(subject))
            after, modes_after, moved = state_of(module), modes(), _generators()
    finally:
        torch.set_rng_state(torch_before)
        np.random.set_state(numpy_before)
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    return Again(came, changed, modes_before != modes_after, seeds != moved)


def _generators() -> tuple[bytes, str]:
    """Return the states of the generators that everybody shares."""
    return torch.get_rng_state().numpy().tobytes(), str(np.random.get_state())

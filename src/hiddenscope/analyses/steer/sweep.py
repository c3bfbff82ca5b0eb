"""A sweep: a direction added or ablated at one site after another."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from hiddenscope.analyses.steer.direction import Steered, sites_above
from hiddenscope.analyses.steer.intervention import How, Intervention
from hiddenscope.analyses.steer.logprobs import (
    LogProbs,
    Reader,
    log_probs,
    steered_log_probs,
)
from hiddenscope.analyses.steer.reads import Reads
from hiddenscope.model import Model
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.arrays import Floats

T = TypeVar("T")


class Measured(NamedTuple):
    """Log-probabilities before steering, and after it by site and strength."""

    before: LogProbs
    after: list[list[LogProbs]]

    @property
    def prompts_before(self) -> Floats:
        """Return [text, answer]: prompts are read at one position."""
        return np.array([text[0] for text in self.before])

    @property
    def prompts_after(self) -> Floats:
        """Return [site, strength, text, answer]."""
        sites = []
        for strengths in self.after:
            sites.append([[text[0] for text in texts] for texts in strengths])
        return np.array(sites)


class Sweep:
    """A direction added or ablated at one site after another, with every strength."""

    def __init__(
        self,
        model: Model,
        steered: Steered,
        how: How,
        strengths: tuple[float, ...],
        upwards: bool,
    ) -> None:
        self.model = model
        self.steered = steered
        self.how = how
        self.strengths = strengths
        self.upwards = upwards
        # Strength 0 is the model as it is, and is not run again.
        self.steps = tuple(strength for strength in strengths if strength)
        self.reader = Reader(model)
        self.notes: list[str] = []

    def intervention(self, site: Site) -> Intervention:
        """Return what steers at one site."""
        changed = sites_above(tuple(self.steered.vectors), site, self.upwards)
        vectors = {upper: self.steered.vectors[upper] for upper in changed}
        return Intervention(self.how, vectors, self.steps)

    def with_unchanged(self, steered: Sequence[T], before: T) -> list[T]:
        """Return one value for each strength: `before` where the strength is 0."""
        by_strength = dict(zip(self.steps, steered, strict=True))
        return [by_strength.get(strength, before) for strength in self.strengths]

    def tokens(self, reads: Reads) -> int:
        """Return how many tokens go through the model to measure some texts."""
        runs = 1 + len(self.steered.sites) * len(self.steps)
        return sum(reads.inputs.costs) * runs

    def capture(self, reads: Reads) -> States | Pair | None:
        """Capture the states at which passes are resumed; none inside a block."""
        whole = [site for site in self.steered.sites if not site.part]
        if not whole:
            return None
        return self.model.capture(reads.inputs, whole)

    def measure(
        self,
        reads: Reads,
        states: States | Pair | None,
        advance: Callable[[float], None],
    ) -> Measured:
        """Measure texts with the model as it is, and by site and strength."""
        before = log_probs(self.reader, reads, advance)
        after = []
        for site in self.steered.sites:
            steered: list[LogProbs] = []
            if self.steps:
                steered, note = steered_log_probs(
                    self.reader, reads, states, self.intervention(site), advance
                )
                if note and note not in self.notes:
                    self.notes.append(note)
            after.append(self.with_unchanged(steered, before))
        return Measured(before, after)

"""Influence over many texts, aligned by distance and depth."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.visibility.averages import (
    averages_dataset,
    averages_facts,
)
from hiddenscope.analyses.visibility.decay import estimate
from hiddenscope.analyses.visibility.facts import AlignedFacts
from hiddenscope.analyses.visibility.findings import measurement_facts
from hiddenscope.analyses.visibility.maps import (
    Axes,
    InfluenceMeasure,
    Measurement,
    cut_texts,
    influence_on_targets,
)
from hiddenscope.analyses.visibility.random_weights import RandomModel
from hiddenscope.analyses.visibility.sampling import (
    DistanceWindow,
    DrawnTarget,
    Sampling,
    draw_targets,
)
from hiddenscope.analyses.visibility.tallies import BATCHES, Tallies
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints


class DrawnTexts(NamedTuple):
    """Texts with the targets that were drawn of each.

    `batches` says in which batch of the tallies each text is counted.
    """

    inputs: Inputs
    targets: list[list[DrawnTarget]]
    batches: Ints
    window: DistanceWindow

    @property
    def target_count(self) -> int:
        """Return the number of targets of all texts."""
        return sum(map(len, self.targets))


def aligned(
    model: Model,
    inputs: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    sampling: Sampling,
    groups: Ints,
    seed: int,
) -> Result:
    """Average influence over texts by distance and depth, with intervals."""
    _check_enough(groups, sites)
    causal = model.anatomy.stack(sites[0]).causal
    window = DistanceWindow.of(min(inputs.lengths), causal)
    targets = _draw(inputs, len(sites), window, sampling, seed)
    group_count = int(groups.max()) + 1
    batches = groups % min(BATCHES, group_count)
    drawn = DrawnTexts(inputs, targets, batches, window)
    tallies = [_tally(model, drawn, sites, measure, "Looking back")]
    if sampling.baseline == "random":
        copy = RandomModel.of(model, seed)
        what = "Looking back with random weights"
        tallies.append(_tally(copy, drawn, sites, measure, what))
    estimates, batch_count = estimate(*tallies)
    data = averages_dataset(sites, window, estimates)
    averages: AlignedFacts = {
        "groups": group_count,
        "batches": round(batch_count, 1),
        "targets": drawn.target_count,
        "targets_per_text": sampling.per_text,
        "farthest": window.farthest,
        "deepest": tallies[0].deepest,
        "source_site": str(sites[0]),
        "site": str(sites[-1]),
        **averages_facts(estimates),
    }
    facts = measurement_facts(measure, sites, len(inputs), sum(inputs.lengths))
    # No map is shown, so none was cut, and there are no stacks to describe.
    facts["cut"] = False
    facts["stacks"] = []
    facts["aligned"] = averages
    return Result("visibility", data, facts, model.source(sites[0].stack))


def _check_enough(groups: Ints, sites: Sequence[Site]) -> None:
    """Refuse one group, which has no interval, and one site, which has no sources."""
    if groups.max() < 1:
        raise TextError(
            "No interval over these texts",
            "they all belong to one group, and what differs between groups is unknown",
            "Give texts of several groups, or Sampling(align='position').",
        )
    if len(sites) < 2:
        raise TextError(
            "No influence to average",
            f"{sites[0]} alone has no sites below it",
            "Choose at least two sites, such as 'layer.*'.",
        )


def _draw(
    inputs: Inputs,
    site_count: int,
    window: DistanceWindow,
    sampling: Sampling,
    seed: int,
) -> list[list[DrawnTarget]]:
    """Draw the targets of every text."""
    # The first site has no sites below it.
    rows = range(1, site_count)
    drawn = []
    for number, length in enumerate(inputs.lengths):
        # The draws of a text do not depend on how many texts there are.
        generator = np.random.default_rng([seed, number])
        places = window.places(length)
        drawn.append(draw_targets(rows, places, sampling.per_text, generator))
    return drawn


def _tally(
    model: Model | RandomModel,
    drawn: DrawnTexts,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    what: str,
) -> Tallies:
    """Sum up the shares of all texts, one text at a time."""
    batch_count = int(drawn.batches.max()) + 1
    tallies = Tallies(batch_count, len(sites), drawn.window)
    generator = torch.Generator().manual_seed(measure.seed)
    stack = sites[0].stack
    with (
        model.lock,
        autograd.restored(inference=False),
        progress.track(what, drawn.target_count) as advance,
    ):
        for number, targets in enumerate(drawn.targets):
            text = _up_to_last_target(model, drawn, number, stack)
            (length,) = text.of(stack).lengths
            axes = Axes(tuple(sites), {stack: length})
            measurement = Measurement(model, axes, measure, generator)
            influence = influence_on_targets(measurement, text, targets)
            batch = int(drawn.batches[number])
            for target, of_target in zip(targets, influence, strict=True):
                tallies.add(batch, target, of_target)
            advance(len(targets))
    return tallies


def _up_to_last_target(
    model: Model | RandomModel, drawn: DrawnTexts, number: int, stack: str | None
) -> Inputs:
    """Cut a text where its last target is: what follows that changes nothing."""
    text = drawn.inputs.some([number])
    (length,) = text.lengths
    switch = model.batching.rope_switch
    # With LongRoPE, the start of a long text has other states without the rest.
    is_long = switch is not None and length > switch
    if is_long or not drawn.window.causal:
        return text
    last = max(target.token for target in drawn.targets[number])
    return cut_texts(text, stack, last + 1)

"""Averages: influence over many texts, aligned by distance and depth."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.visibility.decay import (
    BATCHES,
    LOGARITHMIC,
    Estimate,
    Tallies,
    estimate,
)
from hiddenscope.analyses.visibility.maps import (
    Axes,
    InfluenceMeasure,
    Measurement,
    cut_after,
    influence_on_targets,
)
from hiddenscope.analyses.visibility.sampling import (
    DistanceWindow,
    Sampling,
    draw_targets,
)
from hiddenscope.analyses.visibility.story import (
    DECAYS,
    Averages,
    LawFit,
    RandomFit,
    VisibilityReport,
)
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    site_names,
    to_dataset,
)
from hiddenscope.sites import Site, summarise
from hiddenscope.states.arrays import Ints

if TYPE_CHECKING:
    import xarray

# The dim of each statistic that has a dim, and what it is.
STATISTICS = {
    "decay_below": ("distance", "share of a token in the influence of the site below"),
    "decay_first": (
        "distance",
        "share of a token in the influence of the first site on the last",
    ),
    "decay_depth": (
        "depth",
        "share of a site so many sites below in the influence of the nearest sites",
    ),
    "own_below": (
        "site",
        "share of the same token in the influence of the site below",
    ),
    "own_by_depth": (
        "depth",
        "share of the same token in the influence of a site so many sites below",
    ),
    "reach": ("source_site", "share of each site in the influence on the last"),
    "mean_distance": (
        "site",
        "mean distance of the influence of other tokens of the site below",
    ),
}
# The mean share of the own column is compared with a half.
HALF = 0.5


def average_texts(
    model: Model,
    inputs: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    sampling: Sampling,
    groups: Ints,
    seed: int,
) -> Result:
    """Average influence over texts by distance and depth, with intervals.

    `groups` are the numbers of the groups that the texts belong to.
    """
    # Others have no distance, no depth or no interval.
    require_groups(groups)
    stack = sites[0].stack
    if len({site.stack for site in sites}) > 1 or inputs.targets is not None:
        raise TextError(
            "Cannot align these texts by distance",
            "an encoder and a decoder have no distances between them",
            "Give Sampling(align='position'), or other sites or another measure.",
        )
    if len(sites) < 2:
        raise TextError(
            "No influence to average",
            f"{sites[0]} alone has no sites below it",
            "Choose at least two sites, such as 'layer.*'.",
        )
    causal = model.anatomy.stack_named(stack).causal
    window = DistanceWindow.of(min(inputs.lengths), causal)
    drawn = []
    for number, length in enumerate(inputs.lengths):
        # The draws of a text do not depend on how many texts there are.
        generator = np.random.default_rng([seed, number])
        # The first site has no sites below it.
        rows, places = range(1, len(sites)), window.places(length)
        drawn.append(draw_targets(rows, places, sampling.per_text, generator))
    target_count = sum(map(len, drawn))
    group_count = int(groups.max()) + 1
    batch_count = min(BATCHES, group_count)

    def tally(what: str, model: Model) -> Tallies:
        """Sum up the shares of all texts, one text at a time."""
        tallies = Tallies(batch_count, len(sites), window)
        generator = torch.Generator().manual_seed(measure.seed)
        with (
            model.lock,
            autograd.restored(inference=False),
            progress.track(what, target_count) as advance,
        ):
            for number, targets in enumerate(drawn):
                text = inputs.some([number])
                if causal:
                    last = max(target.token for target in targets)
                    text = cut_after(model, text, stack, last + 1)
                (length,) = text.of(stack).lengths
                axes = Axes(tuple(sites), {stack: length})
                measurement = Measurement(model, axes, measure, generator)
                influence = influence_on_targets(measurement, text, targets)
                for target, of_target in zip(targets, influence, strict=True):
                    tallies.add(int(groups[number]) % batch_count, target, of_target)
                advance(len(targets))
        return tallies

    tallies = [tally("Looking back", model)]
    if sampling.baseline == "random":
        random = model.randomised(seed)
        tallies.append(tally("Looking back with random weights", random))
    estimates, counted_batches = estimate(*tallies)
    averages = Averages(
        groups=group_count,
        batches=round(counted_batches, 1),
        targets=target_count,
        targets_per_text=sampling.per_text,
        farthest=window.farthest,
        deepest=tallies[0].deepest,
        source_site=str(sites[0]),
        site=str(sites[-1]),
        laws=[*_laws(estimates)],
        own_column=estimates["own_column"].guess(HALF),
        own_below=estimates["own_mean"].guess(HALF),
        own_first=estimates["own_first"].guess(HALF),
        opening=estimates["opening"].interval,
        locality=estimates["locality_trend"].guess(),
        random=[*_random_laws(estimates)] if len(tallies) > 1 else None,
    )
    report = VisibilityReport(
        measure=measure.name,
        probes=measure.probes or None,
        texts=len(inputs),
        tokens=sum(inputs.lengths),
        sites=summarise(sites),
        aligned=averages,
    )
    data = _dataset(sites, window, estimates)
    return Result("visibility", data, report, model.source(stack))


def require_groups(groups: Ints) -> None:
    """Refuse texts that no interval can be given over."""
    if groups.max() < 1:
        raise TextError(
            "No interval over these texts",
            "they all belong to one group, and what differs between groups is unknown",
            "Give texts of several groups, or Sampling(align='position').",
        )


def _dataset(
    sites: Sequence[Site], window: DistanceWindow, estimates: Mapping[str, Estimate]
) -> "xarray.Dataset":
    """Return every statistic that has a dim, with the ends of its interval."""
    names = site_names(sites)
    coords: Coordinates = {
        "site": names,
        "source_site": names,
        "distance": np.arange(window.farthest + 1),
        "depth": np.arange(1, len(sites)),
    }
    variables = {}
    for name, (dim, long_name) in STATISTICS.items():
        attributes: Attributes = {"units": "share"}
        if name == "mean_distance":
            attributes["units"] = "tokens"
        if name in LOGARITHMIC:
            attributes["scale"] = "log"
        for prefix, ending in (("", ""), ("random_", ", with random weights")):
            named: Attributes = {"long_name": f"{long_name}{ending}", **attributes}
            estimated = estimates.get(f"{prefix}{name}", ())
            for suffix, values in zip(("", "_low", "_high"), estimated, strict=False):
                known = np.isfinite(values)
                # A site that nothing was measured of has no share.
                if name == "reach":
                    known &= values > 0
                # Not every depth is counted; those that are not have no share.
                numbers = np.full(len(coords[dim]), np.nan, dtype=np.float32)
                numbers[: len(values)] = np.where(known, values, np.nan)
                variables[f"{prefix}{name}{suffix}"] = (dim,), numbers, named
    return to_dataset(variables, coords, {})


def _laws(estimates: Mapping[str, Estimate]) -> Iterator[LawFit]:
    """Yield both fits of each decay, and which is better where the data tell."""
    for decay in DECAYS:
        exponent = estimates[f"exponent_{decay}"]
        advantage = estimates[f"advantage_{decay}"]
        decays, side = exponent.side(), advantage.side()
        better: Literal["power", "exponential"] | None = None
        # Of shares that do not fall, neither law says anything.
        if decays == "above" and side != "undecided":
            better = "power" if side == "above" else "exponential"
        yield LawFit(
            source=decay,
            exponent=exponent.interval,
            rate=estimates[f"rate_{decay}"].interval,
            advantage=advantage.interval,
            explained=estimates[f"explained_{decay}"].interval.value,
            better=better,
            decays=decays,
        )


def _random_laws(estimates: Mapping[str, Estimate]) -> Iterator[RandomFit]:
    """Yield the exponents with random weights, and how much larger the model's are."""
    for decay in DECAYS:
        exponent = estimates[f"random_exponent_{decay}"]
        excess = estimates[f"excess_{decay}"]
        yield RandomFit(
            source=decay,
            exponent=exponent.interval,
            decays=exponent.side(),
            excess=excess.interval,
            verdict=excess.side(),
        )

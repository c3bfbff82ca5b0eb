"""Influence over many texts, aligned by distance and depth."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

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
from hiddenscope.analyses.visibility.facts import (
    AlignedFacts,
    BoundarySide,
    GuessFacts,
    IntervalFacts,
    LawFacts,
    RandomFacts,
)
from hiddenscope.analyses.visibility.maps import (
    Axes,
    InfluenceMeasure,
    cut_texts,
    influence_on_targets,
)
from hiddenscope.analyses.visibility.sampling import (
    DistanceWindow,
    DrawnTarget,
    Sampling,
    draw_targets,
)
from hiddenscope.errors import TextError
from hiddenscope.model import Model, load
from hiddenscope.modules import autograd
from hiddenscope.modules.module_copy import private_copy, to_random
from hiddenscope.passes import Inputs
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    to_dataset,
)
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints

if TYPE_CHECKING:
    import xarray

End: TypeAlias = Literal["below", "first"]
"""Whose influence: that of the site below, or that of the first site on the last."""
ENDS: tuple[End, ...] = ("below", "first")
# The dims of each statistic that has any, and what it is.
STATISTICS = {
    "decay_below": ("distance", "share of a token in the influence of the site below"),
    "decay_first": (
        "distance",
        "share of a token in the influence of the first site on the last",
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


def aligned(
    model: Model,
    inputs: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    sampling: Sampling,
    groups: Ints,
    seed: int,
) -> tuple["xarray.Dataset", AlignedFacts]:
    """Return averages over texts with intervals, and the facts that they show."""
    group_count = int(groups.max()) + 1
    if group_count < 2:
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
    causal = model.anatomy.stack(sites[0]).causal
    window = DistanceWindow.of(min(inputs.lengths), causal)
    drawn = _draw(inputs, len(sites), window, sampling, seed)
    models = {"Looking back": model}
    if sampling.baseline == "random":
        copied = private_copy(model.module, to_random(seed))
        models["Looking back with random weights"] = load((copied, None))
    tallies = []
    for what, of_model in models.items():
        tallied = _tally(of_model, inputs, sites, measure, drawn, groups, window, what)
        tallies.append(tallied)
    estimates, count = estimate(*tallies)
    data = _dataset(sites, window, estimates)
    facts: AlignedFacts = {
        "groups": group_count,
        "batches": round(count, 1),
        "targets": sum(map(len, drawn)),
        "targets_per_text": sampling.per_text,
        "farthest": window.farthest,
        "laws": [_law(end, estimates) for end in ENDS],
        "own_column": _guess(estimates["own_column"], 0.5),
        "own_below": _interval_facts(estimates["own_mean"]),
        "own_first": _interval_facts(estimates["own_first"]),
        "opening": _interval_facts(estimates["opening"]),
        "locality": _guess(estimates["locality_trend"], 0.0),
        "source_site": str(sites[0]),
        "site": str(sites[-1]),
    }
    if sampling.baseline is not None:
        facts["random"] = [_random(end, estimates) for end in ENDS]
    return data, facts


def _draw(
    inputs: Inputs, sites: int, window: DistanceWindow, sampling: Sampling, seed: int
) -> list[list[DrawnTarget]]:
    """Draw the targets of every text."""
    rows = range(1, sites)
    drawn = []
    for number, length in enumerate(inputs.lengths):
        generator = np.random.default_rng([seed, number])
        places = window.places(length)
        drawn.append(draw_targets(rows, places, sampling.per_text, generator))
    return drawn


def _tally(
    model: Model,
    inputs: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    drawn: Sequence[Sequence[DrawnTarget]],
    groups: Ints,
    window: DistanceWindow,
    what: str,
) -> Tallies:
    """Sum up the shares of all texts, one text at a time."""
    batches = min(BATCHES, int(groups.max()) + 1)
    tallies = Tallies(batches, len(sites), window)
    generator = torch.Generator().manual_seed(measure.seed)
    switch = model.batching.rope_switch
    stack = sites[0].stack
    with (
        model.lock,
        autograd.restored(inference=False),
        progress.track(what, sum(map(len, drawn))) as advance,
    ):
        for number, targets in enumerate(drawn):
            text = inputs.some([number])
            length = inputs.lengths[number]
            # What follows the last target changes nothing, except with LongRoPE.
            if window.causal and (switch is None or length <= switch):
                length = max(target.token for target in targets) + 1
                text = cut_texts(text, stack, length)
            axes = Axes(tuple(sites), {stack: length})
            influence = influence_on_targets(
                model, text, axes, targets, measure, generator
            )
            batch = int(groups[number]) % batches
            for target, of_target in zip(targets, influence, strict=True):
                tallies.add(batch, target, of_target)
            advance(len(targets))
    return tallies


def _dataset(
    sites: Sequence[Site], window: DistanceWindow, estimates: Mapping[str, Estimate]
) -> "xarray.Dataset":
    """Return every statistic that has dims, with the ends of its interval."""
    names = site_names(sites)
    coords: Coordinates = {
        "site": names,
        "source_site": names,
        "distance": np.arange(window.farthest + 1),
        "depth": np.arange(1, len(sites)),
    }
    variables: Variables = {}
    for name, (dim, long_name) in STATISTICS.items():
        units = "tokens" if name == "mean_distance" else "share"
        for prefix, words in (("", ""), ("random_", ", with random weights")):
            if f"{prefix}{name}" not in estimates:
                continue
            ends = zip(("", "_low", "_high"), estimates[f"{prefix}{name}"], strict=True)
            for suffix, values in ends:
                attributes: Attributes = {
                    "long_name": f"{long_name}{words}",
                    "units": units,
                }
                if name in LOGARITHMIC:
                    attributes["scale"] = "log"
                numbers = np.where(np.isfinite(values), values, np.nan)
                # A site that nothing was measured of has no share.
                if name == "reach":
                    numbers = np.where(numbers > 0, numbers, np.nan)
                variables[f"{prefix}{name}{suffix}"] = (
                    (dim,),
                    numbers.astype(np.float32),
                    attributes,
                )
    return to_dataset(variables, coords, {})


def _interval_facts(estimated: Estimate) -> IntervalFacts:
    value, low, high = map(_number, estimated)
    return {"value": value, "low": low, "high": high}


def _number(value: object) -> float | None:
    """Return a finite number; None where there is none."""
    number = float(value)  # type: ignore[arg-type]
    return number if np.isfinite(number) else None


def _verdict(estimated: Estimate, boundary: float) -> BoundarySide:
    """Say on which side of a boundary the whole interval is."""
    if estimated.low > boundary:
        return "above"
    if estimated.high < boundary:
        return "below"
    return "undecided"


def _guess(estimated: Estimate, boundary: float) -> GuessFacts:
    return {
        **_interval_facts(estimated),
        "boundary": boundary,
        "verdict": _verdict(estimated, boundary),
    }


def _law(end: End, estimates: Mapping[str, Estimate]) -> LawFacts:
    """Return both fits, and which is better where the data tell them apart."""
    decays = _verdict(estimates[f"exponent_{end}"], 0.0)
    verdict = _verdict(estimates[f"advantage_{end}"], 0.0)
    better: Literal["power", "exponential"] | None = None
    # Of shares that do not fall, neither law says anything.
    if decays == "above" and verdict != "undecided":
        better = "power" if verdict == "above" else "exponential"
    return {
        "source": end,
        "exponent": _interval_facts(estimates[f"exponent_{end}"]),
        "rate": _interval_facts(estimates[f"rate_{end}"]),
        "advantage": _interval_facts(estimates[f"advantage_{end}"]),
        "better": better,
        "decays": decays,
    }


def _random(end: End, estimates: Mapping[str, Estimate]) -> RandomFacts:
    """Return the exponent with random weights, and how much larger the model's is."""
    return {
        "source": end,
        "exponent": _interval_facts(estimates[f"random_exponent_{end}"]),
        "excess": _interval_facts(estimates[f"excess_{end}"]),
        "verdict": _verdict(estimates[f"excess_{end}"], 0.0),
    }

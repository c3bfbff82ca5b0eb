"""Outgoing: what a state does to the predictions at its own token and at later ones.

An effect is read off the gradient (`logit`), or it is what happens to the loss when the
state is replaced, by the mean state of its site or by that of another text. All are
[state, source site, distance]: the same tokens are drawn for every site.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product, takewhile
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.visibility.averages import (
    HALF,
    require_groups,
)
from hiddenscope.analyses.visibility.decay import (
    BATCHES,
    Estimate,
    NamedSums,
    jackknife,
)
from hiddenscope.analyses.visibility.maps import (
    Axes,
    InfluenceMeasure,
    Measurement,
    cut_after,
    influence_on_next_tokens,
)
from hiddenscope.analyses.visibility.sampling import (
    DistanceWindow,
    Sampling,
    draw_targets,
)
from hiddenscope.analyses.visibility.story import (
    INTERVENTIONS,
    Future,
    Outgoing,
    RandomFuture,
    VisibilityReport,
)
from hiddenscope.errors import SiteError, TextError
from hiddenscope.measures.grouped import CORRELATION, PLAIN, SHARE, Scale, rank_ends
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs
from hiddenscope.passes.edit import plan
from hiddenscope.passes.sweep import Patch, UnpatchedRun, run_unpatched, sweep
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    site_names,
    to_dataset,
)
from hiddenscope.sites import Site, summarise
from hiddenscope.states.arrays import Bools, Floats, Ints

# What is told of the effects, and of their sizes where they have a sign.
STATISTICS = {
    "outgoing": "effect of a state on a prediction",
    "future": "share of the effect that falls on later predictions",
    "together": "rank correlation of the effects on the own and on later predictions",
}
SIZES = {"": "", "size_": "size of the "}
RANDOM = {"": "", "random_": ", with random weights"}


class Drawn(NamedTuple):
    """The source tokens of each text, and another text that lends its states."""

    tokens: list[list[int]]
    lenders: list[int]
    farthest: int


def average_outgoing(
    model: Model,
    inputs: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    sampling: Sampling,
    groups: Ints,
    seed: int,
) -> Result:
    """Average what states do to predictions over texts, with intervals.

    `groups` are the numbers of the groups that the texts belong to.
    """
    _check_predicting(model, sites, measure)
    require_groups(groups)
    drawn = draw(inputs, sampling.per_text, groups, seed)
    ran = {"": _effects("Looking ahead", model, inputs, sites, measure, drawn)}
    if sampling.baseline == "random":
        random = model.randomised(seed)
        what = "Looking ahead with random weights"
        ran["random_"] = _effects(what, random, inputs, sites, measure, drawn)
    # What rounding makes of the sum of a state's effects.
    noise = {
        whose: rounding * (drawn.farthest + 1) for whose, (_, rounding) in ran.items()
    }
    counts = [len(tokens) for tokens in drawn.tokens]
    group_count = int(groups.max()) + 1
    batches = np.repeat(groups % min(BATCHES, group_count), counts)
    depth = model.anatomy.stacks[-1].depth
    reaching = np.array([reaches_later(site, depth) for site in sites])
    signed = measure.name in INTERVENTIONS
    effects = {whose: of_model for whose, (of_model, _) in ran.items()}
    estimates, counted_batches = estimate(
        effects, batches, reaching, signed=signed, noise=noise
    )
    report = VisibilityReport(
        measure=measure.name,
        probes=None,
        texts=len(inputs),
        tokens=sum(inputs.lengths),
        sites=summarise(sites),
        outgoing=Outgoing(
            groups=group_count,
            batches=round(counted_batches, 1),
            states=sum(counts),
            states_per_text=sampling.per_text,
            farthest=drawn.farthest,
            change=future_of(estimates, "", sites, reaching),
            size=future_of(estimates, "size_", sites, reaching),
        ),
    )
    coords: Coordinates = {
        "source_site": site_names(sites),
        "distance": np.arange(drawn.farthest + 1),
    }
    unit = "nats per L2" if measure.name == "logit" else "nats"
    units = {"outgoing": unit, "future": "share", "together": ""}
    variables = {}
    for (prefix, ending), (kind, beginning), (statistic, words) in product(
        RANDOM.items(), SIZES.items(), STATISTICS.items()
    ):
        name = f"{prefix}{kind}{statistic}"
        if name not in estimates:
            continue
        attributes: Attributes = {
            "long_name": f"{beginning}{words}{ending}",
            "units": units[statistic],
        }
        meaning = np.ones(len(sites), dtype=bool)
        if statistic == "future":
            # A share of what may be nothing has no meaning, unless it is 0 throughout.
            meaning = _clear(estimates, f"{prefix}{kind}") | ~reaching
        elif statistic == "together" and signed:
            meaning = _clear(estimates, f"{prefix}size_")
        for suffix, values in zip(("", "_low", "_high"), estimates[name], strict=True):
            numbers = values.astype(np.float32)
            dims = ("source_site", "distance")[: numbers.ndim]
            numbers[~meaning] = np.nan
            variables[f"{name}{suffix}"] = dims, numbers, attributes
    data = to_dataset(variables, coords, {})
    return Result("visibility", data, report, model.source())


def reaches_later(site: Site, depth: int) -> bool:
    """Tell whether a later prediction can depend on a state.

    Above the attention of the last block no token sees another.

    >>> [reaches_later(site, 3) for site in (Site(2), Site(3), Site(None))]
    [True, False, False]
    """
    in_last = site.layer is None or site.layer == depth
    return not in_last or site.part in ("attn.k", "attn.v")


def _check_predicting(
    model: Model, sites: Sequence[Site], measure: InfluenceMeasure
) -> None:
    """Refuse a model that predicts no next token, and what cannot be replaced."""
    if model.encoder_decoder or not model.anatomy.stacks[-1].causal:
        reason = "its predictions see the whole text, so none of them is a later one"
        if model.encoder_decoder:
            reason = "an encoder and a decoder have no distances between them"
        raise TextError(
            "Cannot align these texts by distance",
            reason,
            "Give Sampling(align='position') and influence='logit', or a causal model.",
        )
    depth = model.anatomy.stacks[-1].depth
    if not any(reaches_later(site, depth) for site in sites):
        raise TextError(
            "No influence to average",
            f"no later prediction depends on {summarise(sites)}",
            "Choose sites below the last layer, such as 'layer.*'.",
        )
    if measure.name in INTERVENTIONS:
        for site in sites:
            if site.index is not None:
                raise SiteError(
                    f"Cannot replace {site}",
                    "only whole states are replaced here",
                    "Choose layers or parts of blocks, or use hs.patch.",
                )
        plan(model.anatomy, dict.fromkeys(sites, lambda states: states))


def draw(inputs: Inputs, per_text: int, groups: Ints, seed: int) -> Drawn:
    """Draw tokens of each text that have a prediction at every distance.

    The first token is none of them: many models rest their attention on it.
    """
    shortest = min(inputs.lengths)
    farthest = DistanceWindow.of(shortest, causal=True).farthest
    # The last token has no next one.
    places = range(1, shortest - 1 - farthest)
    tokens, lenders = [], []
    for number in range(len(inputs)):
        generator = np.random.default_rng([seed, number])
        targets = draw_targets([0], places, per_text, generator)
        tokens.append([target.token for target in targets])
        others = np.flatnonzero(groups != groups[number])
        lenders.append(int(generator.choice(others)))
    return Drawn(tokens, lenders, farthest)


def _effects(
    what: str,
    model: Model,
    inputs: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    drawn: Drawn,
) -> tuple[Floats, float]:
    """Return the effects [state, source site, distance] of all texts, and how large one
    is by rounding alone: nothing of a gradient, and of a loss that is compared with
    another, half of the last digit of the largest logit or loss.
    """
    rounding = 0.0
    means = _means(model, inputs, sites) if measure.name == "mean" else {}
    total = sum(map(len, drawn.tokens))
    effects = []
    with (
        model.lock,
        autograd.restored(inference=False),
        progress.track(what, total) as advance,
    ):
        for number, tokens in enumerate(drawn.tokens):
            if measure.name == "logit":
                text = inputs.some([number])
                of_text = _gradients(
                    model, text, sites, measure, tokens, drawn.farthest
                )
            else:
                numbers = [number]
                if measure.name == "resample":
                    numbers.append(drawn.lenders[number])
                run, *lender = run_unpatched(model, inputs.some(numbers), sites)
                incoming = lender[0].states if lender else means
                of_text = replacement_effects(
                    model, run, sites, incoming, tokens, drawn.farthest
                )
                largest = float(run.logits.abs().max())
                # A loss is as large as the logarithm of the vocabulary's size.
                scale = max(largest, np.log(run.logits.shape[-1]))
                rounding = max(rounding, torch.finfo(model.dtype).eps / 2 * scale)
            effects.append(of_text)
            advance(len(tokens))
    return np.concatenate(effects), rounding


def _gradients(
    model: Model,
    text: Inputs,
    sites: Sequence[Site],
    measure: InfluenceMeasure,
    tokens: Sequence[int],
    farthest: int,
) -> Floats:
    """Return the norms of gradients of own and later log-probabilities."""
    (ids,) = text.ids
    text = cut_after(model, text, None, max(tokens) + farthest + 1)
    (length,) = text.lengths
    # Nothing is read of a prediction that has no next token.
    predicted = (*ids[1:], ids[-1])[:length]
    # Gradients of the head are taken at the last layer.
    top = Site(model.anatomy.stacks[-1].depth)
    axes = Axes(tuple(sorted({*sites, top})), {None: length})
    measurement = Measurement(model, axes, measure, torch.Generator())
    targets: set[int] = set()
    for token in tokens:
        targets.update(range(token, token + farthest + 1))
    influence = influence_on_next_tokens(measurement, text, predicted, targets)
    rows = [axes.sites.index(site) for site in sites]
    effects = [
        influence[token : token + farthest + 1, rows, token].T for token in tokens
    ]
    return np.stack(effects)


def _means(model: Model, inputs: Inputs, sites: Sequence[Site]) -> dict[Site, Tensor]:
    """Return the mean state of each site, over all tokens but the first of each text.

    They are [token, width], the same for each token of the longest text.
    """
    sums: dict[Site, Tensor] = {}
    tokens = sum(inputs.lengths) - len(inputs)
    with progress.track("Averaging states", len(inputs)) as advance:
        for number in range(len(inputs)):
            states = model.capture(inputs.some([number]), tuple(sites))
            for site in sites:
                sums[site] = sums.get(site, 0) + states[site][1:].double().sum(0)
            advance(1)
    longest = max(inputs.lengths)
    return {site: (sums[site] / tokens).expand(longest, -1) for site in sites}


def replacement_effects(
    model: Model,
    run: UnpatchedRun,
    sites: Sequence[Site],
    incoming: Mapping[Site, Tensor],
    tokens: Sequence[int],
    farthest: int,
) -> Floats:
    """Return how much the loss rises when a state is replaced by an incoming one.

    It is [token, source site, distance]: the loss of the true next token, at the token
    of the state and at as many later ones. A token's sites go through the model
    together.
    """
    depth = model.anatomy.stacks[-1].depth
    ids = torch.tensor(run.ids, device=run.logits.device)
    effects = []
    for token in tokens:
        at = range(token, token + farthest + 1)
        inputs = cut_after(model, run.inputs, None, at.stop)
        (length,) = inputs.lengths
        states = {site: state[:length] for site, state in run.states.items()}
        part = replace(run, inputs=inputs, states=states)
        read = partial(_log_probabilities, ids=ids[at.start + 1 : at.stop + 1])
        variants = [
            [Patch(site, (token,), incoming[site][token : token + 1])] for site in sites
        ]
        swept = sweep(model, part, variants, at, read=read)
        before = read(run.logits[None, at.start : at.stop])
        effects.append((before - swept.values).cpu().numpy())
    rises = np.stack(effects)
    # Where later tokens do not see the state, only rounding differs.
    blind = [not reaches_later(site, depth) for site in sites]
    rises[:, blind, 1:] = 0
    return rises


def _log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability of each id, [variant, token], in float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_ids = wide.gather(-1, ids.to(wide.device).expand(len(wide), -1)[..., None])
    return (of_ids[..., 0] - wide.logsumexp(-1)).double()


def estimate(
    effects: Mapping[str, Floats],
    batches: Ints,
    reaching: Bools,
    *,
    signed: bool,
    noise: Mapping[str, float] = MappingProxyType({}),
) -> tuple[dict[str, Estimate], float]:
    """Return every statistic with its interval, and how many batches count.

    `effects` are [state, source site, distance], those with random weights by the name
    `random_`. If they are signed, names that begin with `size_` are of their sizes.
    `noise` is what rounding makes of the sum of a state's effects: the statistic
    `total` is without it.
    """
    count = int(batches.max()) + 1
    sums = {
        # The jackknife weighs batches by their targets.
        "targets": np.bincount(batches, minlength=count)[:, None].astype(float),
        # What a part of the batches leaves out is 0 in the sum of its rows.
        "present": np.eye(count),
    }
    arrays = dict(effects)
    if signed:
        for whose, of_model in effects.items():
            arrays[f"{whose}size_"] = np.abs(of_model)
    for name, array in arrays.items():
        summed = np.zeros((count, *array.shape[1:]))
        np.add.at(summed, batches, array)
        sums[name] = summed

    def statistics(part: NamedSums) -> NamedSums:
        states = part["present"][batches] > 0
        # Thirds of the sites that reach later predictions.
        first, last = ends(reaching)
        numbers = {}
        for name, array in arrays.items():
            summed = part[name]
            totals = summed.sum(1)
            with np.errstate(divide="ignore", invalid="ignore"):
                # Of nothing, a share is 0 and not -0.
                future = summed[:, 1:].sum(1) / totals + 0.0
            future = np.where(reaching, future, 0.0)
            rounding = noise.get(name.removesuffix("size_"), 0.0)
            of_array = {
                "outgoing": summed / states.sum(),
                "total": totals / states.sum() - rounding,
                "future": future,
                "mean": future[reaching].mean(),
                "first": future[first].mean(),
                "last": future[last].mean(),
            }
            of_array["fall"] = of_array["first"] - of_array["last"]
            of_array["together"] = _rank_correlation(array[states], reaching)
            of_array["together_mean"] = of_array["together"][reaching].mean()
            for statistic, value in of_array.items():
                numbers[f"{name}{statistic}"] = np.asarray(value)
        for kind in SIZES:
            if f"random_{kind}" in arrays:
                for statistic in ("mean", "fall"):
                    of_random = numbers[f"random_{kind}{statistic}"]
                    excess = numbers[f"{kind}{statistic}"] - of_random
                    numbers[f"{kind}excess_{statistic}"] = excess
        return numbers

    estimates, counted = jackknife(sums, statistics, partial(_scale, signed=signed))
    for name, estimated in estimates.items():
        if "together" in name:
            # Few states go in one order by chance, with and without any batch.
            low, high = rank_ends(estimated.value, len(batches))
            estimates[name] = estimated.widened(low, high)
        elif signed and _is_share(name):
            # Of a rise, a part may be below 0. It counts as none.
            estimates[name] = Estimate(*(np.clip(end, 0, 1) for end in estimated))
    return estimates, counted


def _is_share(name: str) -> bool:
    """Tell a share from a difference of shares, and from all else."""
    statistic = name.removeprefix("random_").removeprefix("size_")
    return statistic in ("future", "mean", "first", "last")


def _scale(name: str, *, signed: bool) -> Scale:
    """Return the scale on which a statistic varies evenly."""
    if "together" in name:
        return CORRELATION
    # A size has no parts below 0, nor has a norm.
    if _is_share(name) and ("size_" in name or not signed):
        return SHARE
    return PLAIN


def ends(reaching: Bools) -> tuple[Ints, Ints]:
    """Return the first and the last third of the marked places."""
    places = np.flatnonzero(reaching)
    third = max(1, len(places) // 3)
    return places[:third], places[-third:]


def _rank_correlation(effects: Floats, reaching: Bools) -> Floats:
    """Return Spearman's correlation of own and later effects over the states of a site.

    It is NaN at a site that does not reach later predictions.
    """
    from scipy.stats import rankdata

    own_ranks = rankdata(effects[..., 0], axis=0)
    later_ranks = rankdata(effects[..., 1:].sum(-1), axis=0)
    x, y = own_ranks - own_ranks.mean(0), later_ranks - later_ranks.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = (x * y).sum(0) / np.sqrt((x**2).sum(0) * (y**2).sum(0))
    return np.where(reaching, correlation, np.nan)


def _clear(estimates: Mapping[str, Estimate], prefix: str) -> Bools:
    """Mark the sites whose effect is clearly above 0 in sum, so that it has shares."""
    total = estimates[f"{prefix}total"]
    # Norms and sizes are never below 0.
    signed = "size_total" in estimates and not prefix.endswith("size_")
    least = total.low if signed else total.value
    return least > 0


def future_of(
    estimates: Mapping[str, Estimate],
    kind: str,
    sites: Sequence[Site],
    reaching: Bools,
) -> Future | None:
    """Say what the shares of the effects, or of their sizes, come to."""
    if f"{kind}future" not in estimates:
        return None
    shares, clear = estimates[f"{kind}future"], _clear(estimates, kind)
    below, above = clear & (shares.high < HALF), clear & (shares.low > HALF)
    places = np.flatnonzero(reaching).tolist()
    own_from = later_until = None
    # From either end on, as long as every site is on its side: one test in a fixed
    # order after the other, so that all that is claimed holds at the level of one.
    for place in takewhile(below.__getitem__, reversed(places)):
        own_from = str(sites[place])
    for place in takewhile(above.__getitem__, places):
        later_until = str(sites[place])
    first, last = ends(reaching)
    compared = clear[first].all() and clear[last].all() and len(places) > 1
    unclear = [sites[place] for place in places if not clear[place]]

    unknown = Estimate(*np.full(3, np.nan))

    def of_ends(name: str, *, whose: str = "") -> Estimate:
        """Return an estimate of the ends; not a number where it has no meaning."""
        of_whom = _clear(estimates, f"{whose}{kind}")
        known = compared and of_whom[first].all() and of_whom[last].all()
        return estimates[name] if known else unknown

    random = None
    if f"random_{kind}future" in estimates:
        everywhere = clear[reaching].all()
        everywhere &= _clear(estimates, f"random_{kind}")[reaching].all()
        excess = estimates[f"{kind}excess_mean"]
        random = RandomFuture(
            first=of_ends(f"random_{kind}first", whose="random_").interval,
            last=of_ends(f"random_{kind}last", whose="random_").interval,
            fall=of_ends(f"random_{kind}fall", whose="random_").guess(),
            excess=(excess if everywhere else unknown).guess(),
            excess_fall=of_ends(f"{kind}excess_fall", whose="random_").guess(),
        )
    return Future(
        own_from=own_from,
        later_until=later_until,
        first_sites=summarise([sites[place] for place in first]),
        last_sites=summarise([sites[place] for place in last]),
        first=of_ends(f"{kind}first").interval,
        last=of_ends(f"{kind}last").interval,
        fall=of_ends(f"{kind}fall").guess(),
        together=estimates[f"{kind}together_mean"].guess(),
        unclear=summarise(unclear) if unclear else None,
        random=random,
    )

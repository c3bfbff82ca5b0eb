"""Whole maps of influence: what is measured, the labelled arrays, and the report.

The report says how much of the influence on a state comes from its own token, how
influence decays with the distance in tokens, and how far back in layers it reaches.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.visibility.averages import average_texts
from hiddenscope.analyses.visibility.maps import (
    Axes,
    InfluenceMeasure,
    Measurement,
    cut_texts,
    influence_on_log_probability,
    influence_on_states,
)
from hiddenscope.analyses.visibility.outgoing import average_outgoing
from hiddenscope.analyses.visibility.sampling import Sampling
from hiddenscope.analyses.visibility.story import (
    INTERVENTIONS,
    Cross,
    Distances,
    MeasureName,
    MostSeen,
    OnPredictions,
    OnStates,
    OwnBelow,
    OwnFirst,
    Reach,
    Share,
    SourceInfluence,
    SourceShare,
    VisibilityReport,
)
from hiddenscope.errors import PassError, TextError, TooLarge
from hiddenscope.interface import HEAD
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    column_coords,
    site_names,
    stack_column,
    text_array,
    to_dataset,
)
from hiddenscope.results.drawing import MAP
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import Tokens
from hiddenscope.states.arrays import Floats
from hiddenscope.texts import Labelled, copy_key, number_groups

if TYPE_CHECKING:
    import xarray

MEASURES = {
    "l1": ("L1 norm of the gradient of |h|₁/|h|₂", "L1"),
    "frobenius": ("Frobenius norm of the Jacobian", "L2"),
    "relative": ("relative change of the target per relative change of the source", ""),
    "logit": ("norm of the gradient of a token's log-probability", "nats per L2"),
}
# What there is of each site, by its dim.
ALONG = {
    "own_below": (
        "site",
        "share of the same token in the influence of the site below",
    ),
    "own_first": (
        "site",
        "share of the same token in the influence of the first site",
    ),
    "reach": (
        "source_site",
        "influence of each site on the last, summed over tokens",
    ),
}
DECAYS = {
    "decay_below": "influence of the site below, relative to that of the same token",
    "decay_first": (
        "influence of the first site on the last, relative to that of the same token"
    ),
}
# The first token of a causal text is told apart from the others from this length on: in
# a shorter text too few others are left for a share of their own.
FEWEST_TOKENS = 4


def map_influence(
    model: ModelLike,
    texts: Texts | Inputs | Labelled,
    *,
    influence: MeasureName,
    sites: SitePatterns,
    target: str | int | None,
    sampling: Sampling,
    seed: int,
) -> Result:
    """Map the influence in one text, or average that in several.

    Whole maps of several texts are averaged place by place.
    """
    model = as_model(model)
    selected = model.anatomy.select(sites)
    if not selected:
        raise PassError(
            "No sites to measure",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    width = max(map(model.anatomy.width, selected))
    measure = InfluenceMeasure.of(influence, sampling.probes, seed, width)
    if target is not None and influence != "logit":
        raise TextError(
            f"Cannot use the target {target!r:.40}",
            f"the measure {influence} reads no token",
            "Give it with influence='logit'.",
        )
    predicting = influence == "logit" or influence in INTERVENTIONS
    if predicting and not HEAD.is_met(model.anatomy):
        raise HEAD.refusal("read predictions of", model.name)
    inputs = model.encode(texts.texts if isinstance(texts, Labelled) else texts)
    # Whole maps of many texts take too long, so a few states of each are drawn.
    if len(inputs) > 1 and sampling.align == "distance":
        if target is not None:
            raise TextError(
                f"Cannot use the target {target!r:.40} for several texts",
                "the loss of the true next token is averaged",
                "Leave it out, or give Sampling(align='position').",
            )
        # Copies belong together, as do texts that the data keep together.
        copies = [copy_key(text) for text in inputs.texts or inputs.ids]
        groups = number_groups(copies, getattr(texts, "groups", None))
        average = average_texts
        if predicting:
            average = average_outgoing
        return average(model, inputs, selected, measure, sampling, groups, seed)
    if influence in INTERVENTIONS:
        raise TextError(
            f"No map of the measure {influence}",
            "a state is replaced by what other texts have, and the effects are averaged"
            " by distance",
            "Give several texts, without align='position'; for one, hs.patch.",
        )
    stacks = _stacks(model, inputs, selected, measure)
    predicted = []
    if measure.name == "logit":
        *_, last_stack = stacks.values()
        predicted = _predicted(model, last_stack, inputs, target)
    lengths = {name: min(of_stack.lengths) for name, of_stack in stacks.items()}
    is_cut = any(len(set(of_stack.lengths)) > 1 for of_stack in stacks.values())
    for name, length in lengths.items():
        inputs = cut_texts(inputs, name, length)
    axes = Axes(selected, lengths)
    values, half_interval = _mean_map(model, inputs, axes, measure, predicted)
    # A tokenizer serves one thread at a time.
    with model.lock:
        encoder = model.text_encoder
        tokens = {name: encoder.tokens(inputs.of(name)) for name in lengths}
        strings = [encoder.strings(row) for row in predicted]
    data = _dataset(axes, measure, values, half_interval, tokens, strings)
    # What is said follows the numbers that are kept, in float32.
    values = data[measure.name].values.astype(np.float64)
    is_logit = measure.name == "logit"
    sum_up = _on_predictions if is_logit else _on_states
    report = VisibilityReport(
        measure=measure.name,
        probes=measure.probes or None,
        texts=len(inputs),
        tokens=axes.tokens,
        sites=summarise(selected),
        cut=is_cut,
        stacks=[*sum_up(data, values, axes, model)],
        cross=None if is_logit else _across_stacks(values, axes),
    )
    return Result("visibility", data, report, model.source(selected[0].stack))


def _stacks(
    model: Model, inputs: Inputs, sites: Sequence[Site], measure: InfluenceMeasure
) -> dict[str | None, Inputs]:
    """Return the texts of each stack; refuse texts that cannot be averaged.

    An encoder-decoder without targets has only its encoder, unless its decoder is
    measured.
    """
    names: list[str | None] = [None]
    if model.encoder_decoder:
        names = ["encoder", "decoder"]
        if inputs.targets is None:
            of_decoder = any(site.stack == "decoder" for site in sites)
            if of_decoder or measure.name == "logit":
                model.text_encoder.required_start()
            names = ["encoder"]
    stacks = {name: inputs.of(name) for name in names}
    tokens = 0
    for name, of_stack in stacks.items():
        shortest, longest = min(of_stack.lengths), max(of_stack.lengths)
        tokens += shortest
        if shortest < longest and not model.anatomy.stack_named(name).causal:
            reason = (
                f"they have {shortest:,} to {longest:,} tokens, and in this model a"
                " state depends on the whole text"
            )
            raise TextError(
                "Cannot average over these texts",
                reason,
                "Give texts with the same number of tokens.",
            )
    if tokens < 2:
        raise TextError(
            "No influence to measure",
            "a text has only one token, which no other token can influence",
            "Give longer texts.",
        )
    return stacks


def _predicted(
    model: Model, of_stack: Inputs, inputs: Inputs, target: str | int | None
) -> list[tuple[int, ...]]:
    """Return the token whose log-probability is measured at each place of every text.

    Without a target: in a causal stack the token that follows, and after the last what
    the model predicts; in an encoder the token that is there.
    """
    if target is not None:
        with model.lock:
            token = model.text_encoder.single(target)
        return [(token,) * len(ids) for ids in of_stack.ids]
    if not model.anatomy.stacks[-1].causal:
        return list(of_stack.ids)
    predicted = []
    for number, ids in enumerate(of_stack.ids):
        logits = record(model, inputs.some([number]), (), logits=True).logits
        assert logits is not None
        predicted.append((*ids[1:], int(logits[-1].argmax())))
    return predicted


def _mean_map(
    model: Model,
    inputs: Inputs,
    axes: Axes,
    measure: InfluenceMeasure,
    predicted: Sequence[Sequence[int]],
) -> tuple[Floats, Floats]:
    """Return the mean of the texts' maps, and half its 95% interval if estimated.

    Each text has probes of its own, so that the errors are independent and shrink with
    the number of texts.
    """
    count = len(inputs)
    targets = int(axes.filled.sum())
    if predicted:
        targets = axes.lengths[axes.last_stack]
    sites, tokens = axes.cells
    rows = tokens if predicted else sites * tokens
    # The sums, one text's map and the mean, in float64; an interval has as many again.
    copies = 6 if measure.estimated else 3
    size = rows * sites * tokens * 8 * copies
    free = free_memory()
    if size > SHARE_OF_FREE_MEMORY * free:
        raise TooLarge(
            f"A map of {sites} sites and {tokens:,} tokens does not fit in memory",
            f"it takes {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "Choose fewer sites, such as sites='layer.0,layer.-1', or a shorter text.",
        )
    total = np.zeros(())
    squares = np.zeros(())
    generator = torch.Generator().manual_seed(measure.seed)
    measurement = Measurement(model, axes, measure, generator)
    with (
        model.lock,
        autograd.restored(inference=False),
        progress.track("Looking back", targets * count) as advance,
    ):
        for number in range(count):
            text = inputs.some([number])
            if predicted:
                values, half = influence_on_log_probability(
                    measurement, text, predicted[number], advance
                )
            else:
                values, half = influence_on_states(measurement, text, advance)
            total = total + values
            squares = squares + half**2
    return total / count, np.sqrt(squares) / count


def _dataset(
    axes: Axes,
    measure: InfluenceMeasure,
    values: Floats,
    half_interval: Floats,
    tokens: Mapping[str | None, Tokens],
    predicted: Sequence[Sequence[str]],
) -> "xarray.Dataset":
    """Return the map as one Dataset; with two stacks, cells without a state are NaN."""
    names = site_names(axes.sites)
    empty = ~axes.filled
    coords: Coordinates = {"source_site": names}
    if measure.name == "logit":
        last = axes.last_stack
        coords |= _token_coords({last: tokens[last]}, "")
        coords |= _token_coords(tokens, "source_")
        targets = []
        # The rows of longer texts go on after the shortest ends.
        for strings in zip(*predicted, strict=False):
            # The token that all texts predict here, or nothing.
            targets.append(strings[0] if len(set(strings)) == 1 else "")
        coords["target"] = "token", text_array(targets)
    else:
        empty = empty | empty[:, :, None, None]
        coords["site"] = names
        coords |= _token_coords(tokens, "")
    long_name, units = MEASURES[measure.name]
    arrays: dict[str, tuple[Floats, str]] = {measure.name: (values, long_name)}
    if measure.estimated:
        arrays[f"{measure.name}_error"] = half_interval, "half the 95% interval"
    variables = {}
    for name, (array, words) in arrays.items():
        masked = np.where(empty, np.nan, array).astype(np.float32)
        attributes: Attributes = {"long_name": words, "units": units, "scale": "log"}
        variables[name] = MAP[-masked.ndim :], masked, attributes
    texts = {}
    for stack, of_stack in tokens.items():
        if of_stack.texts is not None:
            attribute = "targets" if stack == "decoder" else "texts"
            texts[attribute] = list(of_stack.texts)
    return to_dataset(variables, coords, texts)


def _token_coords(stacks: Mapping[str | None, Tokens], prefix: str) -> Coordinates:
    """Label each place by the token that all texts have there, or by its position."""
    columns = []
    counts = {}
    for name, tokens in stacks.items():
        length = int(tokens.lengths[0])
        counts[str(name)] = length
        for place, ids in enumerate(tokens.ids.reshape(-1, length).T):
            column = place, int(ids[0]), tokens.strings[place]
            if (ids != ids[0]).any():
                column = place, -1, str(place)
            columns.append(column)
    dim = f"{prefix}token"
    coords: Coordinates = {**column_coords(columns, dim=dim, prefix=prefix)}
    if len(stacks) > 1:
        coords[f"{prefix}stack"] = dim, stack_column(counts)
    return coords


def _on_states(
    data: "xarray.Dataset", values: Floats, axes: Axes, model: Model
) -> Iterator[OnStates]:
    """Put shares, reach and decays into the data; yield the report of each stack."""
    within = {}
    for stack, length in axes.lengths.items():
        rows, columns = axes.rows(stack), axes.columns(stack)
        if not rows or length < 2:
            continue
        on_stack = values[rows][:, columns]
        influence = on_stack[:, :, rows][..., columns]
        names = site_names(axes.sites[row] for row in rows)
        causal = model.anatomy.stack_named(stack).causal
        report, within[stack] = _within_stack(influence, names, stack, causal)
        yield report
    measured, *_ = data.data_vars.values()
    for name, (dim, long_name) in ALONG.items():
        attributes = {"long_name": long_name, "units": "share"}
        if name == "reach":
            attributes |= {"units": measured.attrs["units"], "scale": "log"}
        numbers = np.full(len(axes.sites), np.nan, dtype=np.float32)
        for stack, arrays in within.items():
            numbers[axes.rows(stack)] = arrays[name]
        data[name] = dim, numbers, attributes
    _put_decays(data, within)


def _within_stack(
    influence: Floats, names: Sequence[str], stack: str | None, causal: bool
) -> tuple[OnStates, dict[str, Floats]]:
    """Sum up the influence [site, token, source site, source token] within a stack.

    The arrays are shares and reach along the sites, and decays by distance.
    """
    count, tokens = influence.shape[:2]
    below = [influence[site, :, site - 1] for site in range(1, count)]
    shares = [_same_token_share(of_site, causal) for of_site in below]
    own_below = np.array([np.nan, *shares])
    own_first = [_same_token_share(on_site[:, 0], causal) for on_site in influence]
    reach = influence[-1].sum(-1).mean(0)
    decay_first = _decay(influence[-1, :, 0], causal)
    decay_below = np.full(len(decay_first), np.nan)
    known = [
        decay for decay in (_decay(part, causal) for part in below) if decay[0] > 0
    ]
    if known:
        decay_below = np.mean(known, axis=0)
    least_to_most = first = ends = first_share = None
    # The final norm mixes no tokens: its share of 1 says nothing.
    mixing = np.where(own_below < 1, own_below, np.nan)
    if np.isfinite(mixing).any():
        lowest, highest = int(np.nanargmin(mixing)), int(np.nanargmax(mixing))
        least_to_most = OwnBelow(
            mean=float(np.nanmean(mixing)),
            least=Share(site=names[lowest], share=float(mixing[lowest])),
            most=Share(site=names[highest], share=float(mixing[highest])),
        )
        if np.isfinite(own_first[-1]):
            first = OwnFirst(site=names[-1], source_site=names[0], share=own_first[-1])
    if causal and tokens >= FEWEST_TOKENS:
        # The mean over the tokens from the third on, of the site below.
        first_shares = []
        for of_site in below:
            later = of_site[2:]
            total = later.sum(-1)
            others = total - np.diagonal(later, 2)
            # Where nothing but rounding comes from other tokens, a share means nothing.
            rows = others > 1e-9 * total
            of_first = later[rows, 0] / others[rows]
            first_shares += of_first.tolist()
        first_share = float(np.mean(first_shares)) if first_shares else 0.0
    if below:
        bottom, top = float(reach[0]), float(reach[-2])
        ends = Reach(
            site=names[-1],
            first=SourceInfluence(source_site=names[0], influence=bottom),
            below=SourceInfluence(source_site=names[-2], influence=top),
            ratio=bottom / top if top > 0 else None,
        )
    # The last site does not reach itself.
    reach[-1] = np.nan
    report = OnStates(
        stack=stack,
        own_below=least_to_most,
        own_first=first,
        first_token_share=first_share,
        distance_below=_distances(decay_below),
        distance_first=_distances(decay_first),
        reach=ends,
    )
    arrays = {
        "own_below": own_below,
        "own_first": np.array(own_first),
        "reach": reach,
        "decay_below": decay_below,
        "decay_first": decay_first,
    }
    return report, arrays


def _put_decays(
    data: "xarray.Dataset", within: Mapping[str | None, Mapping[str, Floats]]
) -> None:
    """Put one variable for each stack, as long as the farthest distance in any."""
    lengths = [len(arrays["decay_first"]) for arrays in within.values()]
    for name, long_name in DECAYS.items():
        attributes = {"long_name": long_name, "units": "share", "scale": "log"}
        for stack, arrays in within.items():
            decay = arrays.get(name)
            if decay is not None and np.isfinite(decay).any():
                padded = np.full(max(lengths), np.nan, dtype=np.float32)
                padded[: len(decay)] = decay
                variable = f"{name}_{stack}" if stack else name
                data[variable] = "distance", padded, attributes
    if "distance" in data.dims:
        data.coords["distance"] = np.arange(data.sizes["distance"])


def _same_token_share(influence: Floats, causal: bool) -> float:
    """Return the mean share on the diagonal of [token, source token]."""
    # The first token of a causal text sees only itself.
    first = 1 if causal else 0
    total = influence.sum(-1)[first:]
    influenced = total > 0
    if not influenced.any():
        return np.nan
    shares = np.diagonal(influence)[first:][influenced] / total[influenced]
    return float(shares.mean())


def _decay(influence: Floats, causal: bool) -> Floats:
    """Return the mean of [token, source token] at each distance.

    It is relative to that of the same token, and NaN where that has no influence.
    """
    # Attention rests on the first token of a causal text whatever the distance.
    if causal and len(influence) >= FEWEST_TOKENS:
        influence = influence[1:, 1:]
    # An encoder looks both ways.
    both = influence if causal else (influence + influence.T) / 2
    distances = range(len(both))
    means = np.array([np.diagonal(both, -distance).mean() for distance in distances])
    if not means[0] > 0:
        return np.full(len(means), np.nan)
    relative: Floats = means / means[0]
    return relative


def _distances(decay: Floats) -> Distances | None:
    """Return the distances within which half and 90% of others' influence lie."""
    others = np.nan_to_num(decay[1:])
    total = others.sum()
    if not total > 0:
        return None
    # Rounding must not put it one token farther.
    shares = np.cumsum(others) / total + 1e-9
    return Distances(
        half_within=int(np.argmax(shares >= 0.5)) + 1,
        nine_tenths_within=int(np.argmax(shares >= 0.9)) + 1,
        farthest=len(others),
        at_one=float(others[0]),
        at_farthest=float(others[-1]),
    )


def _across_stacks(values: Floats, axes: Axes) -> Cross | None:
    """Return the share of the encoder's last site in the influence on the decoder's.

    The other share is that of the decoder's first site.
    """
    encoders, decoders = axes.rows("encoder"), axes.rows("decoder")
    if len(axes.lengths) < 2 or not encoders or not decoders:
        return None
    encoder, first, last = encoders[-1], decoders[0], decoders[-1]
    of_decoder = axes.columns("decoder")
    influence = values[last, of_decoder]
    cross = influence[:, encoder, axes.columns("encoder")].sum(-1)
    share = cross / (cross + influence[:, first, of_decoder].sum(-1))
    return Cross(
        site=str(axes.sites[last]),
        source_site=str(axes.sites[encoder]),
        beside=str(axes.sites[first]),
        share=float(share.mean()),
    )


def _on_predictions(
    data: "xarray.Dataset", values: Floats, axes: Axes, model: Model
) -> Iterator[OnPredictions]:
    """Yield what the predictions of the last stack see of its own states, if any.

    `values` is [token, source site, source token].
    """
    stack = axes.last_stack
    rows, columns = axes.rows(stack), axes.columns(stack)
    if not rows or axes.lengths[stack] < 2:
        return
    causal = model.anatomy.stack_named(stack).causal
    inside = values[:, rows][..., columns]
    shares = np.full(len(axes.sites), np.nan)
    for place, row in enumerate(rows):
        shares[row] = _same_token_share(inside[:, place], causal)
    attributes = {"long_name": "share of the token that predicts", "units": "share"}
    data["own"] = "source_site", shares.astype(np.float32), attributes
    ends = []
    # One site is both the first and the last.
    for row in sorted({rows[0], rows[-1]}):
        if np.isfinite(shares[row]):
            site = str(axes.sites[row])
            ends.append(SourceShare(source_site=site, share=float(shares[row])))
    last = inside[-1]
    site_place, token = np.unravel_index(np.argmax(last), last.shape)
    strings = data["source_string"].values[columns]
    decay = _decay(inside[:, 0], causal)
    _put_decays(data, {None: {"decay_first": decay}})
    yield OnPredictions(
        stack=stack,
        targets=data["target"].values.tolist(),
        own=ends,
        most_seen=MostSeen(
            source_site=str(axes.sites[rows[site_place]]), source_token=strings[token]
        ),
        distance_first=_distances(decay),
    )

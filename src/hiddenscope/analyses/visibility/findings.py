"""Findings of a map of influence: labelled arrays, and the facts they show.

How much of the influence on a state comes from its own token, how influence decays with
the distance in tokens, and how far back in layers it reaches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.visibility.maps import Axes, InfluenceMeasure
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    column_coords,
    site_names,
    stack_column,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Tokens
from hiddenscope.states.arrays import Bools, Floats

if TYPE_CHECKING:
    import xarray

MAP = ("site", "token", "source_site", "source_token")
MEASURES = {
    "l1": ("L1 norm of the gradient of |h|₁/|h|₂", "L1"),
    "frobenius": ("Frobenius norm of the Jacobian", "L2"),
    "relative": ("relative change of the target per relative change of the source", ""),
    "logit": ("norm of the gradient of a token's log-probability", "nats per L2"),
}
SHARES = {
    "own_below": "share of the same token in the influence of the site below",
    "own_first": "share of the same token in the influence of the first site",
}
DECAYS = {
    "decay_below": "influence of the site below, relative to that of the same token",
    "decay_first": (
        "influence of the first site on the last, relative to that of the same token"
    ),
}
# Influence by distance, of each decay and stack.
StackDecays: TypeAlias = dict[str, dict[str | None, Floats]]
# The first token of a causal text is told apart from the others from this length on: in
# a shorter text too few others are left for a share of their own.
FEWEST_TOKENS = 4


def measurement_facts(
    measure: InfluenceMeasure, sites: Sequence[Site], texts: int, tokens: int
) -> dict[str, Any]:
    """Return what was measured."""
    return {
        "measure": measure.name,
        "probes": measure.probes or None,
        "texts": texts,
        "tokens": tokens,
        "sites": summarise(sites),
    }


def visibility_dataset(
    axes: Axes,
    measure: InfluenceMeasure,
    values: Floats,
    half_interval: Floats | None,
    tokens: Mapping[str | None, Tokens],
    predicted: Sequence[Sequence[str]],
) -> "xarray.Dataset":
    """Return the map as one Dataset; with two stacks, cells without a state are NaN."""
    names = site_names(axes.sites)
    filled = axes.filled
    coords: Coordinates = {"source_site": names}
    dims: tuple[str, ...] = MAP
    if measure.name == "logit":
        dims = MAP[1:]
        empty = np.broadcast_to(~filled, values.shape)
        last = axes.last_stack
        coords |= _token_coords({last: tokens[last]}, "")
        coords |= _token_coords(tokens, "source_")
        targets = _common_targets(predicted, axes.lengths[last])
        coords["target"] = "token", text_array(targets)
    else:
        empty = ~filled[None, None] | ~filled[:, :, None, None]
        coords["site"] = names
        coords |= _token_coords(tokens, "")
    long_name, units = MEASURES[measure.name]
    attributes: Attributes = {"long_name": long_name, "units": units, "scale": "log"}
    masked = _masked(values, empty)
    variables: Variables = {measure.name: (dims, masked, attributes)}
    if half_interval is not None:
        masked = _masked(half_interval, empty)
        attributes = {**attributes, "long_name": "half the 95% interval"}
        variables[f"{measure.name}_error"] = dims, masked, attributes
    texts = {}
    for name, of_stack in tokens.items():
        if of_stack.texts is not None:
            attribute = "targets" if name == "decoder" else "texts"
            texts[attribute] = list(of_stack.texts)
    return to_dataset(variables, coords, texts)


def _masked(values: Floats, empty: Bools) -> NDArray[np.float32]:
    """Return values in float32, with NaN in empty cells."""
    masked = np.where(empty, np.nan, values)
    return masked.astype(np.float32)


def _common_targets(predicted: Sequence[Sequence[str]], length: int) -> list[str]:
    """Return the token that all texts predict at each place, or nothing."""
    rows = [row[:length] for row in predicted]
    targets = []
    for strings in zip(*rows, strict=True):
        is_common = len(set(strings)) == 1
        targets.append(strings[0] if is_common else "")
    return targets


def _token_coords(stacks: Mapping[str | None, Tokens], prefix: str) -> Coordinates:
    """Label each place by the token that all texts have there, or by its position."""
    columns: list[tuple[int, int, str] | None] = []
    counts = {}
    for name, tokens in stacks.items():
        length = int(tokens.lengths[0])
        counts[str(name)] = length
        texts = tokens.ids.reshape(-1, length)
        for place in range(length):
            ids = texts[:, place]
            if (ids == ids[0]).all():
                columns.append((place, int(ids[0]), tokens.strings[place]))
            else:
                columns.append((place, -1, str(place)))
    dim = f"{prefix}token"
    coords: Coordinates = {**column_coords(columns, dim=dim, prefix=prefix)}
    if len(stacks) > 1:
        coords[f"{prefix}stack"] = dim, stack_column(counts)
    return coords


def put_findings(
    data: "xarray.Dataset", axes: Axes, measure: str, causal: Mapping[str | None, bool]
) -> dict[str, Any]:
    """Put shares, reach and decays into the data; return the facts of each stack."""
    values = data[measure].to_numpy().astype(np.float64)
    if measure == "logit":
        return {"stacks": _of_predictions(data, values, axes, causal)}
    unknown = np.full(len(axes.sites), np.nan, dtype=np.float32)
    shares = {name: unknown.copy() for name in SHARES}
    reach = unknown.copy()
    decays: StackDecays = {name: {} for name in DECAYS}
    stacks = []
    for stack, length in axes.lengths.items():
        rows = axes.rows(stack)
        if not rows or length < 2:
            continue
        within = _within_stack(values, axes, stack, causal[stack])
        for name in SHARES:
            shares[name][rows] = within.shares[name]
        for name in DECAYS:
            decays[name][stack] = within.decays[name]
        reach[rows] = within.reach
        # The last site does not reach itself.
        reach[rows[-1]] = np.nan
        facts = _stack_facts(within)
        stacks.append({"stack": stack, **facts})
    for name, long_name in SHARES.items():
        attributes = {"long_name": long_name, "units": "share"}
        data[name] = "site", shares[name], attributes
    attributes = {
        "long_name": "influence of each site on the last, summed over tokens",
        "scale": "log",
        "units": data[measure].attrs["units"],
    }
    data["reach"] = "source_site", reach, attributes
    _put_decays(data, decays)
    if len(axes.lengths) > 1:
        return {"stacks": stacks, **_across_stacks(values, axes)}
    return {"stacks": stacks}


@dataclass(frozen=True, eq=False)
class _WithinStack:
    """The influence within one stack, [site, token, source site, source token].

    `reach` is the influence of each site on the last, summed over tokens.
    """

    names: list[str]
    influence: Floats
    causal: bool
    shares: Mapping[str, Floats]
    decays: Mapping[str, Floats]
    reach: Floats


def _within_stack(
    values: Floats, axes: Axes, stack: str | None, causal: bool
) -> _WithinStack:
    """Cut out the influence of a stack's states on each other, and sum it up."""
    rows = axes.rows(stack)
    columns = axes.columns(stack)
    on_stack = values[rows][:, columns]
    influence = on_stack[:, :, rows][..., columns]
    on_last = influence[-1].sum(-1)
    return _WithinStack(
        names=site_names(axes.sites[row] for row in rows),
        influence=influence,
        causal=causal,
        shares=_same_token_shares(influence, causal),
        decays=_decays(influence, causal),
        reach=on_last.mean(0),
    )


def _put_decays(data: "xarray.Dataset", decays: StackDecays) -> None:
    """Put one variable for each stack, as long as the farthest distance in any."""
    farthest = 0
    for by_stack in decays.values():
        for decay in by_stack.values():
            farthest = max(farthest, len(decay))
    for name, by_stack in decays.items():
        attributes = {"long_name": DECAYS[name], "units": "share", "scale": "log"}
        for stack, decay in by_stack.items():
            if not np.isfinite(decay).any():
                continue
            padded = np.full(farthest, np.nan, dtype=np.float32)
            padded[: len(decay)] = decay
            variable = f"{name}_{stack}" if stack else name
            data[variable] = "distance", padded, attributes
    if "distance" in data.dims:
        data.coords["distance"] = np.arange(data.sizes["distance"])


def _same_token_shares(inside: Floats, causal: bool) -> dict[str, Floats]:
    """Return the share of the same token in the influence on each target site."""
    of_below = [np.nan]
    of_first = []
    for site, on_site in enumerate(inside):
        first = on_site[:, 0]
        of_first.append(_same_token_share(first, causal))
        if site:
            below = on_site[:, site - 1]
            of_below.append(_same_token_share(below, causal))
    return {"own_below": np.array(of_below), "own_first": np.array(of_first)}


def _same_token_share(influence: Floats, causal: bool) -> float:
    """Return the mean share on the diagonal of [token, source token]."""
    # The first token of a causal text sees only itself.
    first = 1 if causal else 0
    total = influence.sum(-1)[first:]
    diagonal = np.diagonal(influence)[first:]
    influenced = total > 0
    if not influenced.any():
        return float("nan")
    shares = diagonal[influenced] / total[influenced]
    return float(shares.mean())


def _decays(inside: Floats, causal: bool) -> dict[str, Floats]:
    """Return influence by distance, relative to that of the same token.

    It is of the site below, averaged over sites, and of the first site on the last.
    """
    first = _by_distance(inside[-1, :, 0], causal)
    nothing = np.full(len(first), np.nan)
    decays = {"decay_below": nothing, "decay_first": nothing}
    relative = []
    for site in range(1, len(inside)):
        decay = _by_distance(inside[site, :, site - 1], causal)
        if decay[0] > 0:
            relative.append(decay / decay[0])
    if relative:
        decays["decay_below"] = np.mean(relative, axis=0)
    if first[0] > 0:
        decays["decay_first"] = first / first[0]
    return decays


def _by_distance(influence: Floats, causal: bool) -> Floats:
    """Return the mean of [token, source token] at each distance."""
    # Attention rests on the first token of a causal text whatever the distance.
    if causal and len(influence) >= FEWEST_TOKENS:
        influence = influence[1:, 1:]
    before = _diagonal_means(influence)
    if causal:
        return before
    after = _diagonal_means(influence.T)
    both: Floats = (before + after) / 2
    return both


def _diagonal_means(influence: Floats) -> Floats:
    """Return the mean of each diagonal, from the main one down."""
    means = []
    for back in range(len(influence)):
        diagonal = np.diagonal(influence, -back)
        means.append(diagonal.mean())
    return np.array(means)


def _stack_facts(within: _WithinStack) -> dict[str, Any]:
    """Return the facts of one stack, as far as there is anything to say."""
    facts = _own_facts(within)
    tokens = within.influence.shape[1]
    if within.causal and tokens >= FEWEST_TOKENS:
        facts["first_token_share"] = _first_token_share(within.influence)
    for end in ("below", "first"):
        decay = within.decays[f"decay_{end}"]
        distances = _distances(decay)
        if distances is not None:
            facts[f"distance_{end}"] = distances
    if len(within.names) > 1:
        facts["reach"] = _reach_facts(within)
    return facts


def _own_facts(within: _WithinStack) -> dict[str, Any]:
    """Return the shares of the same token."""
    names = within.names
    below = within.shares["own_below"]
    # The final norm mixes no tokens: its share of 1 says nothing.
    below = np.where(below < 1, below, np.nan)
    if not np.isfinite(below).any():
        return {}
    lowest = int(np.nanargmin(below))
    highest = int(np.nanargmax(below))
    facts: dict[str, Any] = {}
    facts["own_below"] = {
        "mean": float(np.nanmean(below)),
        "least": {"site": names[lowest], "share": below[lowest]},
        "most": {"site": names[highest], "share": below[highest]},
    }
    share = within.shares["own_first"][-1]
    if np.isfinite(share):
        ends = {"site": names[-1], "source_site": names[0]}
        facts["own_first"] = {**ends, "share": share}
    return facts


def _reach_facts(within: _WithinStack) -> dict[str, Any]:
    """Compare the influences of the first site and of the site below on the last."""
    names = within.names
    first = float(within.reach[0])
    below = float(within.reach[-2])
    return {
        "site": names[-1],
        "first": {"source_site": names[0], "influence": first},
        "below": {"source_site": names[-2], "influence": below},
        "ratio": first / below if below > 0 else None,
    }


def _first_token_share(inside: Floats) -> float:
    """Return the share of the first token in the influence of other tokens.

    It is the mean over the tokens from the third on, of the site below.
    """
    shares: list[float] = []
    for site in range(1, len(inside)):
        influence = inside[site, 2:, site - 1]
        total = influence.sum(-1)
        others = total - np.diagonal(influence, 2)
        # Where nothing but rounding comes from other tokens, a share means nothing.
        rows = others > 1e-9 * total
        of_first = influence[rows, 0] / others[rows]
        shares += of_first.tolist()
    if not shares:
        return 0.0
    return float(np.mean(shares))


def _distances(decay: Floats) -> dict[str, Any] | None:
    """Return the distances within which half and 90% of others' influence lie."""
    others = np.nan_to_num(decay[1:])
    total = others.sum()
    if not total > 0:
        return None
    shares = np.cumsum(others) / total
    return {
        "half_within": _distance_within(shares, 0.5),
        "nine_tenths_within": _distance_within(shares, 0.9),
        "farthest": len(others),
        "at_one": float(others[0]),
        "at_farthest": float(others[-1]),
    }


def _distance_within(shares: Floats, share: float) -> int:
    """Return the first distance up to which there is so much of all influence."""
    # Rounding must not put it one token farther.
    reached = shares >= share - 1e-9
    return int(np.argmax(reached)) + 1


def _across_stacks(values: Floats, axes: Axes) -> dict[str, Any]:
    """Return the share of the encoder's last site in the influence on the decoder's.

    The other share is that of the decoder's first site.
    """
    encoders = axes.rows("encoder")
    decoders = axes.rows("decoder")
    if not encoders or not decoders:
        return {}
    encoder = encoders[-1]
    first, last = decoders[0], decoders[-1]
    encoder_columns = axes.columns("encoder")
    decoder_columns = axes.columns("decoder")
    influence = values[last, decoder_columns]
    cross = influence[:, encoder, encoder_columns].sum(-1)
    within = influence[:, first, decoder_columns].sum(-1)
    share = cross / (cross + within)
    facts = {
        "site": axes.sites[last],
        "source_site": axes.sites[encoder],
        "beside": axes.sites[first],
        "share": float(share.mean()),
    }
    return {"cross": facts}


def _of_predictions(
    data: "xarray.Dataset",
    values: Floats,
    axes: Axes,
    causal: Mapping[str | None, bool],
) -> list[dict[str, Any]]:
    """Return what the predictions of the last stack see of its own states.

    `values` is [token, source site, source token].
    """
    stack = axes.last_stack
    rows = axes.rows(stack)
    columns = axes.columns(stack)
    if not rows or axes.lengths[stack] < 2:
        return []
    inside = values[:, rows][..., columns]
    shares = np.full(len(axes.sites), np.nan)
    for place, row in enumerate(rows):
        shares[row] = _same_token_share(inside[:, place], causal[stack])
    attributes = {"long_name": "share of the token that predicts", "units": "share"}
    data["own"] = "source_site", shares.astype(np.float32), attributes
    ends = []
    # One site is both the first and the last.
    for row in sorted({rows[0], rows[-1]}):
        share = shares[row]
        if np.isfinite(share):
            ends.append({"source_site": axes.sites[row], "share": share})
    last = inside[-1]
    site, token = np.unravel_index(np.argmax(last), last.shape)
    row = rows[site]
    strings = data["source_string"].to_numpy()[columns]
    facts: dict[str, Any] = {
        "stack": stack,
        "targets": data["target"].to_numpy().tolist(),
        "own": ends,
        "most_seen": {"source_site": axes.sites[row], "source_token": strings[token]},
    }
    first = _by_distance(inside[:, 0], causal[stack])
    if first[0] > 0:
        decay = first / first[0]
        _put_decays(data, {"decay_first": {None: decay}})
        distances = _distances(decay)
        if distances is not None:
            facts["distance_first"] = distances
    return [facts]

"""Findings of a map of influence: labelled arrays, and the facts they show.

How much of the influence on a state comes from its own token, how influence decays with
the distance in tokens, and how far back in layers it reaches.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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
from hiddenscope.states import Tokens
from hiddenscope.states.arrays import Floats

if TYPE_CHECKING:
    import xarray

MAP = ("site", "token", "source_site", "source_token")
MEASURES = {
    "l1": ("L1 norm of the gradient of |h|₁/|h|₂", "L1"),
    "frobenius": ("Frobenius norm of the Jacobian", "L2"),
    "relative": ("relative change for a relative change", ""),
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
# The first token of a causal text is told apart from the others from this length on.
FEWEST = 4


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
        last = list(tokens)[-1]
        coords |= _token_coords({last: tokens[last]}, "")
        coords |= _token_coords(tokens, "source_")
        # The token that all texts predict at a place, or nothing.
        targets = []
        for strings in zip(
            *(row[: axes.lengths[last]] for row in predicted), strict=True
        ):
            targets.append(strings[0] if len(set(strings)) == 1 else "")
        coords["target"] = "token", text_array(targets)
    else:
        empty = ~filled[None, None] | ~filled[:, :, None, None]
        coords |= {"site": names, **_token_coords(tokens, "")}
    long_name, units = MEASURES[measure.name]
    attributes: Attributes = {"long_name": long_name, "units": units, "scale": "log"}
    masked = np.where(empty, np.nan, values).astype(np.float32)
    variables: Variables = {measure.name: (dims, masked, attributes)}
    if half_interval is not None:
        masked = np.where(empty, np.nan, half_interval).astype(np.float32)
        attributes = {**attributes, "long_name": "half the 95% interval"}
        variables[f"{measure.name}_error"] = dims, masked, attributes
    texts = {}
    for name, of_stack in tokens.items():
        if of_stack.texts is not None:
            texts["targets" if name == "decoder" else "texts"] = list(of_stack.texts)
    return to_dataset(variables, coords, texts)


def _token_coords(stacks: Mapping[str | None, Tokens], prefix: str) -> Coordinates:
    """Label each place by the token that all texts have there, or by its position."""
    columns: list[tuple[int, int, str] | None] = []
    for tokens in stacks.values():
        length = int(tokens.lengths[0])
        texts = tokens.ids.reshape(-1, length)
        for place in range(length):
            same = bool((texts[:, place] == texts[0, place]).all())
            if same:
                columns.append((place, int(texts[0, place]), tokens.strings[place]))
            else:
                columns.append((place, -1, str(place)))
    dim = f"{prefix}token"
    coords: Coordinates = {**column_coords(columns, dim=dim, prefix=prefix)}
    if len(stacks) > 1:
        counts = {str(name): int(tokens.lengths[0]) for name, tokens in stacks.items()}
        coords[f"{prefix}stack"] = dim, stack_column(counts)
    return coords


def put_findings(
    data: "xarray.Dataset", axes: Axes, measure: str, causal: Mapping[str | None, bool]
) -> dict[str, Any]:
    """Put shares, reach and decays into the data; return the facts of each stack."""
    values = data[measure].to_numpy().astype(np.float64)
    if measure == "logit":
        return {"stacks": _of_predictions(data, values, axes, causal)}
    shares = {name: np.full(len(axes.sites), np.nan) for name in SHARES}
    reach = np.full(len(axes.sites), np.nan)
    decays: dict[str, dict[str | None, Floats]] = {name: {} for name in DECAYS}
    stacks = []
    for stack, length in axes.lengths.items():
        rows = axes.rows(stack)
        if not rows or length < 2:
            continue
        columns = axes.columns(stack)
        inside = values[rows][:, columns][:, :, rows][..., columns]
        stack_shares = _same_token_shares(inside, causal[stack])
        stack_decays = _decays(inside, causal[stack])
        for name in SHARES:
            shares[name][rows] = stack_shares[name]
        for name in DECAYS:
            decays[name][stack] = stack_decays[name]
        reach[rows[:-1]] = inside[-1, :, :-1].sum(-1).mean(0)
        names = site_names(axes.sites[row] for row in rows)
        facts = _stack_facts(names, inside, stack_shares, stack_decays, causal[stack])
        stacks.append({"stack": stack, **facts})
    for name, long_name in SHARES.items():
        attributes = {"long_name": long_name, "units": "share"}
        data[name] = "site", shares[name].astype(np.float32), attributes
    attributes = {
        "long_name": "influence of each site on the last, summed over tokens",
        "scale": "log",
        "units": data[measure].attrs["units"],
    }
    data["reach"] = "source_site", reach.astype(np.float32), attributes
    _put_decays(data, decays)
    if len(axes.lengths) > 1:
        return {"stacks": stacks, **_across_stacks(values, axes)}
    return {"stacks": stacks}


def _put_decays(
    data: "xarray.Dataset", decays: Mapping[str, Mapping[str | None, Floats]]
) -> None:
    """Put one variable for each stack, as long as the farthest distance in any."""
    farthest = 0
    for by_stack in decays.values():
        farthest = max([farthest, *map(len, by_stack.values())])
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
    shares = {name: np.full(len(inside), np.nan) for name in SHARES}
    for site in range(len(inside)):
        shares["own_first"][site] = _same_token_share(inside[site, :, 0], causal)
        if site:
            below = inside[site, :, site - 1]
            shares["own_below"][site] = _same_token_share(below, causal)
    return shares


def _same_token_share(influence: Floats, causal: bool) -> float:
    """Return the mean share on the diagonal of [token, source token]."""
    # The first token of a causal text sees only itself.
    first = 1 if causal else 0
    total = influence.sum(-1)[first:]
    diagonal = np.diagonal(influence)[first:]
    influenced = total > 0
    if not influenced.any():
        return float("nan")
    return float((diagonal[influenced] / total[influenced]).mean())


def _decays(inside: Floats, causal: bool) -> dict[str, Floats]:
    """Return influence by distance, relative to that of the same token.

    It is of the site below, averaged over sites, and of the first site on the last.
    """
    first = _by_distance(inside[-1, :, 0], causal)
    nothing = np.full(len(first), np.nan)
    relative = []
    for site in range(1, len(inside)):
        decay = _by_distance(inside[site, :, site - 1], causal)
        if decay[0] > 0:
            relative.append(decay / decay[0])
    return {
        "decay_below": np.mean(relative, axis=0) if relative else nothing,
        "decay_first": first / first[0] if first[0] > 0 else nothing,
    }


def _by_distance(influence: Floats, causal: bool) -> Floats:
    """Return the mean of [token, source token] at each distance."""
    # Attention rests on the first token of a causal text whatever the distance.
    if causal and len(influence) >= FEWEST:
        influence = influence[1:, 1:]
    distances = range(len(influence))
    before = np.array([np.diagonal(influence, -back).mean() for back in distances])
    if causal:
        return before
    after = np.array([np.diagonal(influence, ahead).mean() for ahead in distances])
    both: Floats = (before + after) / 2
    return both


def _stack_facts(
    names: list[str],
    inside: Floats,
    shares: Mapping[str, Floats],
    decays: Mapping[str, Floats],
    causal: bool,
) -> dict[str, Any]:
    """Return the facts of one stack, as far as there is anything to say."""
    facts: dict[str, Any] = {}
    # The final norm mixes no tokens: its share of 1 says nothing.
    below = np.where(shares["own_below"] < 1, shares["own_below"], np.nan)
    if np.isfinite(below).any():
        lowest, highest = int(np.nanargmin(below)), int(np.nanargmax(below))
        facts["own_below"] = {
            "mean": float(np.nanmean(below)),
            "least": {"site": names[lowest], "share": below[lowest]},
            "most": {"site": names[highest], "share": below[highest]},
        }
        if np.isfinite(shares["own_first"][-1]):
            facts["own_first"] = {
                "site": names[-1],
                "source_site": names[0],
                "share": shares["own_first"][-1],
            }
    if causal and inside.shape[1] >= FEWEST:
        facts["first_token_share"] = _first_token_share(inside)
    for end in ("below", "first"):
        distances = _distances(decays[f"decay_{end}"])
        if distances is not None:
            facts[f"distance_{end}"] = distances
    if len(names) > 1:
        influence = inside[-1].sum(-1).mean(0)
        first, below_last = float(influence[0]), float(influence[-2])
        facts["reach"] = {
            "site": names[-1],
            "first": {"source_site": names[0], "influence": first},
            "below": {"source_site": names[-2], "influence": below_last},
            "ratio": first / below_last if below_last > 0 else None,
        }
    return facts


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
        shares += (influence[rows, 0] / others[rows]).tolist()
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
        "half_within": int(np.argmax(shares >= 0.5 - 1e-9)) + 1,
        "nine_tenths_within": int(np.argmax(shares >= 0.9 - 1e-9)) + 1,
        "farthest": len(others),
        "at_one": float(others[0]),
        "at_farthest": float(others[-1]),
    }


def _across_stacks(values: Floats, axes: Axes) -> dict[str, Any]:
    """Return the share of the encoder's last site in the influence on the decoder's.

    The other share is that of the decoder's first site.
    """
    encoders, decoders = axes.rows("encoder"), axes.rows("decoder")
    if not encoders or not decoders:
        return {}
    last, first, encoder = decoders[-1], decoders[0], encoders[-1]
    influence = values[last, axes.columns("decoder")]
    cross = influence[:, encoder, axes.columns("encoder")].sum(-1)
    within = influence[:, first, axes.columns("decoder")].sum(-1)
    return {
        "cross": {
            "site": axes.sites[last],
            "source_site": axes.sites[encoder],
            "beside": axes.sites[first],
            "share": float((cross / (cross + within)).mean()),
        }
    }


def _of_predictions(
    data: "xarray.Dataset",
    values: Floats,
    axes: Axes,
    causal: Mapping[str | None, bool],
) -> list[dict[str, Any]]:
    """Return what the predictions of the last stack see of its own states.

    `values` is [token, source site, source token].
    """
    stack = list(axes.lengths)[-1]
    rows, columns = axes.rows(stack), axes.columns(stack)
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
        if np.isfinite(shares[row]):
            ends.append({"source_site": axes.sites[row], "share": shares[row]})
    last = inside[-1]
    site, token = np.unravel_index(np.argmax(last), last.shape)
    facts: dict[str, Any] = {
        "stack": stack,
        "targets": data["target"].to_numpy().tolist(),
        "own": ends,
        "most_seen": {
            "source_site": axes.sites[rows[site]],
            "source_token": data["source_string"].to_numpy()[columns][token],
        },
    }
    first = _by_distance(inside[:, 0], causal[stack])
    if first[0] > 0:
        decay = first / first[0]
        _put_decays(data, {"decay_first": {None: decay}})
        distances = _distances(decay)
        if distances is not None:
            facts["distance_first"] = distances
    return [facts]

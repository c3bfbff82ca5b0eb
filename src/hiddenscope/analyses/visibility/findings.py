"""The map as labelled arrays, and what it shows.

How much of the influence on a state comes from its own token, how influence decays with
the distance in tokens, and how far back in layers it reaches.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.visibility.maps import Axes, InfluenceMeasure, Numbers
from hiddenscope.states import Tokens

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
# From so many tokens on, a causal text's first token is told apart from the others.
FEWEST = 4


def dataset(
    axes: Axes,
    measure: InfluenceMeasure,
    influence: tuple[Numbers, Numbers | None],
    tokens: Mapping[str | None, Tokens],
    predicted: Sequence[Sequence[str]],
) -> "xarray.Dataset":
    """One Dataset; with two stacks, cells without a state are NaN."""
    import xarray

    long_name, units = MEASURES[measure.name]
    look = {"long_name": long_name, "units": units, "scale": "log"}
    looks = {
        measure.name: look,
        f"{measure.name}_error": {**look, "long_name": "half the 95% interval"},
    }
    filled, names = axes.filled, [str(site) for site in axes.sites]
    coords: dict[str, Any] = {"source_site": names}
    dims: tuple[str, ...] = MAP
    if measure.name == "logit":
        dims, empty = MAP[1:], np.broadcast_to(~filled, influence[0].shape)
        last = list(tokens)[-1]
        coords |= _token_coords({last: tokens[last]}, "") | _token_coords(
            tokens, "source_"
        )
        shared = [
            _shared([row[place] for row in predicted])
            for place in range(axes.lengths[last])
        ]
        coords["target"] = ("token", np.array([*shared, None], dtype=object)[:-1])
    else:
        empty = ~filled[None, None] | ~filled[:, :, None, None]
        coords |= {"site": names, **_token_coords(tokens, "")}
    variables = {
        name: (dims, np.where(empty, np.nan, values).astype(np.float32), attrs)
        for (name, attrs), values in zip(looks.items(), influence, strict=True)
        if values is not None
    }
    texts = {
        ("targets" if name == "decoder" else "texts"): of_stack.texts
        for name, of_stack in tokens.items()
    }
    return xarray.Dataset(
        variables,
        coords,
        {name: list(some) for name, some in texts.items() if some is not None},
    )


def _shared(strings: Sequence[str]) -> str:
    """What all texts have at one place, or nothing."""
    return strings[0] if len(set(strings)) == 1 else ""


def _token_coords(stacks: Mapping[str | None, Tokens], prefix: str) -> dict[str, Any]:
    """The token at each place; in several texts the token that all have there, or else
    the position.
    """
    columns: dict[str, list[Any]] = {"position": [], "id": [], "string": []}
    for tokens in stacks.values():
        length = int(tokens.lengths[0])
        ids = tokens.ids.reshape(-1, length)
        for place in range(length):
            same = len(set(ids[:, place].tolist())) == 1
            columns["position"].append(place)
            columns["id"].append(int(ids[0, place]) if same else -1)
            columns["string"].append(tokens.strings[place] if same else str(place))
    dim = f"{prefix}token"
    coords: dict[str, Any] = {
        f"{prefix}{name}": (dim, np.array(columns[name])) for name in ("position", "id")
    }
    coords[f"{prefix}string"] = (
        dim,
        np.array([*columns["string"], None], dtype=object)[:-1],
    )
    if len(stacks) > 1:
        lengths = [int(tokens.lengths[0]) for tokens in stacks.values()]
        coords[f"{prefix}stack"] = (
            dim,
            np.repeat(np.array([str(n) for n in stacks], dtype=object), lengths),
        )
    return coords


def put_findings(
    data: "xarray.Dataset", axes: Axes, measure: str, causal: Mapping[str | None, bool]
) -> dict[str, Any]:
    """Put what runs along the sites and the distances into the data, and give the facts
    of each stack.
    """
    values = data[measure].to_numpy().astype(np.float64)
    if measure == "logit":
        return {"stacks": _of_predictions(data, values, axes, causal)}
    shares = {share: np.full(len(axes.sites), np.nan) for share in SHARES}
    reach = np.full(len(axes.sites), np.nan)
    decays: dict[str, dict[str | None, Numbers]] = {decay: {} for decay in DECAYS}
    stacks = []
    for stack, length in axes.lengths.items():
        rows = axes.rows(stack)
        if not rows or length < 2:
            continue
        columns = axes.columns(stack)
        inside = values[rows][:, columns][:, :, rows][..., columns]
        own, decay = _own_shares(inside, causal[stack]), _decays(inside, causal[stack])
        for name in SHARES:
            shares[name][rows] = own[name]
        for name in DECAYS:
            decays[name][stack] = decay[name]
        reach[rows[:-1]] = inside[-1, :, :-1].sum(-1).mean(0)
        names = [str(axes.sites[row]) for row in rows]
        stacks.append(
            {"stack": stack, **_stack_facts(names, inside, own, decay, causal[stack])}
        )
    for name, long_name in SHARES.items():
        data[name] = (
            "site",
            shares[name].astype(np.float32),
            {"long_name": long_name, "units": "share"},
        )
    look = {
        "long_name": "influence of each site on the last, summed over tokens",
        "scale": "log",
    }
    data["reach"] = (
        "source_site",
        reach.astype(np.float32),
        {**look, "units": data[measure].attrs["units"]},
    )
    _put_decays(data, decays)
    return {
        "stacks": stacks,
        **(_across_stacks(values, axes) if len(axes.lengths) > 1 else {}),
    }


def _put_decays(
    data: "xarray.Dataset", decays: Mapping[str, Mapping[str | None, Numbers]]
) -> None:
    """One column for each stack, as far as there are distances in any."""
    farthest = max(
        (len(column) for columns in decays.values() for column in columns.values()),
        default=0,
    )
    for decay, columns in decays.items():
        for stack, column in columns.items():
            if np.isfinite(column).any():
                padded = np.full(farthest, np.nan, dtype=np.float32)
                padded[: len(column)] = column
                look = {"long_name": DECAYS[decay], "units": "share", "scale": "log"}
                data[f"{decay}_{stack}" if stack else decay] = (
                    "distance",
                    padded,
                    look,
                )
    if "distance" in data.dims:
        data.coords["distance"] = np.arange(data.sizes["distance"])


def _own_shares(inside: Numbers, causal: bool) -> dict[str, Numbers]:
    """The share on the token itself for each target site, the mean over tokens that see
    another.
    """
    shares = {
        "own_below": np.full(len(inside), np.nan),
        "own_first": np.full(len(inside), np.nan),
    }
    for site in range(len(inside)):
        shares["own_first"][site] = _own_share(inside[site, :, 0], causal)
        if site:
            shares["own_below"][site] = _own_share(inside[site, :, site - 1], causal)
    return shares


def _own_share(seen: Numbers, causal: bool) -> float:
    """Of [token, source token] the share on the diagonal; the first token of a causal
    text sees itself alone.
    """
    rows = np.arange(1 if causal else 0, len(seen))
    total = seen.sum(-1)[rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.diagonal(seen)[rows] / total
    return float(shares[total > 0].mean()) if (total > 0).any() else float("nan")


def _decays(inside: Numbers, causal: bool) -> dict[str, Numbers]:
    """Influence by distance in tokens, relative to that of the same token: of the site
    below, and of the first site.
    """
    below = [
        _by_distance(inside[site, :, site - 1], causal)
        for site in range(1, len(inside))
    ]
    below = [one / one[0] for one in below if one[0] > 0]
    first = _by_distance(inside[-1, :, 0], causal)
    nothing = np.full(len(first), np.nan)
    return {
        "decay_below": np.mean(below, axis=0) if below else nothing,
        "decay_first": first / first[0] if first[0] > 0 else nothing,
    }


def _by_distance(seen: Numbers, causal: bool) -> Numbers:
    """The mean of [token, source token] at each distance; a causal text's first token
    is left out as a source.
    """
    kept = seen[1:, 1:] if causal and len(seen) >= FEWEST else seen
    before = [np.diagonal(kept, -back).mean() for back in range(len(kept))]
    if causal:
        return np.array(before)
    after = [np.diagonal(kept, ahead).mean() for ahead in range(len(kept))]
    both: Numbers = (np.array(before) + np.array(after)) / 2
    return both


def _stack_facts(
    names: list[str],
    inside: Numbers,
    shares: Mapping[str, Numbers],
    decays: Mapping[str, Numbers],
    causal: bool,
) -> dict[str, Any]:
    """The facts of one stack, as far as there is anything to say."""
    facts: dict[str, Any] = {}
    # The final norm mixes no tokens.
    below = np.where(shares["own_below"] < 1, shares["own_below"], np.nan)
    if np.isfinite(below).any():
        low, high = int(np.nanargmin(below)), int(np.nanargmax(below))
        least, most = ({"site": names[at], "share": below[at]} for at in (low, high))
        facts["own_below"] = {
            "mean": float(np.nanmean(below)),
            "least": least,
            "most": most,
        }
        if np.isfinite(shares["own_first"][-1]):
            ends = {"site": names[-1], "source_site": names[0]}
            facts["own_first"] = {**ends, "share": shares["own_first"][-1]}
    if causal and inside.shape[1] >= FEWEST:
        facts["first_token_share"] = _first_token_share(inside)
    for key, decay in (
        ("distance_below", "decay_below"),
        ("distance_first", "decay_first"),
    ):
        if (distances := _distances(decays[decay])) is not None:
            facts[key] = distances
    if len(names) > 1:
        seen = inside[-1].sum(-1).mean(0)
        first, below_last = (
            {"source_site": names[at], "influence": float(seen[at])} for at in (0, -2)
        )
        ratio = float(seen[0] / seen[-2]) if seen[-2] > 0 else None
        facts["reach"] = {
            "site": names[-1],
            "first": first,
            "below": below_last,
            "ratio": ratio,
        }
    return facts


def _first_token_share(inside: Numbers) -> float:
    """The share of the first token in what tokens from the third on see of other tokens
    at the site below.
    """
    shares = []
    for site in range(1, len(inside)):
        seen = inside[site, 2:, site - 1]
        others = seen.sum(-1) - seen[np.arange(len(seen)), np.arange(2, 2 + len(seen))]
        rows = others > 1e-9 * seen.sum(-1)
        shares += (seen[rows, 0] / others[rows]).tolist()
    return float(np.mean(shares)) if shares else 0.0


def _distances(decay: Numbers) -> dict[str, Any] | None:
    """Within which distances half and 90% of the influence of other tokens lie."""
    others = np.nan_to_num(decay[1:])
    if not others.sum() > 0:
        return None
    sums = np.cumsum(others) / others.sum()
    return {
        "half_within": int(np.argmax(sums >= 0.5 - 1e-9)) + 1,
        "nine_tenths_within": int(np.argmax(sums >= 0.9 - 1e-9)) + 1,
        "farthest": len(others),
        "at_one": float(others[0]),
        "at_farthest": float(others[-1]),
    }


def _across_stacks(values: Numbers, axes: Axes) -> dict[str, Any]:
    """The share of the encoder in the influence of its last site and of the decoder's
    first on the decoder's last.
    """
    encoders, decoders = axes.rows("encoder"), axes.rows("decoder")
    if not encoders or not decoders:
        return {}
    top, first, encoder = decoders[-1], decoders[0], encoders[-1]
    seen = values[top, axes.columns("decoder")]
    cross = seen[:, encoder, axes.columns("encoder")].sum(-1)
    own = seen[:, first, axes.columns("decoder")].sum(-1)
    sites = {
        "site": axes.sites[top],
        "source_site": axes.sites[encoder],
        "beside": axes.sites[first],
    }
    return {"cross": {**sites, "share": float((cross / (cross + own)).mean())}}


def _of_predictions(
    data: "xarray.Dataset",
    values: Numbers,
    axes: Axes,
    causal: Mapping[str | None, bool],
) -> list[dict[str, Any]]:
    """What the predictions of the last stack see of its own states: [token, source
    site, source token].
    """
    stack = list(axes.lengths)[-1]
    rows, columns = axes.rows(stack), axes.columns(stack)
    if not rows or axes.lengths[stack] < 2:
        return []
    inside = values[:, rows][..., columns]
    own = np.full(len(axes.sites), np.nan)
    own[rows] = [_own_share(inside[:, k], causal[stack]) for k in range(len(rows))]
    look = {"long_name": "share of the token that predicts", "units": "share"}
    data["own"] = ("source_site", own.astype(np.float32), look)
    site, token = np.unravel_index(np.argmax(inside[-1]), inside[-1].shape)
    facts: dict[str, Any] = {
        "stack": stack,
        "targets": data["target"].to_numpy().tolist(),
        "own": [
            {"source_site": axes.sites[row], "share": own[row]}
            for row in dict.fromkeys((rows[0], rows[-1]))
            if np.isfinite(own[row])
        ],
        "most_seen": {
            "source_site": axes.sites[rows[site]],
            "source_token": data["source_string"].to_numpy()[columns][token],
        },
    }
    first = _by_distance(inside[:, 0], causal[stack])
    if first[0] > 0:
        _put_decays(data, {"decay_first": {None: first / first[0]}})
        if (distances := _distances(first / first[0])) is not None:
            facts["distance_first"] = distances
    return [facts]

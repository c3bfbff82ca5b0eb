"""What a map shows: how much stays on the token itself, how influence decays with distance, how far back it reaches."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.visibility.maps import Axes
from hiddenscope.analyses.visibility.measures import Numbers

if TYPE_CHECKING:
    import xarray

FEWEST = 4  # from so many tokens on, a causal text's first token is told apart from the others
SHARES = {
    "own_below": "share on the token itself, of what is seen of the site below",
    "own_first": "share on the token itself, of what is seen of the first site",
}
DECAYS = {
    "decay_below": "influence of the site below, as a share of that of the token itself",
    "decay_first": "influence of the first site on the last, as a share of that of the token itself",
}


def findings(data: "xarray.Dataset", axes: Axes, name: str, causal: Mapping[str | None, bool]) -> dict[str, Any]:
    """Put what runs along the sites and the distances into the data; what it shows, stack by stack."""
    values = data[name].to_numpy().astype(np.float64)
    if name == "logit":
        return _of_predictions(data, values, axes, causal)
    along = {share: np.full(len(axes.sites), np.nan) for share in SHARES}
    reach = np.full(len(axes.sites), np.nan)
    decays: dict[str, dict[str | None, Numbers]] = {decay: {} for decay in DECAYS}
    facts: dict[str, Any] = {}
    for stack in axes.lengths:
        rows = [row for row, site in enumerate(axes.sites) if site.stack == stack]
        if not rows or axes.lengths[stack] < 2:
            continue
        names, columns = [str(axes.sites[row]) for row in rows], axes.columns(stack)
        inside = values[rows][:, columns][:, :, rows][..., columns]
        shares = _shares(inside, causal[stack])
        for share, found in shares.items():
            along[share][rows] = found
        reach[rows[:-1]] = inside[-1, :, :-1].sum(-1).mean(0)
        lost = _decays(inside, causal[stack])
        for decay, found in lost.items():
            decays[decay][stack] = found
        said = _of_stack(names, inside, shares, lost, causal[stack])
        facts |= {stack: said} if stack else said
    for share, named in SHARES.items():
        data[share] = ("site", along[share].astype(np.float32), {"long_name": named, "units": "share"})
    units, scale = data[name].attrs["units"], {"scale": "log"}
    look = {"long_name": "what the last site sees of each, over all tokens", "units": units, **scale}
    data["reach"] = ("source_site", reach.astype(np.float32), look)
    _put_decays(data, decays)
    return facts | (_across(values, axes) if len(axes.lengths) > 1 else {})


def _put_decays(data: "xarray.Dataset", decays: Mapping[str, Mapping[str | None, Numbers]]) -> None:
    """One column a stack, as far as there are distances in any."""
    farthest = max((len(column) for found in decays.values() for column in found.values()), default=0)
    for decay, found in decays.items():
        for stack, column in found.items():
            if np.isfinite(column).any():
                filled = np.full(farthest, np.nan, dtype=np.float32)
                filled[: len(column)] = column
                look = {"long_name": DECAYS[decay], "units": "share", "scale": "log"}
                data[f"{decay}_{stack}" if stack else decay] = ("distance", filled, look)
    if "distance" in data.dims:
        data.coords["distance"] = np.arange(data.sizes["distance"])


def _shares(inside: Numbers, causal: bool) -> dict[str, Numbers]:
    """The share on the token itself for each target site, the mean over tokens that see another."""
    found = {"own_below": np.full(len(inside), np.nan), "own_first": np.full(len(inside), np.nan)}
    for site in range(len(inside)):
        found["own_first"][site] = _own(inside[site, :, 0], causal)
        if site:
            found["own_below"][site] = _own(inside[site, :, site - 1], causal)
    return found


def _own(seen: Numbers, causal: bool) -> float:
    """Of [token, source token] the share on the diagonal; the first token of a causal text sees itself alone."""
    rows = np.arange(1 if causal else 0, len(seen))
    total = seen.sum(-1)[rows]
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.diagonal(seen)[rows] / total
    return float(shares[total > 0].mean()) if (total > 0).any() else float("nan")


def _decays(inside: Numbers, causal: bool) -> dict[str, Numbers]:
    """By distance in tokens, for one site below and from the first site to the last, each for 1 on the token itself."""
    below = [_by_distance(inside[site, :, site - 1], causal) for site in range(1, len(inside))]
    below = [one / one[0] for one in below if one[0] > 0]
    first = _by_distance(inside[-1, :, 0], causal)
    nothing = np.full(len(first), np.nan)
    return {
        "decay_below": np.mean(below, axis=0) if below else nothing,
        "decay_first": first / first[0] if first[0] > 0 else nothing,
    }


def _by_distance(seen: Numbers, causal: bool) -> Numbers:
    """The mean of [token, source token] at each distance; a causal text's first token is left out as a source."""
    kept = seen[1:, 1:] if causal and len(seen) >= FEWEST else seen
    size = len(kept)
    before = [np.diagonal(kept, -back).mean() for back in range(size)]
    if causal:
        return np.array(before)
    after = [np.diagonal(kept, ahead).mean() for ahead in range(size)]
    both: Numbers = (np.array(before) + np.array(after)) / 2
    return both


def _of_stack(
    names: list[str], inside: Numbers, shares: Mapping[str, Numbers], decays: Mapping[str, Numbers], causal: bool
) -> dict[str, Any]:
    """The findings of one stack in words and numbers."""
    facts: dict[str, Any] = {}
    below = np.where(shares["own_below"] < 1, shares["own_below"], np.nan)  # the final norm mixes no tokens
    if np.isfinite(below).any():
        low, high = int(np.nanargmin(below)), int(np.nanargmax(below))
        facts["on the token itself, of the site below"] = {
            "mean": float(np.nanmean(below)),
            "least": {"site": names[low], "share": below[low]},
            "most": {"site": names[high], "share": below[high]},
        }
        facts[f"on the token itself, of {names[0]} seen from {names[-1]}"] = shares["own_first"][-1]
    if causal and inside.shape[1] >= FEWEST:
        facts["of other tokens, the first"] = _first_token(inside)
    for decay, what in (("decay_below", "the site below"), ("decay_first", f"{names[0]} seen from {names[-1]}")):
        if (far := _tokens_back(decays[decay])) is not None:
            facts[f"tokens back, of {what}"] = far
    if len(names) > 1:
        seen = inside[-1].sum(-1).mean(0)
        facts["layers back"] = {
            f"what {names[-1]} sees of {names[0]}": float(seen[0]),
            f"what {names[-1]} sees of {names[-2]}": float(seen[-2]),
            "the one for each of the other": float(seen[0] / seen[-2]) if seen[-2] > 0 else None,
        }
    return facts


def _first_token(inside: Numbers) -> float:
    """The share of the first token in what the later ones see of other tokens at the site below, beyond the second."""
    shares = []
    for site in range(1, len(inside)):
        seen = inside[site, 2:, site - 1]
        others = seen.sum(-1) - seen[np.arange(len(seen)), np.arange(2, 2 + len(seen))]
        some = others > 1e-9 * seen.sum(-1)
        shares += (seen[some, 0] / others[some]).tolist()
    return float(np.mean(shares)) if shares else 0.0


def _tokens_back(decay: Numbers) -> dict[str, Any] | None:
    """At which distances half and nine tenths of the influence of other tokens are reached."""
    others = np.nan_to_num(decay[1:])
    if not others.sum() > 0:
        return None
    sums = np.cumsum(others) / others.sum()
    return {
        "half of the others within": int(np.argmax(sums >= 0.5 - 1e-9)) + 1,
        "nine tenths within": int(np.argmax(sums >= 0.9 - 1e-9)) + 1,
        "farthest": len(others),
        "at distance 1, for 1 on the token itself": float(others[0]),
        f"at distance {len(others)}": float(others[-1]),
    }


def _across(values: Numbers, axes: Axes) -> dict[str, Any]:
    """How much of what the decoder's last site sees of both stacks' last layers lies in the encoder."""
    sides = {stack: [row for row, site in enumerate(axes.sites) if site.stack == stack] for stack in axes.lengths}
    if not all(sides.values()):
        return {}
    top, first, encoder = sides["decoder"][-1], sides["decoder"][0], sides["encoder"][-1]
    seen = values[top, axes.columns("decoder")]
    cross = seen[:, encoder, axes.columns("encoder")].sum(-1)
    own = seen[:, first, axes.columns("decoder")].sum(-1)
    share = float((cross / (cross + own)).mean())
    return {f"{axes.sites[top]} sees of {axes.sites[encoder]}, beside {axes.sites[first]}": share}


def _of_predictions(
    data: "xarray.Dataset", values: Numbers, axes: Axes, causal: Mapping[str | None, bool]
) -> dict[str, Any]:
    """What the predictions of a stack see of its own states: [token, source site, source token]."""
    stack = list(axes.lengths)[-1]
    rows = [row for row, site in enumerate(axes.sites) if site.stack == stack]
    if not rows or axes.lengths[stack] < 2:
        return {}
    inside = values[:, rows][..., axes.columns(stack)]
    own = np.full(len(axes.sites), np.nan)
    own[rows] = [_own(inside[:, k], causal[stack]) for k in range(len(rows))]
    look = {"long_name": "share on the token that predicts", "units": "share"}
    data["own"] = ("source_site", own.astype(np.float32), look)
    first = _by_distance(inside[:, 0], causal[stack])
    facts: dict[str, Any] = {"asked": data["asked"].to_numpy().tolist()}
    facts["on the token that predicts"] = {str(axes.sites[row]): own[row] for row in (rows[0], rows[-1])}
    last = inside[-1]
    site, token = np.unravel_index(np.argmax(last), last.shape)
    strings = data["source_string"].to_numpy()[axes.columns(stack)]
    facts["the last prediction sees most of"] = {"site": axes.sites[rows[site]], "token": strings[token]}
    if first[0] > 0:
        decay = first / first[0]
        data["decay_first"] = (
            "distance",
            decay.astype(np.float32),
            {"long_name": DECAYS["decay_first"], "units": "share", "scale": "log"},
        )
        data.coords["distance"] = np.arange(len(decay))
        if (far := _tokens_back(decay)) is not None:
            facts[f"tokens back, of {axes.sites[rows[0]]}"] = far
    return facts

"""Findings: where a difference begins, where it jumps, and what the final norm does to it."""

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.compare.cells import Array, Piece
from hiddenscope.sites import Site, summarise

if TYPE_CHECKING:
    import xarray


def counts(pieces: list[Piece]) -> dict[str, int]:
    """How many columns have a token on both sides, and how many on one."""
    compared = sum(one.paired.shape[1] for one in pieces)
    return {"compared": compared, "gaps": sum(len(one.columns) for one in pieces) - compared}


def findings(data: "xarray.Dataset", pieces: list[Piece]) -> dict[str, Any]:
    """What one stack shows: where it begins, how much stays the same, where it jumps, what the final norm does."""
    sites = pieces[0].sites
    here = data.sel(site=[str(site) for site in sites])
    if "stack" in here.coords:
        here = here.isel(token=np.flatnonzero(here["stack"].to_numpy() == pieces[0].stack))
    facts: dict[str, Any] = {"first at": _first(here, by_id=pieces[0].alike)}
    if lacking := {site for side in pieces[0].every for site in side} - set(sites):
        facts["sites that one side lacks"] = summarise(lacking)
    l2 = here["l2"].to_numpy()
    compared = np.isfinite(l2).any(0)
    facts["exactly zero at every site"] = f"{int((l2 == 0).all(0).sum())} of {int(compared.sum())} tokens"
    if not compared.any() or not (np.nan_to_num(l2) > 0).any():
        return facts
    site, token = np.unravel_index(np.nanargmax(here["relative"].to_numpy()), l2.shape)
    where = {"site": sites[site], "token": _named(here, int(token))}
    facts["largest relative difference"] = {"relative": here["relative"].to_numpy()[site, token], **where}
    middle = here["l2_median"].to_numpy()
    layers = [place for place, one in enumerate(sites) if one.layer is not None and not one.part]
    rises = [(float(middle[k] - middle[j]), j, k) for j, k in pairwise(layers)]
    if rises and max(rises)[0] > 0:
        _, before, after = max(rises)
        ends = {"from": sites[before], "to": sites[after], "median": [middle[before], middle[after]]}
        facts["largest jump between layers"] = ends
    return facts | _final(sites, layers, middle)


def _first(here: "xarray.Dataset", *, by_id: bool) -> dict[str, Any] | str:
    """The first token that is not the same on both sides; where all are, or in two models, whose states are not."""
    l2 = here["l2"].to_numpy()
    others = here["id"].to_numpy() != here["other_id"].to_numpy()
    differ = others if by_id and others.any() else (np.nan_to_num(l2, nan=1) > 0).any(0)
    if not differ.any():
        return "nowhere"
    token = int(np.argmax(differ))
    found: dict[str, Any] = {"token": _named(here, token)}
    found["position"] = [int(here[name][token]) for name in ("position", "other_position")]
    if (l2[:, token] > 0).any():
        found["site"] = str(here["site"].values[int(np.argmax(l2[:, token] > 0))])
    return found | ({"text": int(here["text"][token])} if here["text"].to_numpy().any() else {})


def _named(here: "xarray.Dataset", token: int) -> list[str]:
    """A token as both sides have it."""
    gaps = [int(here[name][token]) < 0 for name in ("position", "other_position")]
    names = [str(here[name].values[token]) for name in ("string", "other_string")]
    return ["(gap)" if gap else name for gap, name in zip(gaps, names, strict=True)]


def _final(sites: tuple[Site, ...], layers: list[int], middle: Array) -> dict[str, Any]:
    """The last two layers, raw, beside `final`: hidden_states goes from the one before the last straight to it."""
    if sites[-1].layer is not None or len(layers) < 2 or layers[-1] != len(sites) - 2:
        return {}
    before, raw, normed = (float(middle[place]) for place in (layers[-2], layers[-1], len(sites) - 1))
    facts: dict[str, Any] = {str(sites[layers[-2]]): before, f"raw {sites[layers[-1]]}": raw, str(sites[-1]): normed}
    if before > normed and raw > normed:
        facts["share of the drop that is the final norm"] = min(1.0, (raw - normed) / (before - normed))
    return {"median at the end": facts}

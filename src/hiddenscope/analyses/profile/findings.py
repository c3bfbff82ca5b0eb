"""Findings: what a profile shows, in words and numbers."""

from typing import Any

import numpy as np
import torch

from hiddenscope.analyses.profile.sweep import Array
from hiddenscope.analyses.profile.table import Part
from hiddenscope.measures import WORTH_READING
from hiddenscope.sites import Site, summarise

MASSIVE = 1000  # times the median of all values at a site, by size: what Sun et al. (2024) call massive
FEW = "with so few tokens, spread, dimension and likeness say little: give more text"


def findings(part: Part) -> dict[str, Any]:
    """What one stack shows, where it has what is compared."""
    facts: dict[str, Any] = {"norm": _norms(part)}
    layers = _middle(part)
    for name, said in (("anisotropy", "anisotropy"), ("effective_rank", "effective rank")):
        sides = {"all tokens": name, "without first tokens": f"{name}_others"}
        numbers = {said: _median(part.along(side)[layers]) for said, side in sides.items()}
        if found := {said: number for said, number in numbers.items() if np.isfinite(number)}:
            facts[f"{said} of the middle layers"] = found
    facts |= _ends(part, "intrinsic_dimension_others", "intrinsic dimension without first tokens", "dimension")
    facts |= _ends(part, "added_median", "what a block adds, over what it was given", "share")
    facts |= _largest_channels(part) | _alike(part)
    if part.counts[1] < WORTH_READING:
        facts["few tokens"] = FEW
    if len(kept := part.seen[0].cells["norm"]) < len(part.source.tokens):
        facts["token by token"] = f"the first {len(kept):,} of {len(part.source.tokens):,} tokens; the rest in all else"
    return facts


def _middle(part: Part) -> list[int]:
    """The places of the middle half of the layers."""
    layers = [place for place, site in enumerate(part.sites) if site.layer is not None]
    return layers[len(layers) // 4 : len(layers) - len(layers) // 4]


def _median(values: Array) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _norms(part: Part) -> dict[str, Any]:
    first, others = part.along("norm_first"), part.along("norm_median")
    sites, middle = part.sites, _middle(part)
    facts: dict[str, Any] = {}
    if middle:
        tokens = {"first token": float(np.median(first[middle])), "other tokens": float(np.median(others[middle]))}
        facts["middle layers"] = summarise([sites[place] for place in middle])
        facts |= {name: norm for name, norm in tokens.items() if np.isfinite(norm)}
        if tokens["other tokens"] > 0 and np.isfinite(tokens["first token"]):
            facts["times as large"] = tokens["first token"] / tokens["other tokens"]
    if middle and sites[-1].layer is None:
        sides = {"first token": first, "other tokens": others}
        drops = {
            name: [float(side[-2]), float(side[-1])] for name, side in sides.items() if np.isfinite(side[-2:]).all()
        }
        facts |= {f"{name} from {sites[-2]} to {sites[-1]}": drop for name, drop in drops.items()}
    return facts | _largest(part)


def _largest(part: Part) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    strings, named = part.source.tokens.strings, list(zip(part.sites, part.seen, strict=True))
    if full := [(site, seen) for site, seen in named if seen.largest >= 0]:
        site, seen = max(full, key=lambda pair: pair[1].highest)
        facts["largest"] = {"norm": seen.highest, "site": site, "token": strings[seen.largest]}
    if bad := [(site, seen) for site, seen in named if seen.not_finite]:
        site, seen = bad[0]
        where = {"site": site, "token": strings[seen.wrong]}
        facts["not finite"] = {"states": sum(seen.not_finite for _, seen in bad), "first": where}
    return facts


def _ends(part: Part, name: str, said: str, unit: str) -> dict[str, Any]:
    """Where a number along the layers is lowest and where it is highest."""
    values = part.along(name)
    if not np.isfinite(values).any():
        return {}
    places = {"lowest": int(np.nanargmin(values)), "highest": int(np.nanargmax(values))}
    return {said: {end: {unit: float(values[at]), "site": part.sites[at]} for end, at in places.items()}}


def _largest_channels(part: Part) -> dict[str, Any]:
    """The channels whose values are far above all others, and at which sites and tokens; or the largest there is."""
    tokens, massive = part.source.tokens, []
    found: tuple[float, Site, int, int] | None = None
    for site, seen in zip(part.sites, part.seen, strict=True):
        some = seen.channels
        for times, channel, row in zip(some.times.tolist(), some.channel.tolist(), some.row.tolist(), strict=True):
            if site.layer is not None and times >= MASSIVE:
                massive.append((site, channel, row))
            if np.isfinite(times) and (found is None or times > found[0]):
                found = times, site, channel, row
    if found is None:
        return {}
    times, site, channel, row = found
    where = {"channel": channel, "token": tokens.strings[row], "position": int(tokens.positions[row]), "site": site}
    facts: dict[str, Any] = {"largest": {"times the median": times, **where}}
    if massive:
        facts["massive"] = f"{MASSIVE:,} times the median or more"
        facts["channels"] = sorted({channel for _, channel, _ in massive})
        facts["sites"] = summarise({site for site, _, _ in massive})
        rows = sorted({row for _, _, row in massive})
        facts["tokens"] = list(dict.fromkeys(tokens.strings[row] for row in rows))[:8]
        first = sum(int(tokens.positions[row]) == 0 for _, _, row in massive)
        facts["at a first token"] = f"{first} of {len(massive)}"
    return {"largest channels": facts}


def _alike(part: Part) -> dict[str, Any]:
    """How alike pairs of layers are, and what first tokens do to that."""
    if part.cka is None or len(part.alike) < 2:
        return {}
    upper = torch.ones_like(part.cka).triu(1).bool()
    facts: dict[str, Any] = {"sampled tokens": part.counts[0]}
    medians = {"median of pairs": part.cka, "without first tokens": part.cka_others, "by chance": part.chance}
    for said, values in medians.items():
        if values is not None and np.isfinite(middle := _median(values[upper].numpy())):
            facts[said] = middle
    shown = part.cka if part.cka_others is None else part.cka_others
    pairs = torch.where(upper & shown.isfinite(), shown, torch.inf)
    if bool(pairs.isfinite().any()):
        row, column = np.unravel_index(int(pairs.argmin()), pairs.shape)
        ends = {"site": part.alike[row], "source_site": part.alike[column]}
        facts["least alike"] = {**ends, "cka": float(pairs[row, column])}
    return {"cka": facts}

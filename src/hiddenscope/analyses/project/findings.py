"""Findings: what the panels show, in words and numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from hiddenscope.analyses.project.judge import BY_CHANCE, Panel
from hiddenscope.analyses.project.parts import Part
from hiddenscope.sites import Site, summarise

ALONG = ("silhouette", "neighbour", "fisher", "within")


def facts_of(part: Part, panels: Sequence[Panel], choice: int | None) -> dict[str, Any]:
    """What one dataset in one model shows."""
    facts: dict[str, Any] = {"points": part.values.shape[1]}
    if part.classes is not None:
        counts = part.classes.counts
        facts["classes"] = dict(list(counts.items())[:20]) | ({"more": len(counts) - 20} if len(counts) > 20 else {})
        if len(counts) == 1:
            facts["separation"] = "there is one class only"
        if alone := [name for name, count in counts.items() if count == 1]:
            facts["alone in their class"] = alone[:20]
    if choice is not None:
        facts["label is the model's first choice"] = f"{choice} of {part.values.shape[1]} texts"
    if equal := [site for site, panel in zip(part.sites, panels, strict=True) if panel.picture is None]:
        facts["all states are equal at"] = summarise(equal)
    return facts | _separation(part, panels) | _pictures(part, panels)


def _separation(part: Part, panels: Sequence[Panel]) -> dict[str, Any]:
    scored = [(site, panel) for site, panel in zip(part.sites, panels, strict=True) if panel.scores]
    if not scored:
        return {}
    best = max(range(len(scored)), key=lambda k: scored[k][1].scores["silhouette"].value)
    facts: dict[str, Any] = {"best": _told(*scored[best])}
    facts |= {str(site): _told(site, panel) for site, panel in (scored[0], scored[-1])}
    apart = _apart([panel.scores["silhouette"].p for _, panel in scored])
    facts["apart at"] = summarise([scored[k][0] for k in apart]) if apart else "no site"
    return {"separation": facts}


def _told(site: Site, panel: Panel) -> dict[str, Any]:
    scores = panel.scores
    values = {name: scores[name].value for name in ALONG}
    return {"site": site, **values, "p": {name: scores[name].p for name in ALONG[:3]}}


def _apart(p: Sequence[float]) -> list[int]:
    """Those that are not by chance, when at most one in twenty of them may be wrong (Benjamini and Hochberg)."""
    order = np.argsort(p, kind="stable")
    passed = np.flatnonzero(np.asarray(p)[order] <= BY_CHANCE * np.arange(1, len(p) + 1) / len(p))
    return sorted(order[: passed[-1] + 1].tolist()) if len(passed) else []


def _pictures(part: Part, panels: Sequence[Panel]) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, said in (("trust", "trustworthiness"), ("spread", "difference of other seeds")):
        values = np.array([getattr(panel, name) for panel in panels])
        if np.isfinite(values).any():
            low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
            ends = {"lowest": float(values[low]), "at": part.sites[low], "highest": float(values[high])}
            facts[said] = {**ends, "median": float(np.nanmedian(values))}
    doubts = {str(site): panel.doubt for site, panel in zip(part.sites, panels, strict=True) if panel.doubt}
    if doubts:
        facts["shown but not there"] = doubts
    return {"picture": facts} if facts else {}


def compared(parts: Sequence[Part], panels: Sequence[Sequence[Panel]]) -> dict[str, Any]:
    """Of two datasets in one model: in which the classes are tighter, and at how many sites."""
    facts: dict[str, Any] = {}
    for model in dict.fromkeys(part.model for part in parts):
        own = [(part, some) for part, some in zip(parts, panels, strict=True) if part.model == model]
        sides = [
            {site: panel.scores for site, panel in zip(p.sites, some, strict=True) if panel.scores} for p, some in own
        ]
        both = [site for site in sides[0] if site in sides[-1]]
        both = [site for site in both if any(side[site]["within"].p <= BY_CHANCE for side in sides)]
        if len(own) != 2 or not both:
            continue
        names = [part.dataset for part, _ in own]
        first = [site for site in both if sides[0][site]["within"].value < sides[1][site]["within"].value]
        facts[model] = {
            "looked at": f"the {len(both)} sites at which the classes of either are tighter than by chance",
            f"tighter in {names[0]}": summarise(first) if first else "none",
            f"tighter in {names[1]}": summarise([site for site in both if site not in first]) or "none",
            "median distance within classes over that of all pairs": {
                name: float(np.median([side[site]["within"].value for site in both]))
                for name, side in zip(names, sides, strict=True)
            },
        }
    return {"tightness": facts} if facts else {}

"""Probe scores: what probes say of each token while the user's passes run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiddenscope.discovery import Anatomy
from hiddenscope.errors import PassError, SiteError, StatesError
from hiddenscope.linear.probe import Probe
from hiddenscope.sites import Site
from hiddenscope.states import Tokens
from hiddenscope.states.arrays import Floats


@dataclass(frozen=True, eq=False)
class ProbeScores:
    """The scores of probes by name, one row for each token, in float64.

    A score is what `decision_function` of the probe returns: a number, or one for each
    of three or more classes.
    """

    tokens: Tokens
    scores: Mapping[str, Floats]

    def __getitem__(self, name: str) -> Floats:
        return self.scores[name]

    def of(self, text: int) -> ProbeScores:
        """Return the scores of one text; -1 is the last."""
        rows = self.tokens.rows(text)
        scores = {name: values[rows] for name, values in self.scores.items()}
        return ProbeScores(self.tokens.of(text), scores)


@dataclass(frozen=True)
class SiteProbes:
    """Probes by name, with the site that each reads, all of one stack."""

    probes: Mapping[str, Probe]
    sites: Mapping[str, Site]

    @property
    def stack(self) -> str | None:
        """Return the stack whose tokens are scored."""
        return next(iter(self.sites.values())).stack

    def at(self, site: Site) -> dict[str, Probe]:
        """Return the probes that read a site."""
        at_site = {}
        for name, own_site in self.sites.items():
            if own_site == site:
                at_site[name] = self.probes[name]
        return at_site


def probes_of(probes: Mapping[str, Probe] | Probe, anatomy: Anatomy) -> SiteProbes:
    """Find the sites of probes in a model, and check that they fit.

    A single probe is named by its site.
    """
    if isinstance(probes, Probe):
        probes = {probes.site or "probe": probes}
    sites: dict[str, Site] = {}
    by_name: Mapping[str, Any] = probes
    for name, probe in by_name.items():
        problem = f"Cannot use the probe {str(name)[:60]!r} in this recording"
        if not isinstance(probe, Probe):
            reason = f"it is a {type(probe).__name__}"
            raise StatesError(problem, reason, "Give hs.Probe.load(path).")
        if not hasattr(probe, "coef_"):
            raise StatesError(problem, "it is not fitted", "Fit it, or load one.")
        if not probe.site:
            remedy = "Set probe.site, such as 'layer.3'."
            raise SiteError(problem, "it does not say which site it reads", remedy)
        (site, *others) = anatomy.select(probe.site)
        if others:
            reason = f"{probe.site} names {1 + len(others)} sites"
            raise SiteError(problem, reason, "Name one, with its stack.")
        width = anatomy.width(site)
        if probe.n_features_in_ != width:
            raise StatesError(
                problem,
                f"it was fitted to width {probe.n_features_in_}, and {site} of"
                f" {anatomy.name} is {width} wide",
                "Give a probe of this model.",
            )
        sites[name] = site
    if len({site.stack for site in sites.values()}) != 1:
        raise StatesError(
            "Cannot use these probes in one recording",
            "there are none, or they read the encoder and the decoder",
            "Give probes of one stack.",
        )
    return SiteProbes(dict(probes), sites)


def join_scores(parts: Sequence[ProbeScores], continues: Sequence[bool]) -> ProbeScores:
    """Join the scores of passes: one that continues goes on with the same texts."""
    groups: list[list[ProbeScores]] = []
    for part, goes_on in zip(parts, continues, strict=True):
        if not goes_on or not groups:
            groups.append([part])
            continue
        if part.tokens.count != groups[-1][0].tokens.count:
            raise PassError(
                "Cannot join the scores of these passes",
                f"one goes on with {part.tokens.count} texts after a pass over"
                f" {groups[-1][0].tokens.count}",
                "Read `rec.scored`, the scores of each pass.",
            )
        groups[-1].append(part)
    if not groups:
        raise PassError(
            "No scores of probes",
            "no pass was run inside the `with`, or no probes were given",
            "Give probes=, and call the module there.",
        )
    texts: list[list[ProbeScores]] = []
    for group in groups:
        for text in range(group[0].tokens.count):
            texts.append([part.of(text) for part in group])
    return _texts_in_order(texts)


def _texts_in_order(texts: Sequence[Sequence[ProbeScores]]) -> ProbeScores:
    """Put the parts of each text together, one text after another."""
    ids: list[int] = []
    strings: list[str] = []
    lengths = []
    columns: dict[str, list[Floats]] = {}
    for parts in texts:
        lengths.append(sum(len(part.tokens) for part in parts))
        for part in parts:
            ids += part.tokens.ids.tolist()
            strings += part.tokens.strings
            for name, values in part.scores.items():
                columns.setdefault(name, []).append(values)
    tokens = Tokens(
        None,
        text=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        ids=np.array(ids, dtype=np.int64),
        strings=tuple(strings),
        count=len(lengths),
    )
    joined = {name: np.concatenate(values) for name, values in columns.items()}
    return ProbeScores(tokens, joined)

"""Probe: its intervals, the sites that it calls above chance, and the interval of the best site.

The truth of a site is the score of its probes, those of the test folds, on fresh draws from the same distribution, on
average over all runs: over training sets of that size. Labels are drawn too, so the classes of a run are as large as
chance makes them.
"""

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from calibrate.trials import Claim, Experiment, Study
from hiddenscope.files import replacing
from hiddenscope.linear import Problems, assign_folds, logistic, ridge, standardised
from hiddenscope.sites import Site
from hiddenscope.vectors.collection import copies_among

SITES, WIDTH, FRESH = 6, 64, 1_000
STRENGTHS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # how far apart the classes are, in standard deviations / 2
REAL_SITES = "layer.0,layer.6,layer.12,layer.18,layer.24,layer.30"
TEXTS = (20, 50, 200)
ROUGH = 0.01  # how far above chance a true score must be to count: it was measured by drawing
UNEQUAL = 0.75  # the share of the larger class


class Drawn(NamedTuple):
    """States `[site, row, width]` with targets, and fresh ones; `fresh_targets` are P(class 1), or numbers."""

    states: torch.Tensor
    targets: torch.Tensor
    fresh: torch.Tensor
    fresh_targets: torch.Tensor


def noise(seed: int, rows: int, share: float) -> Drawn:
    """Independent sites that tell nothing."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(SITES, rows + FRESH, WIDTH, generator=generator)
    targets = _classes(torch.full((rows,), share), generator)
    return Drawn(states[:, :rows], targets, states[:, rows:], torch.full((FRESH,), share))


def planted(seed: int, rows: int, share: float) -> Drawn:
    """Independent sites in which one direction tells the class, from not at all to well."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.full((rows,), share)
    targets = torch.cat([_classes(shares, generator), torch.rand(FRESH, generator=generator) < share]).long()
    states = torch.randn(SITES, rows + FRESH, WIDTH, generator=generator)
    states[:, :, 0] += torch.tensor(STRENGTHS)[:, None] * (2 * targets - 1)
    return Drawn(states[:, :rows], targets[:rows], states[:, rows:], targets[rows:].float())


def real(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, whose layers go together, with labels that are drawn."""
    generator = torch.Generator().manual_seed(seed)
    pool = _pool()
    order = torch.randperm(pool.shape[1], generator=generator)
    targets = _classes(torch.full((rows,), share), generator)
    return Drawn(pool[:, order[:rows]], targets, pool[:, order[rows:]], torch.full((pool.shape[1] - rows,), share))


def real_planted(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, with labels that follow one direction of layer.18, of which a fifth are drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    pool = _pool()
    order = torch.randperm(pool.shape[1], generator=generator)
    own, *_ = standardised(pool[3])
    along = torch.linalg.svd(own, full_matrices=False)[0][:, 1]
    likely = torch.where(along > along.quantile(1 - share), 0.8 + 0.2 * share, 0.2 * share)[order]
    targets = _classes(likely[:rows], generator)
    return Drawn(pool[:, order[:rows]], targets, pool[:, order[rows:]], likely[rows:])


def numbers(seed: int, rows: int, share: float) -> Drawn:
    """Numbers, of which `share` of the variance lies along a direction that each site shows more or less of."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(SITES, rows + FRESH, WIDTH, generator=generator)
    hidden = torch.randn(rows + FRESH, generator=generator)
    states[:, :, 0] += torch.tensor(STRENGTHS)[:, None] * hidden
    targets = share**0.5 * hidden + (1 - share) ** 0.5 * torch.randn(rows + FRESH, generator=generator)
    return Drawn(states[:, :rows], targets[:rows], states[:, rows:], targets[rows:])


def real_numbers(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, with numbers that are drawn."""
    drawn, generator = real(seed, rows, 0.5), torch.Generator().manual_seed(seed + 1_000_000)
    targets = torch.randn(rows + drawn.fresh.shape[1], generator=generator)
    return drawn._replace(targets=targets[:rows], fresh_targets=targets[rows:])


def _classes(shares: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drawn classes; again where one of them has fewer than two rows, which no probe takes."""
    while True:
        drawn = (torch.rand(len(shares), generator=generator) < shares).long()
        if 2 <= int(drawn.sum()) <= len(drawn) - 2:
            return drawn


@lru_cache
def _pool() -> torch.Tensor:
    """The states of all different tokens, but first ones, of the shipped texts; computed once for all processes."""
    path = Path(tempfile.gettempdir()) / f"hiddenscope-calibrate-{os.getuid()}-{hs.__version__}.npy"
    if not path.exists():
        model = hs.load()
        texts = [text for name in ("cities-complete", "cities-incomplete", "plain") for text in hs.read(name).texts]
        states = model.capture(texts, REAL_SITES)
        assert isinstance(states, hs.States)
        values = states.values[:, torch.from_numpy(np.asarray(states.tokens.positions) > 0)].float()
        _, first = np.unique(values[-1].numpy().round(3), axis=0, return_index=True)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.save(file, values[:, torch.from_numpy(np.sort(first))].numpy())
    return torch.from_numpy(np.load(path))


class Record(NamedTuple):
    """What `hs.probe` said in one run, and how its probes do on fresh draws."""

    score: list[float]
    low: list[float]
    high: list[float]
    fresh: list[float]
    best: int
    best_interval: list[float]
    above: list[int]
    mix: list[float]


def trial(seed: int, draw: Callable[[int, int, float], Drawn], rows: int, share: float) -> Record:
    """Probe drawn states."""
    drawn = draw(seed, rows, share)
    regress = drawn.targets.is_floating_point()
    texts = tuple(f"run {seed} text {k}" for k in range(rows))
    tokens = hs.Tokens(texts, range(rows), [0] * rows, range(rows), ["t"] * rows)
    states = hs.States(tuple(Site(k) for k in range(len(drawn.states))), drawn.states, tokens, hs.Source("drawn"))
    result = hs.probe(states, drawn.targets.tolist(), task="regress" if regress else "classify", seed=seed)
    facts, data = result.facts, result.data
    name = facts["score"]
    sites = [str(site) for site in data["site"].to_numpy()]
    return Record(
        *(data[key].to_numpy().tolist() for key in (name, f"{name}_low", f"{name}_high")),
        _fresh_scores(drawn, result, copies_among(tokens), seed),
        sites.index(str(facts["best"]["site"])),
        facts["best"]["interval"],
        [sites.index(str(site)) for site in facts["above_chance_at"]],
        [facts["mix"][name], *facts["mix"].get("interval", [])],
    )


def _fresh_scores(drawn: Drawn, result: hs.Result, groups: list[str], seed: int) -> list[float]:
    """The mean accuracy (or squared error) on fresh draws of the probes of all folds, of every site."""
    regress, targets = drawn.targets.is_floating_point(), drawn.targets
    goals = (targets - targets.mean()) / targets.std(correction=0) if regress else targets
    learner = ridge() if regress else logistic(2)
    count = result.facts["folds"]
    folds = assign_folds(np.zeros(len(targets), dtype=np.int64) if regress else targets.numpy(), groups, count, seed)
    train = torch.from_numpy(folds[None] != np.arange(count)[:, None])
    fresh = []
    for states, new, penalty in zip(drawn.states, drawn.fresh, result.data["penalty"].to_numpy(), strict=True):
        own, mean, deviation = standardised(states)
        fitted = learner.fit(own, Problems(train, goals.expand(count, -1), torch.from_numpy(penalty)))
        scores = fitted.scores(((new - mean) / deviation).to(own))[:, 0]
        wanted = drawn.fresh_targets[:, None]
        if regress:
            fresh.append(float((scores * targets.std(correction=0) + targets.mean() - wanted).square().mean()))
        else:
            fresh.append(float(torch.where(scores > 0, wanted, 1 - wanted).mean()))
    return fresh


def sum_up(records: Sequence[Record], chance: float) -> Mapping[str, Sequence[float]]:
    """For each run, whether the intervals held the truth, and what was called above chance."""
    fresh = np.mean([record.fresh for record in records], 0)
    truth = fresh if chance else 1 - fresh  # R² from squared errors: the numbers have variance 1
    mix = float(np.mean([record.mix[0] for record in records]))  # no choice was made by it, so it is unbiased
    above = {int(site) for site in np.flatnonzero(truth > chance + ROUGH)}
    return {
        "lowest": [float(truth.min())],
        "highest": [float(truth.max())],
        "interval": [_held(record, truth) for record in records],
        "best": [float(one.best_interval[0] <= truth[one.best] <= one.best_interval[1]) for one in records],
        "mix": [float(one.mix[1] <= mix <= one.mix[2]) if one.mix[1:] else float("nan") for one in records],
        "above": [float(not above.issuperset(one.above)) for one in records],
        "power": [len(above & {*one.above}) / len(above) if above else float("nan") for one in records],
    }


def _held(record: Record, truth: np.ndarray) -> float:
    return float(np.mean((np.array(record.low) <= truth) & (truth <= np.array(record.high))))


def experiment(what: str, draw: Callable[[int, int, float], Drawn], rows: int, share: float, cost: float) -> Experiment:
    """One condition: so many texts, and the share of a class or the variance along the planted direction."""
    regress = draw in (numbers, real_numbers)
    chance = 0.0 if regress else max(share, 1 - share)
    classes = "" if regress else ", classes equal" if share == 0.5 else f", classes {share:.0%} and {1 - share:.0%}"
    return Experiment(
        f"{what}, {rows} texts{classes}",
        partial(trial, draw=draw, rows=rows, share=share),
        partial(sum_up, chance=chance),
        cost,
    )


CLAIMS = {
    "lowest": Claim("true score of the worst site"),
    "highest": Claim("of the best"),
    "interval": Claim("a site's 95% interval holds the truth", 0.93, 0.97),
    "best": Claim("the best site's interval holds the truth", 0.93),
    "mix": Claim("the mix's 95% interval holds the truth", 0.93),
    "above": Claim("a site is called above chance that is not", 0.0, 0.05),
    "power": Claim("sites above chance that are called so"),
}
CLASSES = (
    ("noise", noise),
    ("real states, drawn labels", real),
    ("planted", planted),
    ("real states, planted", real_planted),
)
STUDY = Study(
    "probe",
    "Six sites of 64 channels of independent noise; the same with a direction that tells the class planted at five of\n"
    "them; six layers of smollm2 with labels that were drawn, or that follow a direction of layer.18. Labels are\n"
    "drawn with these shares. The truth of a site is the score on fresh draws of the probes of its folds, on average\n"
    "over runs: over training sets of that size. Of the mix it is the mean score of all runs.",
    CLAIMS,
    [
        experiment(name, draw, rows, share, 5.0 if rows == 200 and draw in (real, real_planted) else 1.0)
        for share in (0.5, UNEQUAL)
        for rows in TEXTS
        for name, draw in CLASSES
    ]
    + [
        experiment(name, draw, rows, share, 1.0)
        for rows in TEXTS
        for name, draw, share in (
            ("numbers, noise", numbers, 0.0),
            ("numbers, half of their variance planted", numbers, 0.5),
            ("numbers, real states, drawn", real_numbers, 0.0),
        )
    ],
)

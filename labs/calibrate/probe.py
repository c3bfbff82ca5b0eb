"""Probe: its intervals, the sites that it calls above chance, and the interval of the
best site.

The truth of a site is the score of its probes, those of the test folds, on fresh draws
from the same distribution, on average over all runs: over training sets of that size.
Labels are drawn too, so the classes of a run are as large as chance makes them. The
fits of all runs are made at once (`fits`); folds, labellings and statistics are those
of `hs.probe`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.analyses.probe.compute import as_best, is_above
from hiddenscope.analyses.probe.design import (
    MANY_ROWS,
    PERMUTATIONS,
    PERMUTATIONS_OF_MANY,
    Design,
    ProbeTarget,
    design_of,
    target_of,
)
from hiddenscope.analyses.probe.labels import labelled_rows
from hiddenscope.analyses.probe.significance import (
    NullDistribution,
    centre_of,
    estimate_score,
    jackknife_of,
    measure_labellings,
    score_interval,
    summarise_labellings,
)
from hiddenscope.linear.crossvalidation import plant_signal
from hiddenscope.linear.intervals import permutation_test
from hiddenscope.linear.probe import Task
from hiddenscope.sites import Site
from hiddenscope.states import Pooling
from hiddenscope.texts import Labelled
from labs.calibrate import draws, fits
from labs.calibrate.draws import Drawn
from labs.calibrate.trials import Claim, Experiment, Study, mapped

TEXTS = (20, 50, 200)
# How far above chance a true score must be to count: it was measured by drawing.
ROUGH = 0.01
UNEQUAL = 0.75  # the share of the larger class
TOGETHER = 25_000_000  # numbers of states of draws that are fitted at once, on a GPU
Draw = Callable[[int, int, float], Drawn]


class Record(NamedTuple):
    """What `hs.probe` says in one run, and how its probes do on fresh draws: first all
    sites, then the mix.

    `fresh` is an accuracy, or a squared error; `spread` is that of the mean of all
    numbers.
    """

    score: list[float]
    low: list[float]
    high: list[float]
    fresh: list[float]
    spread: float
    best: int
    best_interval: list[float]
    above: list[int]
    centre: list[float] | None = None


def states_of(drawn: Drawn, seed: int) -> hs.States:
    """Drawn states, as those of texts."""
    rows = drawn.states.shape[1]
    text = np.arange(rows) // drawn.tokens
    if drawn.as_tokens:
        text = np.array(drawn.groups)
    positions = np.arange(rows) - np.searchsorted(text, text)
    texts = tuple(f"run {seed} text {k}" for k in range(int(text[-1]) + 1))
    tokens = hs.Tokens(texts, text, positions, np.arange(rows), ("t",) * rows)
    return hs.States(
        tuple(Site(k) for k in range(len(drawn.states))),
        drawn.states,
        tokens,
        hs.Source("drawn"),
    )


def labels_of(drawn: Drawn, states: hs.States) -> list[Any] | Labelled:
    """Drawn labels, with groups of texts where there are any."""
    labels = drawn.targets.tolist()
    if drawn.groups is None or drawn.as_tokens:
        return labels
    texts = states.tokens.texts
    assert texts is not None
    return Labelled(tuple(texts), tuple(labels), "drawn", drawn.groups)


class Prepared(NamedTuple):
    """The target and the design of `hs.probe` for one draw."""

    seed: int
    target: ProbeTarget
    design: Design


def prepared(seed: int, draw: Draw, rows: int, share: float) -> Prepared:
    drawn = draw(seed, rows, share)
    task: Task = "regress" if drawn.targets.is_floating_point() else "classify"
    by_token = drawn.tokens > 1 or drawn.as_tokens
    pool: Pooling | None = None if by_token else "last"
    states = states_of(drawn, seed)
    labelled = labelled_rows(states, labels_of(drawn, states), task, "layer.*", pool)
    target = target_of(labelled, task)
    design = design_of(labelled, target, seed)
    if len(design.permuted) == 1:
        # Draws are fitted together, and need equally many labellings.
        count = PERMUTATIONS_OF_MANY if len(target.values) > MANY_ROWS else PERMUTATIONS
        design = replace(design, permuted=design.permuted.repeat(1 + count, 1))
    return Prepared(seed, target, design)


def trials(
    seeds: Sequence[int], device: str, jobs: int, *, draw: Draw, rows: int, share: float
) -> list[Record]:
    """Probe drawn states; draws with equally many folds together."""
    ready = mapped(partial(prepared, draw=draw, rows=rows, share=share), seeds, jobs)
    size = draw(seeds[0], rows, share).states.numel()
    at_once = max(1, TOGETHER // size // (1 if device == "cuda" else 8))
    records: dict[int, Record] = {}
    for count in sorted({one.design.fold_count for one in ready}):
        some = [one for one in ready if one.design.fold_count == count]
        for start in range(0, len(some), at_once):
            part = some[start : start + at_once]
            drawn = [draw(one.seed, rows, share) for one in part]
            records |= zip(
                [one.seed for one in part], _records(part, drawn, device), strict=True
            )
    return [records[seed] for seed in seeds]


def _records(
    ready: Sequence[Prepared], drawn: Sequence[Drawn], device: str
) -> Iterator[Record]:
    regress = drawn[0].targets.is_floating_point()

    def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(parts)).to(device)

    batch = fits.Draws(
        stacked([one.states for one in drawn]).double(),
        stacked([one.target.values for one in ready]),
        stacked([torch.from_numpy(one.design.folds) for one in ready]),
        stacked([one.fresh for one in drawn]).double(),
        regress,
    )
    of_sites = fits.fit_sites(batch)
    of_mix, fresh_of_mix = fits.fit_mix(batch, of_sites.inner_loss)
    permuted, bootstrap = (
        stacked([getattr(one.design, name) for one in ready])
        for name in ("permuted", "bootstrap")
    )
    sites = batch.states.shape[1]
    if regress:
        by_site = plant_signal(
            bootstrap[:, None].expand(-1, sites, -1, -1), of_sites.whole
        )
        labellings = torch.cat(
            [permuted[:, None].expand(-1, sites, -1, -1), by_site], 2
        )
        labelled, levels = fits.fit_labellings(batch, labellings), None
    else:
        together = torch.cat([permuted, bootstrap], 1)
        labellings = together[:, None].expand(-1, sites + 1, -1, -1)
        labelled = torch.cat(
            [
                fits.fit_labellings(batch, labellings[:, 1:]),
                fits.fit_mean(batch, together)[:, None],
            ],
            1,
        )
        levels = fits.intercepts(batch.folds, together)
    held_out = torch.cat([of_sites.scores, of_mix[:, None]], 1)
    fresh = torch.cat([of_sites.fresh, fresh_of_mix[:, None]], 1)
    penalty = fits.penalties_of(of_sites.inner_loss).cpu()
    for number, one in enumerate(ready):
        level = (
            torch.zeros_like(labelled[number, 0]) if levels is None else levels[number]
        )
        others = _others(one, labelled[number], level, labellings[number])
        pairs = zip(batch.states[number], penalty[number], strict=True)
        least = [
            jackknife_of(states, chosen, one.target, one.design)
            for states, chosen in pairs
        ]
        yield _record(
            one,
            drawn[number],
            (held_out[number].cpu(), fresh[number].cpu()),
            others,
            least,
        )


def _others(
    one: Prepared, labelled: torch.Tensor, level: torch.Tensor, labellings: torch.Tensor
) -> list[NullDistribution]:
    """What the scores `[site, row, labelling]` of labellings `[site, labelling, row]`
    tell, for each site.
    """
    sites, rows, count = labelled.shape
    scores, levels = (
        part.transpose(0, 1).reshape(rows, 1, -1)
        for part in (labelled, level.expand_as(labelled))
    )
    targets = labellings.permute(2, 0, 1).reshape(rows, -1)
    parts = measure_labellings(one.target, one.design, scores, levels, targets)
    by_site = [part.unflatten(0, (sites, count)) for part in parts]
    return [
        summarise_labellings(
            tuple(part[site].cpu() for part in by_site), one.target, one.design
        )
        for site in range(sites)
    ]


def _record(
    one: Prepared,
    drawn: Drawn,
    scores: tuple[torch.Tensor, torch.Tensor],
    others: Sequence[NullDistribution],
    least: Sequence[float],
) -> Record:
    """From held-out scores `[site, row]` and those of fresh rows `[site, fold, row]`,
    other labellings, and the deviations of the jackknife."""
    held_out, fresh = scores
    target, design, sites = one.target, one.design, len(drawn.states)
    measured = [
        estimate_score(own[:, None, None], target.values[:, None], target, design)
        for own in held_out
    ]
    found = [permutation_test(torch.stack([other.scores for other in others[:sites]]))]
    if design.smallest_p is None:
        found = [found[0]._replace(p_values=[float("nan")] * sites)]
    # The mix is by itself, and numbers have none.
    found += [permutation_test(other.scores[None]) for other in others[sites:]]
    chances = [*found[:1] * sites, *found[1:]]
    intervals = [
        score_interval(score, other.variability, by, design, jackknife)
        for score, other, by, jackknife in zip(
            measured, others, chances, [*least, 0.0], strict=False
        )
    ]
    best = max(range(sites), key=lambda site: intervals[site].score)
    counts = None if target.classes is None else torch.bincount(target.values)
    guess = 0.0 if counts is None else float(counts.max() / counts.sum())
    above = [
        site
        for site in range(sites)
        if is_above(intervals[site], found[0].p_values[site], guess)
    ]
    centre = None
    if above:
        centre = centre_of(
            [Site(site) for site in range(sites)],
            [own[:, None] for own in held_out[:sites]],
            [other.variability for other in others[:sites]],
            target,
            design,
        )
    return Record(
        [float(score.score) for score in measured],
        [interval.low for interval in intervals],
        [interval.high for interval in intervals],
        _fresh(one.target, fresh, drawn.fresh_targets),
        float(drawn.fresh_targets.double().square().mean()),
        best,
        as_best(intervals[best]),
        above,
        None if centre is None else centre.interval,
    )


def _fresh(
    target: ProbeTarget, scores: torch.Tensor, wanted: torch.Tensor
) -> list[float]:
    """The mean accuracy, or squared error, of fresh rows."""
    if target.classes is None:
        by_row = (scores * target.deviation + target.mean - wanted).square()
    else:
        by_row = torch.where(scores > 0, wanted, 1 - wanted)
    means: list[float] = by_row.double().mean((1, 2)).tolist()
    return means


def sum_up(records: Sequence[Record], chance: float) -> Mapping[str, Sequence[float]]:
    """For each run, whether the intervals held the truth, and what was called above
    chance.
    """
    fresh = np.mean([record.fresh for record in records], 0)
    # Of fresh numbers, whose true mean is 0.
    spread = np.mean([record.spread for record in records])
    *of_sites, mix = fresh if chance else 1 - fresh / spread
    truth = np.array(of_sites)
    above = {int(site) for site in np.flatnonzero(truth > chance + ROUGH)}
    return {
        "lowest": [float(truth.min())],
        "highest": [float(truth.max())],
        "interval": [_held(record, truth) for record in records],
        "best": [
            float(one.best_interval[0] <= truth[one.best] <= one.best_interval[1])
            for one in records
        ],
        "mix": [
            (
                float(one.low[-1] <= mix <= one.high[-1])
                if len(one.low) > len(truth)
                else np.nan
            )
            for one in records
        ],
        "above": [float(not above.issuperset(one.above)) for one in records],
        "power": [
            len(above & {*one.above}) / len(above) if above else float("nan")
            for one in records
        ],
    }


def _held(record: Record, truth: np.ndarray) -> float:
    sites = len(truth)
    return float(
        np.mean(
            (np.array(record.low[:sites]) <= truth)
            & (truth <= np.array(record.high[:sites]))
        )
    )


def sum_up_centres(
    records: Sequence[Record], chance: float
) -> Mapping[str, Sequence[float]]:
    """For each run, whether a centre is said, and whether its interval held the truth."""
    gains = np.mean([record.fresh for record in records], 0)[:-1] - chance
    layers = np.arange(len(gains))
    said = [float(record.centre is not None) for record in records]
    if (gains < ROUGH).all():
        return {"noise": said}
    ends = np.array([record.centre or (np.nan, np.nan) for record in records])
    # As a centre is said: of the layers that were probed.
    truth = float(np.clip(gains @ layers / gains.sum(), 0, layers[-1]))
    held = np.where(
        np.isnan(ends[:, 0]), np.nan, (ends[:, 0] <= truth) & (truth <= ends[:, 1])
    )
    return {
        "truth": [truth / layers[-1]],
        "said": said,
        "centre": held.tolist(),
        "width": (np.diff(ends)[:, 0] / layers[-1]).tolist(),
    }


def experiment(what: str, draw: Draw, rows: int, share: float) -> Experiment:
    """One condition: this many texts, and the share of a class or the variance along the
    planted direction.
    """
    regress = what.startswith("numbers")
    chance = 0.0 if regress else max(share, 1 - share)
    classes = (
        ""
        if regress
        else (
            ", classes equal"
            if share == 0.5
            else f", classes {share:.0%} and {1 - share:.0%}"
        )
    )
    return Experiment(
        f"{what}, {rows} texts{classes}",
        partial(trials, draw=draw, rows=rows, share=share),
        partial(sum_up, chance=chance),
    )


CLAIMS = {
    "lowest": Claim("true score of the worst site"),
    "highest": Claim("true score of the best site"),
    "interval": Claim("a site's 95% interval holds the truth", 0.93, 0.97),
    "best": Claim("the best site's interval holds the truth", 0.93),
    "mix": Claim("the mix's 95% interval holds the truth", 0.93),
    "above": Claim("a site is called above chance that is not", 0.0, 0.05),
    "power": Claim("sites above chance that are called so"),
}
CLASSES = (
    ("noise", draws.noise),
    ("real states, drawn labels", draws.real),
    ("planted", draws.planted),
    ("real states, planted", draws.real_planted),
)
NUMBERS = (
    ("numbers, noise", draws.numbers, 0.0),
    ("numbers, real states, drawn", draws.real_numbers, 0.0),
    ("numbers, half of their variance planted", draws.numbers, 0.5),
    (
        "numbers, real states, half of their variance planted",
        draws.real_planted_numbers,
        0.5,
    ),
)
GROUPED = (
    ("noise, groups of 4 paraphrases", draws.equal_sizes, draws.NONE, False, 10),
    ("noise, groups of 4 paraphrases", draws.equal_sizes, draws.NONE, False, 40),
    ("planted, groups of 4 paraphrases", draws.equal_sizes, draws.STRENGTHS, False, 40),
    ("noise, Zipf group sizes", draws.zipf_sizes, draws.NONE, False, 50),
    ("planted, Zipf group sizes", draws.zipf_sizes, draws.STRENGTHS, False, 50),
    ("noise, lognormal text lengths", draws.lognormal_sizes, draws.NONE, True, 50),
    (
        "planted, lognormal text lengths",
        draws.lognormal_sizes,
        draws.STRENGTHS,
        True,
        50,
    ),
)


def grouped_experiment(
    what: str, draw: Draw, groups: int, unit: str = "groups"
) -> Experiment:
    """One condition in which texts belong together, with classes of equal chances."""
    trial = partial(trials, draw=draw, rows=groups, share=0.5)
    return Experiment(f"{what}, {groups} {unit}", trial, partial(sum_up, chance=0.5))


WITH_GROUPS = (
    [
        grouped_experiment(
            what,
            partial(
                draws.grouped, sizes=sizes, strengths=strengths, as_tokens=as_tokens
            ),
            groups,
        )
        for what, sizes, strengths, as_tokens, groups in GROUPED
    ]
    + [
        grouped_experiment(
            f"{what}, minimal pairs",
            partial(draws.minimal_pairs, strengths=strengths),
            pairs,
            "pairs",
        )
        for pairs in (20, 30)
        for what, strengths in (
            ("noise", draws.NONE),
            ("planted", draws.STRENGTHS),
            ("often without an error", draws.STRONG),
        )
    ]
    + [
        grouped_experiment(
            f"often without an error, {what}",
            partial(
                draws.grouped, sizes=sizes, strengths=draws.STRONG, as_tokens=False
            ),
            groups,
        )
        for what, sizes, groups in (
            ("groups of 4 paraphrases", draws.equal_sizes, 10),
            ("groups of 4 paraphrases", draws.equal_sizes, 20),
            ("Zipf group sizes", draws.zipf_sizes, 50),
        )
    ]
)
STUDY = Study(
    "probe",
    "Six sites of 64 channels of noise; the same with a direction that tells the class"
    " planted at five of them; six\nlayers of smollm2 with drawn labels, or with labels"
    " that follow a direction of layer.18. The truth of a site is the\nscore on fresh"
    " draws of the probes of its folds, averaged over training sets of that size. In"
    " rows with groups half of\nthe variance of a text is that of its group, 90% in"
    " minimal pairs, and Zipf sizes fall as 1 / rank; their mix was not\nmeasured.",
    CLAIMS,
    [
        experiment(name, draw, rows, share)
        for share in (0.5, UNEQUAL)
        for rows in TEXTS
        for name, draw in CLASSES
    ]
    + [
        experiment(
            f"planted, {draws.TOKENS} tokens a text", draws.planted_tokens, rows, 0.5
        )
        for rows in TEXTS[:2]
    ]
    + [
        experiment(name, draw, rows, share)
        for rows in TEXTS
        for name, draw, share in NUMBERS
    ]
    + WITH_GROUPS,
)


def of_curve(
    rows: int,
    strengths: Sequence[float],
    sizes: Callable[[int], list[int]] = draws.single_sizes,
) -> Any:
    """Trials of texts whose sites tell the class this well."""
    draw = partial(draws.grouped, sizes=sizes, strengths=strengths, as_tokens=False)
    return partial(trials, draw=draw, rows=rows, share=0.5)


CURVES = {
    "rising": draws.STRENGTHS,
    "early": draws.EARLY,
    "flat": draws.FLAT,
    "only the last site": draws.LAST,
}
CENTRES = (
    [(f"{texts} texts, noise", of_curve(texts, draws.NONE), 0.5) for texts in TEXTS]
    + [
        (f"{texts} texts, {what}", of_curve(texts, curve), 0.5)
        for texts in (50, 200)
        for what, curve in CURVES.items()
    ]
    + [
        (
            f"40 groups of 4 paraphrases, {what}",
            of_curve(40, curve, draws.equal_sizes),
            0.5,
        )
        for what, curve in (("noise", draws.NONE), *CURVES.items())
    ]
    + [
        (
            "50 groups of Zipf sizes, rising",
            of_curve(50, draws.STRENGTHS, draws.zipf_sizes),
            0.5,
        ),
        (
            "30 minimal pairs, rising",
            partial(
                trials,
                draw=partial(draws.minimal_pairs, strengths=draws.STRENGTHS),
                rows=30,
                share=0.5,
            ),
            0.5,
        ),
    ]
    + [
        (
            f"{rows} texts, {what}, classes 75% and 25%",
            partial(trials, draw=draw, rows=rows, share=UNEQUAL),
            UNEQUAL,
        )
        for rows in (50, 200)
        for what, draw in (("noise", draws.noise), ("rising", draws.planted))
    ]
    + [
        (
            f"{rows} texts, real states, {what}",
            partial(trials, draw=draw, rows=rows, share=0.5),
            0.5,
        )
        for rows in (50, 200)
        for what, draw in (("drawn", draws.real), ("planted", draws.real_planted))
    ]
)
CENTRE_STUDY = Study(
    "probe: the centre of gravity",
    "Six sites as above, with a direction that tells the class planted in one of four"
    " ways: it rises from site to site, it falls\nto nothing, it is the same at all"
    " sites, or there is one at the last site alone. The truth is the centre of the"
    " scores on\nfresh draws, as a share of the depth.",
    {
        "truth": Claim("true centre, as a share of the depth"),
        "centre": Claim("the centre's 95% interval holds the truth", 0.93),
        "noise": Claim("a centre is given where there is nothing", 0.0, 0.05),
        "said": Claim("a centre is given where there is something"),
        "width": Claim("width of the interval, as a share of the depth"),
    },
    [
        Experiment(what, trial, partial(sum_up_centres, chance=chance))
        for what, trial, chance in CENTRES
    ],
)

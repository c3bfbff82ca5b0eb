"""Monitors: the threshold of a probe, probes that pool the scores of tokens, their test
on other texts, and directions that move along a series.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.series.moved import shifts
from hiddenscope.sites import Site
from hiddenscope.states import Source, States, Tokens
from hiddenscope.states.arrays import Floats, Ints
from labs.calibrate.trials import Claim, Experiment, Study, each

# Thresholds of one trial, and fresh groups that show how often each rings.
THRESHOLDS, FRESH_GROUPS = 20, 20_000
FRESH_TEXTS = 400
WIDTH = 12


def threshold_trial(seed: int, groups: int, size: int, rate: float) -> dict[str, float]:
    """Set thresholds on heavy-tailed scores; texts of a group share half of theirs."""
    random = np.random.default_rng(seed)
    probe = hs.Probe().fit([[0.0], [1.0]], [0, 1])
    kept, held = [], []
    for _ in range(THRESHOLDS):
        found = probe.threshold(_highest(random, groups, size), false_positives=rate)
        share = float((_highest(random, FRESH_GROUPS, size) > found.value).mean())
        # The count of fresh alarms is itself off by about this.
        slack = (rate / FRESH_GROUPS) ** 0.5
        kept.append(share <= rate + slack)
        held.append(share <= found.at_most + slack)
    return {"rate": float(np.mean(kept)), "bound": float(np.mean(held))}


def _highest(random: np.random.Generator, groups: int, size: int) -> Floats:
    shared = random.standard_t(4, (groups, 1))
    highest: Floats = (shared + random.standard_t(4, (groups, size))).max(1)
    return highest


def text_trial(seed: int, groups: int, size: int, copies: int) -> dict[str, float]:
    """Set a threshold of 5% on states of texts: single ones, copies, or paraphrases
    that the data name.
    """
    random = np.random.default_rng(seed)
    shared = random.standard_t(4, (groups, 1))
    scores = np.repeat(shared + random.standard_t(4, (groups, size)), copies, 1)
    texts = []
    for group in range(groups):
        for member in range(size):
            texts += [f"{group} {member}"] * copies
    count = len(texts)
    tokens = Tokens(
        tuple(texts), np.arange(count), [0] * count, [7] * count, ("x",) * count
    )
    values = torch.from_numpy(scores.reshape(1, count, 1))
    states = States((Site(1),), values, tokens, Source("drawn"))
    number = np.repeat(np.arange(groups), size * copies)
    probe = hs.Probe(site="layer.1").fit([[0.0], [1.0]], [0, 1])
    probe.coef_, probe.intercept_ = np.ones((1, 1)), np.zeros(1)
    given = states if size == 1 else (states, hs.read(texts, group=number))
    found = probe.threshold(given, false_positives=0.05)
    share = float((_highest(random, FRESH_GROUPS, size) > found.value).mean())
    return {"rate": float(share <= 0.05), "bound": float(share <= found.at_most)}


def _drawn(random: np.random.Generator, count: int, signal: float) -> States:
    """Draw states of texts; every second has a signal at three tokens in a row."""
    lengths = random.integers(6, 20, count)
    parts = []
    for number, length in enumerate(lengths):
        states = random.normal(size=(length, WIDTH))
        start = random.integers(0, length - 3)
        states[start : start + 3, 0] += signal * (number % 2)
        parts.append(states)
    values = torch.from_numpy(np.concatenate(parts))[None]
    return States((Site(1),), values, _tokens(random, lengths), Source("drawn"))


def _tokens(random: np.random.Generator, lengths: Ints, copies: int = 1) -> Tokens:
    """Draw ids; this many texts one after another are copies."""
    total = int(lengths.sum())
    ids = []
    for length in lengths[::copies]:
        ids += [random.integers(5, 10**9, length)] * copies
    return Tokens(
        None,
        text=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        ids=np.concatenate(ids),
        strings=("x",) * total,
        count=len(lengths),
    )


def pooled_trial(seed: int, pool: str, texts: int, signal: float) -> dict[str, float]:
    """Probe drawn texts, test the probe on others, and score it on many fresh ones."""
    random = np.random.default_rng(seed)
    labels = [0, 1] * (texts // 2)
    states, test = _drawn(random, texts, signal), _drawn(random, texts, signal)
    result = hs.probe(states, labels, test=(test, labels), pool=pool, seed=seed)
    fresh = _drawn(random, FRESH_TEXTS, signal)
    parts = fresh["layer.1"].split(fresh.tokens.lengths.tolist())
    true = hs.Probe.of(result).score(list(parts), [0, 1] * (FRESH_TEXTS // 2))
    facts = result.facts
    best, tested = facts["best"], facts["test"]
    if not signal:
        # What can be read from noise is known.
        true = 0.5
    return {
        "above": float(bool(facts["above_chance_at"])) if not signal else np.nan,
        "accuracy": float(best["interval"][0] <= true <= best["interval"][1]),
        "tested": float(tested["interval"][0] <= true <= tested["interval"][1]),
    }


def moved_trial(
    seed: int,
    texts: int,
    copies: int,
    count: int = 8,
    massive: float = 0.0,
    width: int = WIDTH,
) -> dict[str, float]:
    """Move all states by one vector and by noise; the directions are random ones.

    The first and third token of a text may be `massive`, far out along one vector.
    """
    random = np.random.default_rng(seed)
    lengths = np.repeat(random.integers(4, 16, texts), copies)
    mixing = random.normal(size=(width, width))
    shift = 0.1 * random.normal(size=width) @ mixing
    far = massive * random.normal(size=width) @ mixing
    parts, moves = [], []
    for length in lengths[::copies]:
        part = random.normal(size=(length, width)) @ mixing
        part[:3:2] += far
        of_text = 0.3 * random.normal(size=width) @ mixing
        parts += [part] * copies
        moves += [shift + of_text + 0 * part] * copies
    tokens = _tokens(random, lengths, copies)
    values = torch.from_numpy(np.concatenate(parts))[None]
    before = States((Site(1),), values, tokens, Source("drawn"))
    after = values + torch.from_numpy(np.concatenate(moves))[None]
    vectors = random.normal(size=(count, width)) @ mixing
    dictionary = hs.Dictionary.of(vectors, "layer.1")
    moved = States((Site(1),), after, tokens, Source("drawn"))
    columns = {
        name: part[1] for name, part in shifts(moved, before, dictionary).items()
    }
    left_out = (0, 2) if massive else (0,)
    later = ~np.isin(tokens.positions, left_out)
    deviation = (values[0].numpy()[later] @ vectors.T).std(0, ddof=1)
    true = shift @ vectors.T / deviation
    low, high = columns["shift_low"], columns["shift_high"]
    beyond = np.abs(columns["shift"]) > columns["shift_random"]
    return {
        "shifts": float(((low <= true) & (true <= high)).all()),
        "moved": float((beyond & (low * high > 0)).any()),
    }


def sum_up(records: Sequence[Mapping[str, float]]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    return {key: [record[key] for record in records] for key in records[0]}


def _experiment(what: str, trial: Callable[..., Any], **options: Any) -> Experiment:
    return Experiment(what, each(partial(trial, **options)), sum_up)


STUDY = Study(
    "monitor",
    "Thresholds on scores with a heavy tail; where texts come in groups, the highest"
    " score of each group was given.\nThen on states of texts, of which some come four"
    " times, or are paraphrases that the data name. Probes that pool the scores of tokens, of noise"
    " and of texts with a signal at three tokens, tested on as many\nother texts. States"
    " that all move alike, along directions that are as random as the control.",
    {
        "rate": Claim("fresh negatives ring no more often than wanted", 0.95),
        "bound": Claim("the bound of the threshold holds how often they ring", 0.95),
        "above": Claim("noise is called above chance", 0.0, 0.05),
        "accuracy": Claim("the interval of the best site holds its accuracy", 0.93),
        "tested": Claim("the interval on other texts holds the accuracy there", 0.93),
        "shifts": Claim("the intervals of all shifts hold them", 0.93),
        "moved": Claim("a random direction is said to have moved", 0.0, 0.05),
    },
    [
        _experiment(
            "300 negatives, 1%", threshold_trial, groups=300, size=1, rate=0.01
        ),
        _experiment(
            "1,000 negatives, 1%", threshold_trial, groups=1000, size=1, rate=0.01
        ),
        _experiment(
            "3,000 negatives, 0.1%", threshold_trial, groups=3000, size=1, rate=0.001
        ),
        _experiment(
            "500 groups of 4, 1%", threshold_trial, groups=500, size=4, rate=0.01
        ),
        _experiment("100 texts, 5%", text_trial, groups=100, size=1, copies=1),
        _experiment(
            "100 texts, each four times, 5%", text_trial, groups=100, size=1, copies=4
        ),
        _experiment(
            "100 groups of 4 paraphrases, 5%", text_trial, groups=100, size=4, copies=1
        ),
        _experiment(
            "noise, 30 texts, rolling:3",
            pooled_trial,
            pool="rolling:3",
            texts=30,
            signal=0.0,
        ),
        _experiment(
            "noise, 30 texts, softmax",
            pooled_trial,
            pool="softmax",
            texts=30,
            signal=0.0,
        ),
        _experiment(
            "noise, 30 texts, attention",
            pooled_trial,
            pool="attention",
            texts=30,
            signal=0.0,
        ),
        _experiment(
            "planted, 40 texts, rolling:3",
            pooled_trial,
            pool="rolling:3",
            texts=40,
            signal=3.0,
        ),
        _experiment(
            "planted, 40 texts, softmax",
            pooled_trial,
            pool="softmax",
            texts=40,
            signal=3.0,
        ),
        _experiment(
            "planted, 40 texts, attention",
            pooled_trial,
            pool="attention",
            texts=40,
            signal=3.0,
        ),
        _experiment("10 texts that move", moved_trial, texts=10, copies=1),
        _experiment("40 texts that move", moved_trial, texts=40, copies=1),
        _experiment(
            "20 texts that move, each four times", moved_trial, texts=20, copies=4
        ),
        _experiment(
            "40 texts that move, 500 directions",
            moved_trial,
            texts=40,
            copies=1,
            count=500,
        ),
        _experiment(
            "10 texts that move, 64 wide, 100 directions",
            moved_trial,
            texts=10,
            copies=1,
            count=100,
            width=64,
        ),
        _experiment(
            "40 texts that move, with massive tokens",
            moved_trial,
            texts=40,
            copies=1,
            massive=50.0,
        ),
    ],
)

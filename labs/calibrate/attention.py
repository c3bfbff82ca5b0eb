"""Attention: the tests of what heads read, on weights with a known truth."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.analyses.attention.relations import (
    INDUCTION,
    PLACES,
    RandomTexts,
    RelationTally,
    RelationTests,
    draw_texts,
    measure_relations,
)
from hiddenscope.analyses.attention.selection import select_attentions
from hiddenscope.passes import Inputs
from hiddenscope.passes.attention_weights import WeightRows
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats
from hiddenscope.testing import tiny_model
from labs.calibrate.trials import Claim, Experiment, Study, each

LAYERS, HEADS, RUN = 3, 12, 24
TOKENS = 1 + 2 * RUN
LEVEL = 0.05
NAN = float("nan")


class Findings(NamedTuple):
    """What one run found: `false` and `false_half` are 1 where any finding is false,
    and `found` and `found_half` are shares of what is planted.
    """

    false: float
    false_half: float
    found: float
    found_half: float


class Planted(NamedTuple):
    """Weights that the first heads of the last layer give a related token.

    One head is planted for each relation. The weight of a row is drawn around the mean.
    """

    weight: float = 0.0
    spread: float = 0.0


def trial(seed: int, concentration: float, draws: int, planted: Planted) -> Findings:
    """Test rows of random weights, into which some related tokens are planted.

    The rows of heads with no plan are Dirichlet: every visible token is as likely to
    get a weight as any other.
    """
    generator = np.random.default_rng(seed)
    texts = RandomTexts(Inputs(((0,) * TOKENS,) * (2 * draws)), draws, 1, RUN, True)
    sites = [Site(layer, "attn") for layer in range(1, LAYERS + 1)]
    columns = {site: list(range(HEADS)) for site in sites}
    tally = RelationTally(texts, columns, HEADS)
    for site in sites:
        weights = _dirichlet(generator, 2 * draws, concentration)
        if site == sites[-1] and planted.weight:
            _plant(generator, weights, draws, planted)
        rows = range(TOKENS)
        values = torch.from_numpy(weights)
        tally.receive(WeightRows([site], range(2 * draws), rows, values[None]))
    return _findings(tally.tests(seed), planted)


def _dirichlet(
    generator: np.random.Generator, texts: int, concentration: float
) -> Floats:
    """Return rows of weights [text, head, query, key] of causal attention."""
    shape = (texts, HEADS, TOKENS, TOKENS)
    draws = generator.gamma(concentration, size=shape) + 1e-30
    weights = np.tril(draws)
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def _plant(
    generator: np.random.Generator, weights: Floats, draws: int, planted: Planted
) -> None:
    """Give the related tokens of the first heads a share of each row."""
    for head, relation in enumerate((*PLACES, INDUCTION)):
        for query in range(1, TOKENS):
            key = {"previous": query - 1, "first": 0, "same": query}.get(relation)
            some = slice(None)
            if relation == INDUCTION:
                key = query - RUN + 1
                some = slice(draws, None)
                if query <= RUN:
                    continue
            rows = weights[some, head, query]
            share = generator.normal(planted.weight, planted.spread, len(rows))
            share = np.clip(share, 0, 1)[:, None]
            # The other tokens share what is left, and the related token gets no more.
            rows[:, key] = 0
            rows *= (1 - share) / np.maximum(rows.sum(1, keepdims=True), 1e-30)
            rows[:, key] = share[:, 0]


def _findings(tests: RelationTests, planted: Planted) -> Findings:
    """Compare what was found with what is planted."""
    is_planted = np.zeros(tests.p.shape, dtype=bool)
    if planted.weight:
        for number in range(len(tests.relations)):
            is_planted[number, -1, number] = True
    # A planted head reads other tokens less, or more: whether it reads them more than
    # chance gives is no question of this trial.
    is_null = np.ones(tests.p.shape, dtype=bool)
    if planted.weight:
        is_null[:, -1, : len(tests.relations)] = False
    found, above_half = tests.p < LEVEL, tests.p_half < LEVEL
    has_half = is_planted & (planted.weight > 0.5)
    return Findings(
        float((found & is_null).any()),
        float((above_half & ~has_half).any()),
        float(found[is_planted].mean()) if is_planted.any() else NAN,
        float(above_half[has_half].mean()) if has_half.any() else NAN,
    )


def untrained_trial(seed: int, family: str, draws: int) -> Findings:
    """Test a model of random weights, in which no head reads what was repeated.

    Heads of random weights may well read the first token more than others, so that
    only induction is false for certain.
    """
    module = tiny_model(family, layers=LAYERS, seed=seed)
    model = hs.load((module, None))
    selection = select_attentions(model, None, None)
    texts = draw_texts(model, None, draws, seed, causal=True)
    assert texts is not None, "tiny models take texts of this length"
    tests = measure_relations(model, texts, selection, seed)
    induction = tests.relations.index(INDUCTION)
    return Findings(float((tests.p[induction] < LEVEL).any()), NAN, NAN, NAN)


def sum_up(records: Sequence[Findings]) -> Mapping[str, Sequence[float]]:
    return {
        key: [getattr(record, key) for record in records] for key in Findings._fields
    }


NOTHING = Planted()
DIRICHLET = {
    "even rows, 16 draws": (5.0, 16, NOTHING),
    "random rows, 16 draws": (1.0, 16, NOTHING),
    "random rows, 8 draws": (1.0, 8, NOTHING),
    "peaked rows, 16 draws": (0.1, 16, NOTHING),
    "rows of nearly one token, 16 draws": (0.02, 16, NOTHING),
    "a weight of 0.2 planted, 16 draws": (1.0, 16, Planted(0.2, 0.1)),
    "a weight of 0.5 planted, 16 draws": (1.0, 16, Planted(0.5, 0.1)),
    "a weight of 0.7 planted, 16 draws": (1.0, 16, Planted(0.7, 0.1)),
    "a weight of 0.7 planted, 8 draws": (1.0, 8, Planted(0.7, 0.1)),
}
UNTRAINED = ("llama", "gpt2", "gemma3_text")

STUDY = Study(
    "attention",
    f"{LAYERS * HEADS} heads, four relations. Rows of weights are Dirichlet over the"
    " tokens that can be seen; in some, one head for\neach relation gives the related"
    " token a weight around a mean. Then tiny models with random weights, where only"
    "\ninduction counts as false, which no head can have learned.",
    {
        "false": Claim("any head is listed that reads by chance", high=0.05),
        "false_half": Claim(
            "any is said to give more than half, and does not", high=0.05
        ),
        "found": Claim("planted heads that are listed", low=0.95),
        "found_half": Claim(
            "of those of more than half, that are said to be", low=0.95
        ),
    },
    [
        *(
            Experiment(
                what,
                each(
                    partial(
                        trial,
                        concentration=concentration,
                        draws=draws,
                        planted=planted,
                    )
                ),
                sum_up,
            )
            for what, (concentration, draws, planted) in DIRICHLET.items()
        ),
        *(
            Experiment(
                f"untrained {family}, 16 draws",
                each(partial(untrained_trial, family=family, draws=16)),
                sum_up,
            )
            for family in UNTRAINED
        ),
    ],
)

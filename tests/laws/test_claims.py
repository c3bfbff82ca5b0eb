"""Claims: of noise no analysis says that it found something more often than its level,
and each finds what is planted.

A sentence that compares numbers is one of two. Either it is a claim, which goes beyond
the texts at hand: it has a test or an interval, and noise may bring it up as often as
its level says. Or it describes what was measured, and beside it the result says that
nothing was tested.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.analyses.lens.compute import half_from
from hiddenscope.analyses.steer.story import Setting
from hiddenscope.catalog import ANALYSES
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.separation import separation
from hiddenscope.results import views_of
from hiddenscope.testing import tiny_model
from hiddenscope.testing.sentences import CERTAIN, sentences, unbacked, unsound
from tests.planted import random_graft, random_model, random_texts
from tests.registry import ENTRIES

Tiny = Callable[..., hs.Model]

LEVEL = 0.05

CLAIMS = {
    "project": r"\bare apart at\b",
    "probe": r"^Better than guessing",
    "examples": r"^It prefers\b",
    "graft": r"\bthey differ by\b|\braises the loss (more|less)\b",
    "variable": r"holds the variable",
    "drift": r"^Drift: the two first differ at\b",
    # Heads of random weights do read some tokens more than others.
    "attention": r"^(?!No head).*(\bmore than half of the weight\b|\bwithout repetition gives)",
}


def said(result: hs.Result, pattern: str) -> bool:
    return any(re.search(pattern, sentence) for sentence in sentences(result))


NOISE = {word: entry.noise for word, entry in ENTRIES.items() if entry.noise}
PLANTED = {word: entry.planted for word, entry in ENTRIES.items() if entry.planted}


def test_every_analysis_is_under_the_law() -> None:
    results = {analysis.word for analysis in ANALYSES if analysis.result}
    assert set(NOISE) == set(PLANTED) == results


@pytest.mark.parametrize("word", NOISE)
def test_what_compares_has_a_test_or_says_that_it_has_none(word: str) -> None:
    result = NOISE[word](np.random.default_rng(1))
    assert unbacked(result) == []
    assert [problem for line in sentences(result) for problem in unsound(line)] == []
    if word not in CLAIMS:
        # It may describe; the words by which the others claim are not its own.
        assert not any(said(result, claim) for claim in CLAIMS.values())
        assert not said(result, CERTAIN.pattern)
    titles = " ".join(view.title for view in views_of(result))
    assert not re.search(r"\b(better|worse|tighter|significant|because)\b", titles)


def test_the_law_sees_a_sentence_that_compares_without_a_test() -> None:
    result = NOISE["search"](np.random.default_rng(0))
    nearest = [
        {
            **result.facts["nearest"][0],
            "query": "a. This one is better than the others. b",
        }
    ]
    changed = hs.Result("search", result.data, {**result.facts, "nearest": nearest}, {})
    assert unbacked(changed) == ["This one is better than the others."] * 2, (
        "in the findings and on the page"
    )


@pytest.mark.parametrize(
    ("word", "runs"),
    [
        ("graft", 300),
        ("examples", 40),
        pytest.param("variable", 20, marks=pytest.mark.slow),
        pytest.param("project", 40, marks=pytest.mark.slow),
        pytest.param("probe", 30, marks=pytest.mark.slow),
        pytest.param("drift", 10, marks=pytest.mark.slow),
        pytest.param("attention", 6, marks=pytest.mark.slow),
    ],
)
def test_noise_brings_up_a_claim_no_more_often_than_its_level(
    word: str, runs: int
) -> None:
    told = [NOISE[word](np.random.default_rng(seed)).summary() for seed in range(runs)]
    claims = sum(
        any(re.search(CLAIMS[word], line.strip()) for line in lines.splitlines())
        for lines in told
    )
    assert claims <= LEVEL * runs + 2 * (LEVEL * (1 - LEVEL) * runs) ** 0.5


@pytest.mark.parametrize("word", PLANTED)
def test_what_is_planted_is_found(word: str) -> None:
    make, pattern = PLANTED[word]
    result = make()
    assert said(result, pattern), result.summary()
    assert unbacked(result) == []


def many_texts(generator: np.random.Generator) -> list[list[int]]:
    texts: list[list[int]] = generator.integers(5, 60, (8, 12)).tolist()
    return texts


def test_averages_over_texts_claim_only_with_an_interval() -> None:
    """Every sentence that compares holds an interval."""
    sampling = hs.Sampling(per_text=3, baseline="random")
    for seed in range(2):
        texts = many_texts(np.random.default_rng(seed))
        result = hs.visibility(random_model(1), texts, sampling=sampling)
        assert unbacked(result) == []


def test_a_model_that_mixes_no_tokens_sees_its_own_column() -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.o_proj.weight.mul_(1e-3)
    texts = many_texts(np.random.default_rng(0))
    result = hs.visibility(hs.load((module, None)), texts)
    column = r"(9\d|100)% \(.+ to 100%\) of that of all lower sites on average: yes"
    assert said(result, column), result.summary()


def test_embed_says_how_alike_vectors_are_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    texts = random_texts(np.random.default_rng(0), 6)
    for model in (random_model(0), random_model(1)):
        hs.embed(model, texts)
    assert len(notes) == 2 and all(
        re.search(r"the mean cosine of two of the 6 texts is -?\d\.\d\d", n)
        for n in notes
    )


def test_a_share_that_falls_again_is_not_kept_from_there_on() -> None:
    sites = [f"layer.{k}" for k in range(5)]
    assert half_from(sites, np.array([0.0, 0.6, 0.2, 0.5, 0.8])) == "layer.3"
    assert half_from(sites, np.zeros(5)) is None


def test_small_changes_and_shares_of_nothing_are_not_rounded_away() -> None:
    setting = Setting(
        answer=" a",
        site="layer.1",
        strength=1.0,
        probability_before=0.0,
        probability=0.1,
        ratio=float("nan"),
        perplexity=100.0,
        perplexity_change=-3e-4,
    )
    assert setting.moved == "from a probability of 0 to 0.1, perplexity -0.03%"
    twice = replace(setting, probability_before=0.05, ratio=2.0, perplexity_change=1.5)
    assert (
        twice.moved == "from a probability of 0.05 to 0.1 (2 times), perplexity +150%"
    )
    right = np.zeros((12, 1000), dtype=bool)
    right[4:8, :8] = (
        # Eight of a thousand prompts are right with blocks from the middle alone.
        True
    )
    assert said(
        random_graft(np.random.default_rng(0), right),
        r"they differ by \+0\.8 percentage points",
    )


def test_the_median_of_two_shuffles_is_between_them() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 3)))
    labels = torch.tensor([[0, 1] * 4, [0, 0, 1, 1] * 2, [0] * 4 + [1] * 4])
    for name, score in separation(Distances(rows), labels).items():
        # Of this one, less is better.
        two = score.under_labels[1:] * (-1 if name == "within" else 1)
        if name == "neighbour":
            # It is kept less the share of pairs of one class: here 2 x 4 x 3 of 8 x 7.
            two = two + 24 / 56
        assert score.chance == pytest.approx(float(two.mean()), abs=1e-6)

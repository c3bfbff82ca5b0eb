"""The reader of sentences finds nothing wrong in what was recorded of every analysis,
and sees each number of it that is changed into one that cannot be.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest

from hiddenscope.testing.sentences import (
    INTERVAL,
    NUMBER,
    OF,
    Reading,
    bare,
    readings,
    sentences,
    unbacked,
    unsound,
)
from tests.unit.views.recorded import names, recorded, variants

# What was said wrong once, or would be.
WRONG = {
    "0 act on none of these tokens (0%); other texts may wake some.": "vacuous",
    "0 of 12 cells have an effect of exactly 0, because both runs agree.": "vacuous",
    "24 texts make 2 clusters; 0 belong to none.": "vacuous",
    "On average 61% of it (from 61% at layer.2 to 61% at layer.2).": "vacuous",
    "The mean was taken over 0 tokens.": "vacuous",
    "The same holds at 1 more sites.": "one of several",
    "All 1 texts were compared with every query.": "one of several",
    "It was measured on 12 text.": "one of several",
    "At 7 of 4 tokens the states are equal.": "7 of 4",
    "All of them: 9 of 8.": "9 of 8",
    "The strongest 0.1% of the edges (1 of 262) keep 0.96.": "as 0.1%",
    "It keeps 3 of 4 tokens (20%).": "as 20%",
    "The rank correlation is 2.4 (-0.51 to 0.50) on average.": "correlation of 2.4",
    "By the influence, the rank correlation is -1.01 over sites.": "correlation",
    "Nearest is text 24, with cosine -1.20.": "cosine",
    "The token that predicts has 166% of the influence.": "share of 166%",
    "It has -3% of the influence.": "share of -3%",
    "There the nearest neighbour agrees (p = 0, corrected).": "p of 0",
    "There the nearest neighbour agrees (p = 0.000, corrected).": "p of 0.000",
    "The difference is not significant (sign-flip test: p = 1.2).": "p of 1.2",
    "After it the model predicts it with probability 1.06.": "probability",
    "From a probability of 0.011 to 1.2 (0.36 times).": "probability",
    "It has an accuracy of 104% (95% interval 70% to 108%).": "accuracy",
    "Its AUROC is so: AUROC of 1.20 (95% interval 0.38 to 1.00).": "AUROC",
    "The best site is layer.0: R² 1.20 (R² 0.28 to R² 0.48).": "R²",
    "The perplexity moved, perplexity -126%.": "change",
    "It holds 50% (95% interval 74% to 100%).": "outside of its interval",
    "It holds 80% (95% interval 100% to 74%).": "an interval from 100%",
    "The dictionary 0.006 (95% interval 0.006 to 0.006).": "no width",
    "The mean distance changes by +1.05 (+1.10 to +1.58) tokens.": "outside",
    "The median norm of the first token is nan.": "no number",
    "It is strongest at None, with inf at layer.2.": "no number",
}


@cache
def told(name: str) -> tuple[str, ...]:
    found = list(sentences(recorded(name)))
    for result in variants(name):
        found += sentences(result)
    return tuple(dict.fromkeys(found))


@pytest.mark.parametrize("name", names())
def test_what_is_said_of_a_recorded_result_is_sound(name: str) -> None:
    assert [problem for sentence in told(name) for problem in unsound(sentence)] == []
    assert unbacked(recorded(name)) == []


@pytest.mark.parametrize(("sentence", "problem"), WRONG.items())
def test_what_is_wrong_is_seen(sentence: str, problem: str) -> None:
    assert any(problem in found for found in unsound(sentence)), unsound(sentence)


def test_every_number_that_is_changed_into_an_impossible_one_is_seen() -> None:
    seen: Counter[str] = Counter()
    for sentence in dict.fromkeys(line for name in names() for line in told(name)):
        for kind, mutant in mutants(sentence):
            assert unsound(mutant), (kind, mutant)
            seen[kind] += 1
    # Of each kind there is something to be changed, in many stories.
    for kind in ("share", "p", "cosine", "accuracy", "probability", "correlation"):
        assert seen[kind] >= 5, seen
    assert seen["n of m"] > 40 and seen["interval"] > 60 and seen["number"] > 1000, seen


def mutants(sentence: str) -> Iterator[tuple[str, str]]:
    """Yield a sentence with one number changed into what it cannot be."""
    text = bare(sentence)
    for match in re.finditer(NUMBER, text):
        yield "number", sentence[: match.start()] + "nan" + sentence[match.end() :]
    for reading in readings(sentence):
        for written in impossible(reading, text):
            changed = sentence[: reading.start] + written + sentence[reading.end :]
            yield reading.kind.name, changed
    for match in OF.finditer(text):
        more = str(int(match[2].replace(",", "")) + 1)
        yield "n of m", sentence[: match.start(1)] + more + sentence[match.end(1) :]
    for match in INTERVAL.finditer(text):
        (first, last), (start, end) = match.span(3), match.span(4)
        low, high = sentence[first:last], sentence[start:end]
        swapped = sentence[:first] + high + sentence[last:start] + low + sentence[end:]
        yield "interval", swapped
        yield "interval", sentence[:start] + low + sentence[end:]


def impossible(reading: Reading, text: str) -> Iterator[str]:
    """Yield numbers below and above all that a reading can be, as it writes them."""
    percent = text[reading.end - 1] == "%"
    factor, sign = (100, "%") if percent else (1, "")
    if math.isfinite(reading.kind.most):
        yield f"{factor * reading.kind.most + 2:g}{sign}"
    # A minus tells a difference from a share: it may be below 0.
    if math.isfinite(reading.kind.least) and reading.kind.name != "nats":
        yield f"{factor * reading.kind.least - 2:g}{sign}"

"""Probing: is a variable read where the circuit holds it, and nowhere else?

What a linear probe can read at a site is not only what was written there: the number of
ones says whether it is odd, and a token says something of most variables. So scores are
compared with those of scikit-learn on the program's own values at the site, without the
model. Two labels cannot be read at all: a coin that is flipped for each text, and at
`layer.0` a variable of which the last token says nothing.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import (
    GroupKFold,
    KFold,
    StratifiedGroupKFold,
    cross_val_predict,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.program import Positions, Program, Tokens, Trace, Value, Variable
from labs.truth.tally import Question, Scorecard

TEXTS = 40
# Every value of a variable is in this share of the texts or more: in five of forty, one
# for each fold. Where texts with rare values are left out, it is in fewer.
FREQUENT = 0.125
FOLDS = 5
# Variables that are probed beside the output, drawn at random.
OTHERS = 1
# The largest number of inputs that are all run, to learn what a token says.
MOST_INPUTS = 1_100
# A score this near to that of scikit-learn is the same.
NEAR = 0.01

READ = Question(
    "probe",
    "accuracy (R² of a number) at and above the site where a variable is written",
    "the row of one site below; that of guessing, where nothing is known",
    "mean",
)
BELOW = Question(
    "probe",
    "the same of scikit-learn one site below, on the program's own values: what is read"
    " without the variable (null)",
    "null",
    "mean",
)
GUESSED = Question(
    "probe",
    "the same by guessing the largest class, or the mean (null)",
    "null",
    "mean",
)
CALLED = Question(
    "probe",
    "a variable is called above chance at its writing site and every one above",
    "the row of one site below: what is read need not be written",
)
CALLED_BELOW = Question(
    "probe",
    "a variable is called above chance one site below its writing (null)",
    "null",
)
FIRST = Question(
    "probe",
    f"the first site within {NEAR} of the best is that of scikit-learn on the"
    " program's own values",
    "the row of a site drawn at random",
)
LOWEST = Question(
    "probe",
    "the lowest site that is called above chance is where the variable is written",
    "the row of a site drawn at random; what is read need not be written",
)
SITE_GUESSED = Question(
    "probe",
    "a site is rightly named, for one drawn at random (null)",
    "null",
    "mean",
)
DISTANCE = Question(
    "probe",
    "mean distance over sites from scikit-learn on the program's own values",
    "the row of guessing",
    "mean",
)
DISTANCE_GUESSED = Question(
    "probe",
    "the same distance of guessing the largest class, or the mean (null)",
    "null",
    "mean",
)
FARTHEST = Question(
    "probe",
    "largest distance at a site from scikit-learn on the program's own values",
    "at least the mean distance of guessing",
    "largest",
)
COIN = Question(
    "probe",
    "claims at the first or last site a coin flipped for each text",
    "0.05: the level of the test over both sites; lower is better",
)
NOTHING = Question(
    "probe",
    "claims at layer.0 an output of which the token says nothing",
    "0.05: the level of the test; lower is better",
)
PLAIN_COIN = Question(
    "plain scikit-learn probe",
    f"{COIN.asked} (folds of tokens)",
    "claims of a rule without a test; lower is better",
)
GROUPED_COIN = Question(
    "plain scikit-learn probe",
    f"{COIN.asked} (folds of texts)",
    "claims of a rule without a test; lower is better",
)
PLAIN_NOTHING = Question(
    "plain scikit-learn probe",
    f"{NOTHING.asked} (one token of each text)",
    "claims of a rule without a test; lower is better",
)


@dataclass(frozen=True)
class Probed:
    """Inputs of a model, all variables of each, and the states of all tokens."""

    known: KnownModel
    inputs: list[list[str]]
    traces: list[Trace]

    @cached_property
    def states(self) -> hs.States:
        """Return the states of the residual stream."""
        ids = [self.known.ids(tokens) for tokens in self.inputs]
        states = self.known.model.capture(ids, ",".join(self.known.sites))
        assert isinstance(states, hs.States)
        return states

    @property
    def texts(self) -> NDArray[np.int64]:
        """Return the number of the text of each token."""
        lengths = [len(tokens) for tokens in self.inputs]
        return np.repeat(np.arange(len(lengths)), lengths)

    def labels(self, variable: Variable) -> list[list[Value]]:
        """Return a variable's value at every token, as a probe takes it."""
        convert = float if variable.is_numeric else str
        rows = []
        for trace in self.traces:
            rows.append([convert(value) for value in trace[variable.name]])
        return rows

    def features(self, site: str) -> NDArray[np.float64]:
        """Return what a site holds in the program: numbers, and ones for values."""
        columns = []
        for name in self.known.circuit.present(site):
            variable = self.known.circuit.place(name).variable
            values = list(itertools.chain(*(trace[name] for trace in self.traces)))
            if variable.is_numeric:
                columns.append(np.array(values, dtype=float)[:, None])
                continue
            for other in variable.values:
                column = np.array([value == other for value in values], dtype=float)
                columns.append(column[:, None])
        return np.concatenate(columns, axis=1)


def score_probe(known: KnownModel, card: Scorecard) -> None:
    """Probe the output and some other variables, and labels that mean nothing."""
    # Hosts are given different inputs, so that they do not repeat one another.
    chance = random.Random(f"{known.host} {known.program.name}")
    probed = _draw(known, chance)
    others = _other_variables(known.program)
    drawn = chance.sample(others, min(OTHERS, len(others)))
    for variable in [known.program.output, *drawn]:
        _score_variable(probed, variable, card)
    _score_coin(probed, chance, card)
    _score_nothing(known, chance, card)


def _other_variables(program: Program) -> list[Variable]:
    """Return the variables between input and output, or the input if there are none."""
    others = [each for each in program.variables if each.name != "output"]
    inner = [each for each in others if not isinstance(each, Tokens | Positions)]
    return inner or others


def _draw(known: KnownModel, chance: random.Random) -> Probed:
    """Draw different inputs, without those that have a value which is rare."""
    program = known.program
    seed = chance.randrange(1_000_000)
    drawn = {tuple(tokens): tokens for tokens in program.draw(10 * TEXTS, seed)}
    inputs = list(drawn.values())
    # First among many inputs, where a value is less often rare by chance.
    inputs = _with_frequent_values(program, inputs, 2 * FREQUENT)
    inputs = _with_frequent_values(program, inputs[:TEXTS], FREQUENT)
    return Probed(known, inputs, [program.run(tokens) for tokens in inputs])


def _with_frequent_values(
    program: Program, inputs: list[list[str]], share: float
) -> list[list[str]]:
    """Return inputs all of whose values are in some share of them, or more.

    Those with the rarest value are left out first.
    """
    values = [_values(program, program.run(tokens)) for tokens in inputs]
    while True:
        texts: Counter[tuple[str, Value]] = Counter()
        for of_text in values:
            texts.update(of_text)
        rarest = min(texts, key=lambda value: texts[value])
        if texts[rarest] >= share * len(inputs):
            return inputs
        is_kept = [rarest not in of_text for of_text in values]
        inputs = list(itertools.compress(inputs, is_kept))
        values = list(itertools.compress(values, is_kept))


def _values(program: Program, trace: Trace) -> set[tuple[str, Value]]:
    """Return the values that variables have somewhere in a text, numbers left out."""
    values = set()
    for variable in program.variables:
        if not variable.is_numeric:
            values |= {(variable.name, value) for value in trace[variable.name]}
    return values


def _score_variable(probed: Probed, variable: Variable, card: Scorecard) -> None:
    known = probed.known
    task: Literal["classify", "regress"] = "classify"
    if variable.is_numeric:
        task = "regress"
    labels = probed.labels(variable)
    flat = np.array(list(itertools.chain(*labels)))
    if len(set(flat.tolist())) < 2:
        return
    sites = _sites_around(known, variable)
    pattern = ",".join(sites)
    result = hs.probe(hs.each_token(probed.states), labels, task=task, sites=pattern)
    scores = result.data[result.facts["score"]].to_numpy()
    first = sites.index(known.circuit.place(variable.name).first_site)
    card.add(READ, scores[first:].mean())
    guessed = _guessed(flat)
    # Below zero nothing is read, however far.
    oracle = np.array([_oracle(probed, site, flat) for site in sites]).clip(0)
    # Below the embeddings there is nothing to read: there one can only guess.
    card.add(BELOW, oracle[first - 1] if first > 0 else guessed)
    card.add(GUESSED, guessed)
    called = set(map(str, result.facts["above_chance_at"]))
    card.count(CALLED, set(sites[first:]) <= called)
    if first > 0:
        card.count(CALLED_BELOW, sites[first - 1] in called)
    if known.host == "trained":
        # Below, a trained model may hold more than the circuit says.
        return
    distances = np.abs(scores.clip(0) - oracle)
    card.add(DISTANCE, distances.mean())
    card.add(FARTHEST, distances.max())
    card.add(DISTANCE_GUESSED, np.abs(guessed - oracle).mean())
    card.count(FIRST, _first_best(scores) == _first_best(oracle))
    lowest = next((place for place, site in enumerate(sites) if site in called), -1)
    card.count(LOWEST, lowest == first)
    card.add(SITE_GUESSED, 1 / len(sites))


def _guessed(labels: NDArray[Any]) -> float:
    """Return the score of guessing: the largest class's share, and 0 for the mean."""
    if labels.dtype.kind == "f":
        return 0.0
    _, sizes = np.unique(labels, return_counts=True)
    return float(sizes.max() / len(labels))


def _first_best(scores: NDArray[np.float64]) -> int:
    """Return the first place whose score is as good as the best."""
    return int(np.flatnonzero(scores >= scores.max() - NEAR)[0])


def _sites_around(known: KnownModel, variable: Variable) -> list[str]:
    """Return the first and the last site, that of writing, and the one before it."""
    first = known.sites.index(known.circuit.place(variable.name).first_site)
    places = {0, max(0, first - 1), first, len(known.sites) - 1}
    return [known.sites[place] for place in sorted(places)]


def _oracle(probed: Probed, site: str, labels: NDArray[Any]) -> float:
    """Return the score of scikit-learn on the program's values, in folds of texts."""
    features, texts = probed.features(site), probed.texts
    if labels.dtype.kind == "f":
        folds = GroupKFold(FOLDS).split(features, labels, texts)
        regression = make_pipeline(StandardScaler(), Ridge())
        predicted = cross_val_predict(regression, features, labels, cv=folds)
        return 1 - float(np.square(predicted - labels).mean() / labels.var())
    return _accuracy(features, labels, _folds_of_texts(labels, texts))


def _folds_of_texts(labels: NDArray[Any], texts: NDArray[np.int64]) -> Iterator[Any]:
    """Return folds that have all tokens of a text in one."""
    splitter = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=0)
    folds: Iterator[Any] = splitter.split(labels, labels, texts)
    return folds


def _folds_of_tokens(labels: NDArray[Any]) -> Iterator[Any]:
    """Return folds that may have other tokens of the same text in another."""
    folds: Iterator[Any] = KFold(FOLDS, shuffle=True, random_state=0).split(labels)
    return folds


def _accuracy(
    states: NDArray[Any], labels: NDArray[Any], folds: Iterator[Any]
) -> float:
    """Return the held-out accuracy of scikit-learn's logistic regression."""
    regression = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1_000))
    predicted = cross_val_predict(regression, states, labels, cv=folds)
    return float((predicted == labels).mean())


def _score_coin(probed: Probed, chance: random.Random, card: Scorecard) -> None:
    """Probe a label that says nothing: all tokens of a text have its coin's side."""
    known = probed.known
    sides = [number % 2 for number in range(len(probed.inputs))]
    chance.shuffle(sides)
    labels = []
    for side, tokens in zip(sides, probed.inputs, strict=True):
        labels.append([side] * len(tokens))
    sites = [known.sites[0], known.sites[-1]]
    result = hs.probe(hs.each_token(probed.states), labels, sites=",".join(sites))
    card.count(COIN, bool(result.facts["above_chance_at"]))
    flat = np.concatenate(labels)
    of_tokens, of_texts = [], []
    for site in sites:
        states = probed.states[site].numpy()
        of_tokens.append(_plain_claims(states, flat, _folds_of_tokens(flat)))
        folds = _folds_of_texts(flat, probed.texts)
        of_texts.append(_plain_claims(states, flat, folds))
    card.count(PLAIN_COIN, any(of_tokens))
    card.count(GROUPED_COIN, any(of_texts))


def _plain_claims(
    states: NDArray[Any], labels: NDArray[Any], folds: Iterator[Any]
) -> bool:
    """Tell whether a plain probe is right more often than guessing the largest class.

    This is what is often done: no control and no test.
    """
    return _accuracy(states, labels, folds) > _guessed(labels)


def _score_nothing(known: KnownModel, chance: random.Random, card: Scorecard) -> None:
    """Probe the output at the last token, where that token says nothing of it.

    All inputs are of one length, so that the position says nothing either.
    """
    program = known.program
    sizes = {length: len(program.letters) ** length for length in program.lengths}
    length = max(length for length, size in sizes.items() if size <= MOST_INPUTS)
    inputs = []
    for letters in itertools.product(program.letters, repeat=length):
        inputs.append(program.input_of(letters))
    outputs = [str(program.run(tokens)["output"][-1]) for tokens in inputs]
    if program.asks or not _says_nothing([tokens[-1] for tokens in inputs], outputs):
        # Where the program asks, all last tokens are the same question mark.
        return
    drawn = chance.sample(range(len(inputs)), 2 * TEXTS)
    sizes_of = Counter(outputs[number] for number in drawn)
    drawn = [each for each in drawn if sizes_of[outputs[each]] >= FOLDS]
    ids = [known.ids(inputs[number]) for number in drawn]
    labels = [outputs[number] for number in drawn]
    result = hs.probe(known.model, (ids, labels), pool="last", sites="layer.0")
    card.count(NOTHING, bool(result.facts["above_chance_at"]))
    states = known.model.capture(ids, "layer.0")
    assert isinstance(states, hs.States)
    pooled = np.asarray(states.pool("last", "layer.0"))
    flat = np.array(labels)
    claims = _plain_claims(pooled, flat, _folds_of_tokens(flat))
    card.count(PLAIN_NOTHING, claims)


def _says_nothing(tokens: Sequence[str], outputs: Sequence[str]) -> bool:
    """Tell whether an output is independent of the token: exactly, over all inputs."""
    total = len(tokens)
    of_token, of_output = Counter(tokens), Counter(outputs)
    of_both = Counter(zip(tokens, outputs, strict=True))
    for token, output in itertools.product(of_token, of_output):
        if of_both[token, output] * total != of_token[token] * of_output[output]:
            return False
    return True

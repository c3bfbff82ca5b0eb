"""Attention: do heads look where the program looks, and are they named rightly?"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import processors

import hiddenscope as hs
from labs.truth.circuit import Written
from labs.truth.hosts import compile_into
from labs.truth.known import KnownModel
from labs.truth.program import START, Attended, Trace
from labs.truth.programs import induction
from labs.truth.save import tokenizer_of
from labs.truth.tally import Question, Scorecard

Weights: TypeAlias = NDArray[np.float64]

INPUTS = 10
# Norms leak, and rotary positions turn queries and keys a little.
TOLERANCE = 0.01
# Own inputs of a program, on which a claim about a head is checked.
CHECKED = 100
DRAWS = 16
LEVEL = 0.05
RELATIONS = ("previous", "first", "same")
# An alphabet that texts without a repetition can be drawn from.
LETTERS = "abcdefghijklmnop"

PATTERN = Question(
    "attention",
    f"a head's weights are the program's, within {TOLERANCE}",
    "the row of even attention within the tolerance",
)
PATTERN_EVEN = Question(
    "attention",
    "even attention up to the query is the program's, within that tolerance (null)",
    "null",
)
DIFFERENCE = Question(
    "attention",
    "largest difference of a weight from the program's",
    "1.00: all of the weight is elsewhere",
    "largest",
)
IDLE = Question(
    "attention",
    "largest difference of an idle head's weights from even ones up to the query",
    "1.00: all of the weight is elsewhere",
    "largest",
)
ATTENDED = Question(
    "attention",
    "weight on the positions that the program looks at, where it answers",
    "the row of even attention",
    "mean",
)
EVEN = Question(
    "attention",
    "the same, for even attention up to the query (null)",
    "null",
    "mean",
)
TESTED = Question(
    "attention",
    "heads can be tested on random tokens: there are enough different ones",
    "0.00 or 1.00: it asks whether there is a test, not what it says",
)
NOT_FALSE = Question(
    "attention",
    "no head is listed for what the program does not do on its own inputs",
    "1.00: nothing is listed",
)
NAMED = Question(
    "attention",
    "16 letters: the previous-token head and the induction head are named",
    "0.00: nothing is listed",
)
ALONE = Question(
    "attention",
    "16 letters: no head is listed for what the program does not do",
    "1.00: nothing is listed",
)


def score_attention(known: KnownModel, card: Scorecard) -> None:
    """Compare patterns with the positions that the program looks at, and claims too."""
    _score_patterns(known, card)
    _score_claims(known, card)
    if known.program.name == "induction" and known.host != "trained":
        wide = induction(LETTERS, len(LETTERS))
        _score_induction(compile_into(known.host, wide), card)


def _score_patterns(known: KnownModel, card: Scorecard) -> None:
    """Compare weights, but not of a trained model: where it looks is not enforced."""
    if known.host == "trained":
        return
    heads = list(_attended(known))
    for tokens in known.program.draw(INPUTS):
        trace = known.program.run(tokens)
        result = hs.attention(known.model, [known.ids(tokens)], draws=0)
        answers = known.program.answers(tokens)
        even = _even_back(len(tokens))
        for place, variable in heads:
            found = _pattern(result, place)
            wanted = program_weights(variable, trace)
            card.add(ATTENDED, float((found * (wanted > 0))[answers].sum(1).mean()))
            card.add(EVEN, float((even * (wanted > 0))[answers].sum(1).mean()))
            off = float(np.abs(found - wanted).max())
            card.count(PATTERN, off < TOLERANCE)
            card.count(PATTERN_EVEN, np.abs(even - wanted).max() < TOLERANCE)
            card.add(DIFFERENCE, off)
        off_even = []
        for block, head in enumerate(_idle_heads(known)):
            idle = result.data["pattern"].sel(layer=block + 1, head=head).to_numpy()
            off_even.append(np.abs(idle - even).max())
        card.add(IDLE, max(off_even))


def _score_claims(known: KnownModel, card: Scorecard) -> None:
    """Count a model in which no claim about a head is false of its own inputs."""
    tokens = known.program.draw(1)[0]
    result = hs.attention(known.model, [known.ids(tokens)], draws=DRAWS)
    card.count(TESTED, result.facts["draws"] > 0)
    if not result.facts["draws"] or known.host == "trained":
        # Where the heads of a trained model look is not enforced.
        return
    chance = random.Random(0)
    texts = []
    for _ in range(CHECKED):
        letters = chance.choices(known.program.letters, k=known.program.lengths[-1])
        texts.append(known.program.input_of(letters))
    card.count(NOT_FALSE, not _false_claims(known, result, texts))


def _score_induction(wide: KnownModel, card: Scorecard) -> None:
    """Test the heads of a program with enough letters for texts without repetition."""
    tokenizer: Any = tokenizer_of(wide.program)
    # As tokenizers of language models do, so that random texts begin with the start.
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, wide.id(START))]
    )
    model = hs.load((wide.module, tokenizer))
    result = hs.attention(model, " ".join(wide.program.letters[:3]), draws=DRAWS)
    previous_head = wide.circuit.place("before").writer
    induction_head = wide.circuit.place("output").writer
    # A head is named if it gives more than half of its weight, not if it is listed.
    previous = _listed(result, "previous").get(previous_head, 1.0)
    repeated = _listed(result, "induction").get(induction_head, 1.0)
    card.count(NAMED, max(previous, repeated) < LEVEL)
    # Only the head that writes the output looks for a repetition.
    others = set(_listed(result, "induction")) - {induction_head}
    chance = random.Random(0)
    texts = []
    for _ in range(CHECKED):
        letters = chance.sample(wide.program.letters, len(LETTERS))
        texts.append(wide.program.input_of(letters))
    card.count(ALONE, not others and not _false_claims(wide, result, texts))


def _false_claims(
    known: KnownModel, result: hs.Result, texts: Sequence[list[str]]
) -> list[str]:
    """Return the heads that are listed, though they do not read so in these texts."""
    length = len(texts[0])
    weights: dict[str, list[Weights]] = {}
    for block, head in enumerate(_idle_heads(known)):
        weights[f"layer.{block + 1}.attn.head.{head}"] = [_even_back(length)]
    for tokens in texts:
        trace = known.program.run(tokens)
        for place, variable in _attended(known):
            of_head = weights.setdefault(place.writer, [])
            of_head.append(program_weights(variable, trace))
    false = []
    even = _even(known, length)
    for relation in RELATIONS:
        by_chance = _on_related(relation, even)
        for site in _listed(result, relation):
            # A head without weights looks at everything alike.
            of_head = weights.get(site, [even])
            score = np.mean([_on_related(relation, each) for each in of_head])
            if score <= by_chance:
                false.append(f"{site}: {relation}")
    return false


def program_weights(variable: Attended, trace: Trace) -> Weights:
    """Return the weights `[query, key]` of a head that looks where a program looks."""
    length = len(trace[variable.name])
    weights = np.zeros((length, length))
    for position in range(length):
        places = variable.attended(trace, position)
        weights[position, places] = 1 / len(places)
    return weights


def _even(known: KnownModel, length: int) -> Weights:
    """Return even weights over all that a token can see."""
    visible = np.ones((length, length))
    if known.host != "bert":
        visible = np.tril(visible)
    even: Weights = visible / visible.sum(1, keepdims=True)
    return even


def _even_back(length: int) -> Weights:
    """Return even weights over the positions up to the query.

    All heads of compiled models look back only, also where a token can see more.
    """
    visible = np.tril(np.ones((length, length)))
    even: Weights = visible / visible.sum(1, keepdims=True)
    return even


def _on_related(relation: str, weights: Weights) -> float:
    """Return the mean weight on a related token, without the first query."""
    queries = np.arange(1, len(weights))
    keys = {"previous": queries - 1, "first": 0 * queries, "same": queries}[relation]
    return float(weights[queries, keys].mean())


def _attended(known: KnownModel) -> Iterator[tuple[Written, Attended]]:
    """Yield the variables that heads gather, with their places."""
    for place in known.circuit.written:
        if isinstance(place.variable, Attended):
            yield place, place.variable


def _idle_heads(known: KnownModel) -> list[int]:
    """Return the number of each block's idle head: it follows those of the circuit.

    Heads behind it have no weights.
    """
    heads = [0] * known.circuit.blocks
    for place, _ in _attended(known):
        heads[place.block] += 1
    return heads


def _pattern(result: hs.Result, place: Written) -> Weights:
    """Return the weights `[query, key]` of one head."""
    layer = result.data["pattern"].sel(layer=place.block + 1, head=place.head)
    weights: Weights = layer.to_numpy().astype(float)
    return weights


def _listed(result: hs.Result, relation: str) -> dict[str, float]:
    """Return the heads listed for a relation, each with its p of more than a half."""
    heads = result.facts.get(f"{relation}_heads", [])
    return {head["site"]: head["p_half"] for head in heads}

"""The lens: is the output read where it is written and above, and not below?

In a trained model nothing forbids that a state below votes for the answer, such as the
embedding of a token: there, when the answer is settled is not enforced.
"""

from __future__ import annotations

import random

import numpy as np

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.tally import Question, Scorecard

INPUTS = 20

READ = Question(
    "lens",
    "the top token is the output at and above its writing site, at every answer",
    "0.00: by chance 1 over the number of tokens, to the power of the answers",
)
ALREADY = Question(
    "lens",
    "share of answers whose top token is the output below its writing site",
    "0.00 to 0.40: how often the output is the token that comes first by rounding;"
    " not enforced in trained models",
    "mean",
)
BELOW = Question(
    "lens",
    "largest information below the writing site: log of the vocabulary less entropy",
    "1.39 to 3.14 nats: that of a certain prediction",
    "largest",
)
SETTLED = Question(
    "lens",
    "the last answer is settled at the layer that holds the output",
    "the row of a layer drawn at random; not enforced in trained models",
)
SETTLED_GUESSED = Question(
    "lens",
    "the same, for a layer drawn at random (null)",
    "null",
    "mean",
)
FROM_THEN_ON = Question(
    "lens",
    "largest KL from the model's own prediction, at and above the writing site",
    "1.39 to 3.14 nats: that of a uniform prediction",
    "largest",
)


def score_lens(known: KnownModel, card: Scorecard) -> None:
    """Read the states of inputs, one by one."""
    chance = random.Random(f"{known.host} {known.program.name}")
    for tokens in known.program.draw(INPUTS, chance.randrange(1_000_000)):
        _score_input(known, tokens, card)


def _score_input(known: KnownModel, tokens: list[str], card: Scorecard) -> None:
    sites = ",".join(known.sites)
    result = hs.lens(known.model, known.ids(tokens), sites=sites, k=1)
    answers = known.program.answers(tokens)
    data = result.data.isel(token=answers)
    trace = known.program.run(tokens)
    outputs = [known.id(str(trace["output"][place])) for place in answers]
    place = known.circuit.place("output")
    first = known.sites.index(place.first_site)
    is_output = data["word_id"].to_numpy()[:, :, 0] == np.array(outputs)
    card.count(READ, bool(is_output[first:].all()))
    card.add(FROM_THEN_ON, data["kl"].to_numpy()[first:].max())
    card.add(ALREADY, is_output[:first].mean())
    settled = str(result.facts["last_token"]["settled_from"])
    card.count(SETTLED, settled == f"layer.{place.block + 1}")
    # The embeddings are a layer too.
    card.add(SETTLED_GUESSED, 1 / (known.circuit.blocks + 1))
    if known.host == "trained":
        # Below, its states are not without a say in the logits.
        return
    most = np.log(len(known.program.vocabulary))
    below = most - data["entropy"].to_numpy()[:first]
    card.add(BELOW, max(0.0, below.max()))

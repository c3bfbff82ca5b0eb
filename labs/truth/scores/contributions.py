"""Contributions: does only the part that writes the output write the answer?"""

from __future__ import annotations

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.scores.pairs import draw_pairs
from labs.truth.tally import Question, Scorecard

PAIRS = 12
# What another part may add, as a share of the difference of the logits.
TOLERANCE = 1e-3

LARGEST = Question(
    "contributions",
    "the part that adds most is the one that writes the output",
    "the row of a part drawn at random",
)
GUESSED = Question(
    "contributions",
    "the same, for a part drawn at random (null)",
    "null",
    "mean",
)
ALONE = Question(
    "contributions",
    f"no other part adds more than {TOLERANCE} of the difference of the logits",
    "0.00: even contributions of all parts are larger",
)
OTHERS = Question(
    "contributions",
    "largest share of another part in the difference of the logits",
    "1.00 is the share of the part that writes the output",
    "largest",
)
SHARE = Question(
    "contributions",
    "share in the difference of the logits of the part that writes the output",
    "the row of a part drawn at random",
    "mean",
)
SUM = Question(
    "contributions",
    "largest error of the sum of all parts, as a share",
    "1.00: the sum of nothing",
    "largest",
)


def score_contributions(known: KnownModel, card: Scorecard) -> None:
    """Split the difference of two answers, of which only one part writes any."""
    writer = known.circuit.place("output").writer
    for pair in draw_pairs(known.program, PAIRS):
        result = hs.contributions(
            known.model,
            known.ids(pair.clean),
            answer=known.id(pair.answer),
            other=known.id(pair.other),
        )
        difference = float(result.data["logit"].item())
        shares = {}
        for part, added in parts_of(result).items():
            shares[part] = added / difference
        strongest = max(shares, key=lambda part: abs(shares[part]))
        card.count(LARGEST, strongest == writer)
        card.add(GUESSED, 1 / len(shares))
        card.add(SHARE, shares[writer])
        card.add(SUM, abs(sum(shares.values()) - 1))
        if known.host != "trained":
            others = [abs(shares[part]) for part in shares if part != writer]
            card.count(ALONE, max(others) <= TOLERANCE)
            card.add(OTHERS, max(others))


def parts_of(result: hs.Result) -> dict[str, float]:
    """Return what every part adds: the embeddings, heads, MLPs and biases."""
    data = result.data.isel(step=0)
    parts = {"layer.0": data["embedding"].item()}
    for name in ("norm_bias", "head_bias"):
        parts[name] = data[name].item()
    for layer in data["layer"].values:
        parts[f"layer.{layer}.mlp"] = data["mlp"].sel(layer=layer).item()
        parts[f"layer.{layer}.attn bias"] = data["attn_bias"].sel(layer=layer).item()
        for head in data["head"].values:
            added = data["attn_head"].sel(layer=layer, head=head).item()
            parts[f"layer.{layer}.attn.head.{head}"] = added
    return parts

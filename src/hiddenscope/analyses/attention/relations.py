"""Relations: how much each head reads a related token, tested on random tokens.

Previous, first and same are the weights on the token before, on the first token and on
the token itself. By chance, a token gets an even share of the weight that there is for
all tokens that can be seen. Induction is the weight on the token that came after the
earlier occurrence of the same token. By chance, it is the weight on the same place in a
text in which nothing is repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.attention.random_tokens import RandomTexts
from hiddenscope.measures.permutations import corrected_sign_flip_p
from hiddenscope.model import Model
from hiddenscope.passes.attention_weights import (
    WatchedAttention,
    WeightRows,
    run_weights,
)
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats

PLACES = ("previous", "first", "same")
INDUCTION = "induction"
HALF = 0.5


@dataclass(frozen=True)
class RelationScores:
    """The weights on related tokens, [relation, draw, layer, head], and by chance.

    They are NaN where a layer has no such head, or never sees the related token.
    """

    relations: tuple[str, ...]
    scores: Floats
    nulls: Floats


@dataclass(frozen=True)
class RelationTests:
    """Mean scores of the heads [relation, layer, head], and corrected p-values.

    `p` is of a score above the null, and `p_half` of one above a half.
    """

    relations: tuple[str, ...]
    score: Floats
    null: Floats
    p: Floats
    p_half: Floats


def significance(scores: RelationScores, seed: int) -> RelationTests:
    """Test all heads and relations at once, against chance and against a half."""
    # Differences of one draw are paired: both texts begin with the same tokens.
    above_null = scores.scores - scores.nulls
    above_half = scores.scores - HALF
    # Both questions are asked of every head, so the correction is for both.
    observed = np.stack([above_null, above_half])
    draws_first = np.moveaxis(observed, 2, 0)
    columns = draws_first.reshape(len(draws_first), -1)
    p = corrected_sign_flip_p(columns, seed).reshape(draws_first.shape[1:])
    return RelationTests(
        scores.relations,
        scores.scores.mean(1),
        scores.nulls.mean(1),
        p[0],
        p[1],
    )


def measure_relations(
    model: Model,
    texts: RandomTexts,
    attentions: Sequence[WatchedAttention],
    heads: Sequence[int],
) -> RelationScores:
    """Run the texts, and return how much every head reads related tokens."""
    tally = RelationTally(texts, [part.site for part in attentions], heads)
    for part in attentions:
        tally.heads_of[part.site] = [tally.columns[head] for head in part.heads]
    run_weights(model, texts.inputs, attentions, tally.receive)
    return tally.scores()


class RelationTally:
    """Adds up weights on related tokens, rows by rows."""

    def __init__(
        self, texts: RandomTexts, sites: Sequence[Site], heads: Sequence[int]
    ) -> None:
        self.texts = texts
        self.relations: tuple[str, ...] = PLACES
        if texts.repeats:
            self.relations = (*PLACES, INDUCTION)
        self.layers = dict(zip(sites, range(len(sites)), strict=True))
        self.columns = dict(zip(heads, range(len(heads)), strict=True))
        self.heads_of: dict[Site, list[int]] = {}
        count = len(texts.inputs)
        shape = (len(self.relations), count, len(sites), len(heads))
        self.sums = np.full(shape, np.nan)
        self.shares = np.zeros(shape[:3])
        self.cells = np.zeros(shape[:3])

    def receive(self, rows: WeightRows) -> None:
        """Add the weights of some rows."""
        # Hidden keys have no weight in any head of any text.
        visible = (rows.values > 0).any(1).any(1)
        shares = 1 / visible.sum(-1).clamp_min(1).double()
        for number, relation in enumerate(self.relations):
            places, keys = self._cells(relation, rows.positions)
            if not places:
                continue
            is_visible = visible[:, places, keys]
            weights = rows.values[..., places, keys].double()
            sums = (weights * is_visible[:, None, None]).sum(-1).cpu().numpy()
            share = (shares[:, places] * is_visible).sum(-1).cpu().numpy()
            cells = is_visible.sum(-1).cpu().numpy()
            for place, site in enumerate(rows.sites):
                layer, columns = self.layers[site], self.heads_of[site]
                self.shares[number, rows.texts, layer] += share[place]
                self.cells[number, rows.texts, layer] += cells[place]
                here = np.ix_([number], rows.texts, [layer], columns)
                before = np.nan_to_num(self.sums[here])
                self.sums[here] = before + sums[place][None, :, None]

    def _cells(
        self, relation: str, positions: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the rows that have a related token, and its position."""
        texts = self.texts
        # The first token reads itself or what follows, whatever the head does.
        first = max(1, texts.start)
        if relation == INDUCTION:
            first = texts.start + texts.run
        last = texts.start + 2 * texts.run
        places, keys = [], []
        for place, position in enumerate(positions):
            if not first <= position < last:
                continue
            places.append(place)
            if relation == "previous":
                keys.append(position - 1)
            elif relation == "first":
                keys.append(0)
            elif relation == "same":
                keys.append(position)
            else:
                keys.append(position - texts.run + 1)
        return places, keys

    def scores(self) -> RelationScores:
        """Return the mean weights of every draw, and what chance gives."""
        draws = self.texts.draws
        # A window may be so short that the related token is never seen.
        cells = np.where(self.cells > 0, self.cells, np.nan)
        means = self.sums / cells[..., None]
        shares = np.broadcast_to((self.shares / cells)[..., None], means.shape)
        scores = means[:, :draws].copy()
        nulls = shares[:, :draws].copy()
        if self.texts.repeats:
            scores[-1] = means[-1, draws:]
            nulls[-1] = means[-1, :draws]
        nulls[np.isnan(scores)] = np.nan
        return RelationScores(self.relations, scores, nulls)


def weights_on_places(
    pattern: NDArray[np.float32], positions: Sequence[int]
) -> dict[str, NDArray[np.float32]]:
    """Return the mean weight on the previous, the first and the same token.

    `pattern` is [layer, head, query, key] of one text, with queries at `positions`.
    The first token is left out: it has no other to read.
    """
    keys = np.array(positions)
    rows = np.flatnonzero(keys > 0)
    keys = keys[rows]
    if not len(rows):
        nothing = np.full_like(pattern[:, :, 0, 0], np.nan)
        return dict.fromkeys(PLACES, nothing)
    places = {"previous": keys - 1, "first": np.zeros_like(keys), "same": keys}
    means = {}
    for name, related in places.items():
        means[name] = pattern[:, :, rows, related].mean(-1)
    return means

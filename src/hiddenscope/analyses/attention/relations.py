"""Relations: how much each head reads a related token, tested on random tokens.

Nothing but position and repetition tells random tokens apart. A text is the first token
as the tokenizer puts it, and then two runs of random tokens. In half of the texts the
second run repeats the first.

Previous, first and same are the weights on the token before, on the first token and on
the token itself. By chance, a token gets an even share of the weight that there is for
all tokens that can be seen. Induction is the weight on the token that came after the
earlier occurrence of the same token. By chance, it is the weight on the same place in a
text in which nothing is repeated.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.attention.selection import Selection
from hiddenscope.measures.permutations import corrected_sign_flip_p
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.attention_weights import WeightRows, run_weights
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints

PLACES = ("previous", "first", "same")
INDUCTION = "induction"
# Weights are in float32, or finer.
ROUNDING = 8 * float(np.finfo(np.float32).eps)
HALF = 0.5
# Tokens of a run.
RUN = 24
FEWEST = 4
# Some columns are below zero in every draw, such as a small weight less a half. So the
# opposite signs count too, and the smallest p is 2 of 32 for five draws, of 64 for six.
FEWEST_DRAWS = 6


class RandomTexts(NamedTuple):
    """Texts of random tokens: `draws` of them without a repetition, and then as many
    with one, if a repetition can be read.

    `start` is the position of the first random token, and `run` the length of a run.
    """

    inputs: Inputs
    draws: int
    start: int
    run: int
    repeats: bool


def draw_texts(
    model: Model, stack: str | None, draws: int, seed: int, *, causal: bool
) -> RandomTexts | None:
    """Draw texts for a stack; None where the model takes only shorter ones."""
    encoder = model.text_encoder
    with model.lock:
        before, after = encoder.frame()
        ordinary = np.array(encoder.ordinary_ids())
    is_target = model.encoder_decoder and stack == "decoder"
    window = encoder.window
    source_frame = before, after
    if is_target:
        before = [] if encoder.start is None else [encoder.start]
        window = encoder.target_window or encoder.window
    if causal:
        # A decoder never sees what would come after its text.
        after = []
    run = RUN
    if window is not None:
        run = min(run, (window - len(before) - len(after)) // 2)
    run = min(run, len(ordinary) // 2)
    if run < FEWEST:
        return None
    generator = np.random.default_rng(seed)
    # No token comes twice by chance, so that a repetition is the only one.
    different, repeated = [], []
    for _ in range(draws):
        tokens = generator.choice(ordinary, 2 * run, replace=False)
        first = tokens[:run].tolist()
        second = tokens[run:].tolist()
        different.append((*before, *first, *second, *after))
        repeated.append((*before, *first, *first, *after))
    texts = different
    if causal:
        texts = different + repeated
    inputs = Inputs(tuple(texts))
    if is_target:
        sources = []
        for _ in texts:
            tokens = generator.choice(ordinary, run, replace=False)
            sources.append((*source_frame[0], *tokens.tolist(), *source_frame[1]))
        inputs = Inputs(tuple(sources), targets=inputs)
    return RandomTexts(inputs, draws, len(before), run, repeats=causal)


class RelationTests(NamedTuple):
    """Mean scores of the heads [relation, layer, head], and corrected p-values.

    `p` is of a score above the null, and `p_half` of one above a half. All are NaN
    where a layer has no such head, or never sees the related token.
    """

    relations: tuple[str, ...]
    score: Floats
    null: Floats
    p: Floats
    p_half: Floats


def measure_relations(
    model: Model, texts: RandomTexts, selection: Selection, seed: int
) -> RelationTests:
    """Run the texts, and test how much every head reads related tokens."""
    tally = RelationTally(texts, selection.columns, len(selection.heads))
    run_weights(model, texts.inputs, selection.attentions, tally.receive)
    return tally.tests(seed)


class RelationTally:
    """Adds up weights on related tokens, rows by rows.

    `columns` are where the heads of each attention stand among all heads.
    """

    def __init__(
        self, texts: RandomTexts, columns: Mapping[Site, list[int]], heads: int
    ) -> None:
        self.texts = texts
        self.columns = columns
        self.relations: tuple[str, ...] = PLACES
        if texts.repeats:
            self.relations = (*PLACES, INDUCTION)
        shape = len(self.relations), len(texts.inputs), len(columns)
        self.shares = np.zeros(shape)
        self.cells = np.zeros(shape)
        self.sums = np.full((*shape, heads), np.nan)
        for layer, here in enumerate(columns.values()):
            self.sums[:, :, layer, here] = 0

    def receive(self, rows: WeightRows) -> None:
        """Add the weights of some rows."""
        layers = list(self.columns)
        # Hidden keys have no weight in any head of any text.
        visible = (rows.values > 0).any(1).any(1)
        shares = 1 / visible.sum(-1).clamp_min(1).double()
        positions = np.array(rows.positions)
        start, run = self.texts.start, self.texts.run
        related = related_keys(positions)
        related[INDUCTION] = positions - run + 1
        for number, relation in enumerate(self.relations):
            # The first token reads itself or what follows, whatever the head does.
            first = start + run if relation == INDUCTION else max(1, start)
            among = (first <= positions) & (positions < start + 2 * run)
            places = np.flatnonzero(among).tolist()
            keys = related[relation][among].tolist()
            if not places:
                continue
            is_visible = visible[:, places, keys]
            weights = rows.values[..., places, keys].double()
            sums = (weights * is_visible[:, None, None]).sum(-1).cpu().numpy()
            share = (shares[:, places] * is_visible).sum(-1).cpu().numpy()
            cells = is_visible.sum(-1).cpu().numpy()
            for place, site in enumerate(rows.sites):
                layer = layers.index(site)
                self.shares[number, rows.texts, layer] += share[place]
                self.cells[number, rows.texts, layer] += cells[place]
                of_layer = self.sums[number, :, layer]
                of_layer[np.ix_(rows.texts, self.columns[site])] += sums[place]

    def tests(self, seed: int) -> RelationTests:
        """Test all heads and relations at once, against chance and against a half."""
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
        # Differences of one draw are paired: both texts begin with the same tokens.
        # Both questions are asked of every head, so the correction is for both.
        observed = np.stack([scores - nulls, scores - HALF])
        # The weights of a head that looks everywhere alike differ from even ones by
        # rounding, in the same direction in every draw.
        observed[np.abs(observed) < ROUNDING * scores] = 0
        draws_first = np.moveaxis(observed, 2, 0)
        p = corrected_sign_flip_p(draws_first.reshape(draws, -1), seed)
        p_null, p_half = p.reshape(draws_first.shape[1:])
        return RelationTests(
            self.relations, scores.mean(1), nulls.mean(1), p_null, p_half
        )


def related_keys(positions: Ints) -> dict[str, Ints]:
    """Return the position of the previous, the first and the same token."""
    return {
        "previous": positions - 1,
        "first": np.zeros_like(positions),
        "same": positions,
    }


def weights_on_places(
    pattern: NDArray[np.float32], positions: Sequence[int]
) -> dict[str, NDArray[np.float32]]:
    """Return the mean weight on the previous, the first and the same token.

    `pattern` is [layer, head, query, key] of one text, with queries at `positions`.
    The first token is left out: it has no other to read.
    """
    rows = np.flatnonzero(np.array(positions) > 0)
    if not len(rows):
        nothing = np.full_like(pattern[:, :, 0, 0], np.nan)
        return dict.fromkeys(PLACES, nothing)
    means = {}
    for name, keys in related_keys(np.array(positions)[rows]).items():
        means[name] = pattern[:, :, rows, keys].mean(-1)
    return means

"""Edges: are their effects those of the program, and is the declared circuit enough?

Of a pair of inputs only a part of the circuit is of any account. An edge is true where
the program says that it has an effect on this pair by itself: its reader, and it alone,
gets what the writer wrote in the other run, and the output changes. An edge of the
circuit that carries the same in both runs, or whose change another edge undoes, is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

import hiddenscope as hs
from hiddenscope.causes.encoding import ask_contrasts
from hiddenscope.causes.estimate import Effects
from hiddenscope.causes.rewire import rewire
from hiddenscope.causes.wiring import Wiring
from labs.truth.eap_ig import STEPS, eap_ig
from labs.truth.known import KnownModel
from labs.truth.scores.pairs import Pair, draw_pairs
from labs.truth.scores.patch import TOLERANCE, contrast_of, is_right
from labs.truth.tally import Question, Scorecard
from labs.truth.wires import Edge, declared_edges, with_edge

Table = NDArray[np.float64]
Marks = NDArray[np.bool_]

PAIRS = 10
# Of a program that does not say what comes of an edge in some pairs, more are drawn.
DRAWN = 4 * PAIRS

EXACT = "exact"
METHODS = (EXACT, "integrated", "gradient", "dropped")

RIGHT = Question(
    "edges (exact)",
    f"all effects of edges are the program's, within {TOLERANCE}",
    "0.00: some edge has an effect in every pair",
)
OUTSIDE = Question(
    "edges (exact)",
    "largest effect of an edge that has none in the program",
    "1.00: the effect of the edge into the logits",
    "largest",
)
ALONE = Question(
    "edges (exact)",
    "share of the declared edges with another value in both runs that have an effect by"
    " themselves, in the program",
    "a property of the programs, not a score",
    "mean",
)
FEW = Question(
    "edges (exact)",
    "share of all edges that have an effect, in the program (null)",
    "null",
    "mean",
)
NEEDED = Question(
    "circuit",
    f"share that all other edges alone keep is 0, within {TOLERANCE}",
    "0.00: all edges keep 1",
)
LEFT = Question(
    "circuit",
    "largest distance of this share from 0",
    "1.00: all edges are kept",
    "largest",
)
RANDOM = Question(
    "circuit",
    "share that as many edges drawn at random keep, that into the logits among them"
    " (null)",
    "null",
    "mean",
)


def enough(engine: str = "") -> Question:
    """Return the question whether the declared edges are enough."""
    asked = (
        "share of the logit difference that the declared edges alone keep is 1, within"
        f" {TOLERANCE}"
    )
    return Question(f"circuit{engine}", asked, "0.00: edges drawn at random")


def distance(engine: str = "") -> Question:
    """Return the question how far they are from being enough."""
    asked = "largest distance of this share from 1"
    return Question(f"circuit{engine}", asked, "1.00: no edge is kept", "largest")


def ranked(method: str) -> Question:
    """Return the question how well sizes tell true edges from all others."""
    asked = "AUROC of edges: those with an effect against those without"
    is_default = method == "integrated"
    return Question(f"edges ({method})", asked, "0.50", "mean", by_program=is_default)


def precise(method: str) -> Question:
    """Return the question how many of the strongest edges are true."""
    asked = "precision of the strongest k edges, where k have an effect"
    null = "the share of all edges that have an effect"
    return Question(f"edges ({method})", asked, null, "mean")


def ranked_declared(method: str) -> Question:
    """Return the question how well sizes tell the declared edges that differ."""
    asked = "AUROC of edges: those declared whose variable differs against all others"
    return Question(f"edges ({method})", asked, "0.50", "mean")


@dataclass(frozen=True)
class TrueEdges:
    """What the program says of every edge of a model, of one pair of inputs.

    Tables are `[writer, reader]`; `possible` says which edges there are.
    """

    known: KnownModel
    pair: Pair
    writers: list[str]
    readers: list[str]
    possible: Marks

    @classmethod
    def of(cls, known: KnownModel, pair: Pair) -> TrueEdges:
        """Return the edges that a model has."""
        wiring = Wiring.of(known.model)
        writers = [str(site) for site in wiring.writers]
        readers = [str(reader) for reader in wiring.readers]
        return cls(known, pair, writers, readers, wiring.possible)

    @cached_property
    def effects(self) -> Table:
        """Return what the program says that every edge restores by itself.

        It fails with a ValueError where the program does not say.
        """
        effects = np.zeros(self.possible.shape)
        tokens, donor = self.pair.corrupt, self.pair.clean_trace
        for edge in declared_edges(self.known.circuit):
            trace = with_edge(self.known.circuit, edge, tokens, donor)
            effects[self.place(edge)] = self.pair.effect(trace["output"][-1])
        return effects

    @cached_property
    def declared(self) -> Marks:
        """Mark the edges of the circuit."""
        marks = np.zeros(self.possible.shape, dtype=bool)
        for edge in declared_edges(self.known.circuit):
            marks[self.place(edge)] = True
        return marks

    @cached_property
    def differing(self) -> Marks:
        """Mark the edges of the circuit that carry another value in the other run."""
        marks = np.zeros(self.possible.shape, dtype=bool)
        clean, corrupt = self.pair.clean_trace, self.pair.corrupt_trace
        for edge, names in declared_edges(self.known.circuit).items():
            marks[self.place(edge)] = any(
                clean[name] != corrupt[name] for name in names
            )
        return marks

    def place(self, edge: Edge) -> tuple[int, int]:
        """Return where an edge stands in the tables."""
        return self.writers.index(edge.writer), self.readers.index(edge.reader)


def score_edges(known: KnownModel, card: Scorecard) -> None:
    """Tell the edges of pairs, exactly and by gradients, and run the circuit alone.

    GPT-2 is put to the published way, too, which is written for it. Of a trained model it is taught what its parts write, but not which operand of a head
    reads it: nothing is asked.
    """
    if known.host == "trained":
        return
    for true in pairs_with_truth(known):
        contrast = contrast_of(known, true.pair)
        for method in METHODS:
            # No edge is computed exactly beside its estimate.
            few = {"exact": 0, "sample": 0}
            result = hs.edges(known.model, contrast, method=method, **few)
            effects = result.data["effect"].to_numpy()
            if method == EXACT:
                score_exact(card, true, effects)
            score_ranks(card, method, true, effects)
        if known.host == "gpt2":
            for name, steps in (("EAP", 1), ("EAP-IG", STEPS)):
                scores = eap_ig(
                    known.module,
                    known.ids(true.pair.clean),
                    known.ids(true.pair.corrupt),
                    known.id(true.pair.answer),
                    known.id(true.pair.other),
                    steps,
                )
                score_ranks(card, f"{name}, own implementation", true, scores)
        score_circuit(card, true)


def pairs_with_truth(known: KnownModel) -> list[TrueEdges]:
    """Draw pairs of which the program says what every edge does."""
    drawn = []
    for pair in draw_pairs(known.program, DRAWN):
        true = TrueEdges.of(known, pair)
        try:
            has_effect = true.effects.any()
        except ValueError:
            # A head would copy two values at once.
            continue
        assert has_effect, "the edge into the logits has an effect"
        drawn.append(true)
        if len(drawn) == PAIRS:
            break
    return drawn


def score_exact(card: Scorecard, true: TrueEdges, effects: Table) -> None:
    """Compare effects with those of the program."""
    possible = true.possible
    card.count(RIGHT, is_right(effects[possible], true.effects[possible]))
    outside = possible & (true.effects == 0)
    card.add(OUTSIDE, np.abs(effects[outside]).max())
    card.add(FEW, float((true.effects[possible] > 0).mean()))
    card.add(ALONE, float((true.effects[true.differing] > 0).mean()))


def score_ranks(card: Scorecard, method: str, true: TrueEdges, effects: Table) -> None:
    """Keep how well the sizes of effects tell true edges from others.

    Thousandths are ranked: below them norms leak.
    """
    possible = true.possible
    sizes = np.abs(effects[possible]).round(3)
    has_effect = true.effects[possible] > 0
    card.add(ranked(method), roc_auc_score(has_effect, sizes))
    card.add(precise(method), precision(has_effect, sizes))
    differs = true.differing[possible]
    card.add(ranked_declared(method), roc_auc_score(differs, sizes))


def precision(is_true: Marks, sizes: Table) -> float:
    """Return how many of the k largest are true, as a share, where k are true.

    Of those that are equal at the border any is as likely to be among the largest.

    >>> precision(np.array([True, True, False, False]), np.array([2.0, 1, 1, 0]))
    0.75
    """
    most = int(is_true.sum())
    border = np.sort(sizes)[::-1][most - 1]
    above, equal = sizes > border, sizes == border
    places = most - int(above.sum())
    hits = is_true[above].sum() + places * is_true[equal].mean()
    return float(hits / most)


def score_circuit(card: Scorecard, true: TrueEdges) -> None:
    """Run the clean input with the corrupt run's writes through chosen edges."""
    declared = true.declared
    others = true.possible & ~declared
    share, left, drawn = kept(true, [declared, others, _drawn(true)])
    score_kept(card, "", share)
    card.count(NEEDED, abs(left) < TOLERANCE)
    card.add(LEFT, abs(left))
    card.add(RANDOM, drawn)


def score_kept(card: Scorecard, engine: str, share: float) -> None:
    """Compare what the declared edges alone keep with 1."""
    card.count(enough(engine), abs(share - 1) < TOLERANCE)
    card.add(distance(engine), abs(share - 1))


def kept(true: TrueEdges, circuits: Sequence[Marks]) -> list[float]:
    """Return the share of the logit difference that the edges of circuits alone keep.

    Through all other edges readers get what was written in the corrupt run.
    """
    model = true.known.model
    contrast = contrast_of(true.known, true.pair)
    (encoded,) = ask_contrasts(model, contrast).encodings
    effects = Effects(model, Wiring.of(model), encoded, "clean")
    changed = np.stack([true.possible & ~circuit for circuit in circuits])
    logits = rewire(model, effects.stepper, effects.runs, changed)
    lost = effects.measures(logits)[:, 0]
    return [1 - share for share in lost.tolist()]


def _drawn(true: TrueEdges) -> Marks:
    """Draw as many edges as are declared; that into the logits is one of them."""
    chance = np.random.default_rng(len(true.pair.clean))
    marks = np.zeros(true.possible.shape, dtype=bool)
    marks[:, -1] = true.declared[:, -1]
    places = np.argwhere(true.possible & ~marks)
    count = int(true.declared.sum()) - 1
    marks[tuple(chance.permutation(places)[:count].T)] = True
    return marks

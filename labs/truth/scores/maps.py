"""Maps: do pictures and clusters of states show the values of the output?

The states are those of last tokens, whose inputs have one length. Where the output has
been written, states of one value are nearer to each other than before, but a state also
holds every other variable: the output's values need not be the groups that stand out.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import compress

import numpy as np
import xarray
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.tally import Question, Scorecard

TEXTS = 60
# Every output is that of this many texts.
FEWEST_TEXTS = 5

APART = Question(
    "project",
    "outputs are called apart at the site where they are written",
    "0.05: the level of the test",
)
SHUFFLED = Question(
    "project",
    "shuffled outputs are called apart at some site",
    "0.05: the level of the test over all sites; lower is better",
)
NEIGHBOURS = Question(
    "project",
    "share of states whose nearest one has the same output, where it is written",
    "the row of shuffled outputs",
    "mean",
)
CHANCE = Question(
    "project",
    "share of states whose nearest one has the same of shuffled outputs (null)",
    "null",
    "mean",
)
BELOW = Question(
    "project",
    "share of states whose nearest one has the same output at layer.0, where the token"
    " alone is known",
    "the row of shuffled outputs, where the token says nothing",
    "mean",
)
GROUPED = Question(
    "cluster",
    "adjusted Rand index of clusters and outputs, where the output is written",
    "the row of shuffled outputs",
    "mean",
)
GROUPED_BELOW = Question(
    "cluster",
    "adjusted Rand index at layer.0, where the token alone is known",
    "0.00 where the token says nothing",
    "mean",
)
GROUPED_SHUFFLED = Question(
    "cluster",
    "adjusted Rand index of clusters and shuffled outputs (null)",
    "null",
    "mean",
)
PURE = Question(
    "cluster",
    "share of states in a cluster all of whose states have one output",
    "the row of one shuffled output",
    "mean",
)
PURE_SHUFFLED = Question(
    "cluster",
    "share of states in a cluster of one shuffled output (null)",
    "null",
    "mean",
)


def score_maps(known: KnownModel, card: Scorecard) -> None:
    """Draw and cluster the states of last tokens."""
    chance = random.Random(f"{known.host} {known.program.name}")
    inputs, outputs = _draw(known, chance)
    if len(set(outputs)) < 2:
        return
    ids = [known.ids(tokens) for tokens in inputs]
    shuffled = chance.sample(outputs, len(outputs))
    first = known.circuit.place("output").first_site
    sites = ["layer.0", first]
    _score_project(known, ids, outputs, shuffled, sites, card)
    _score_cluster(known, ids, outputs, shuffled, sites, card)


def _draw(
    known: KnownModel, chance: random.Random
) -> tuple[list[list[str]], list[str]]:
    """Draw different inputs of the largest length, and their last outputs."""
    program = known.program
    length = max(program.lengths)
    drawn: dict[tuple[str, ...], None] = {}
    for _ in range(10 * TEXTS):
        letters = chance.choices(program.letters, k=length)
        drawn[tuple(program.input_of(letters))] = None
    inputs = [list(tokens) for tokens in drawn][:TEXTS]
    outputs = [str(program.run(tokens)["output"][-1]) for tokens in inputs]
    sizes = Counter(outputs)
    frequent = [sizes[output] >= FEWEST_TEXTS for output in outputs]
    return list(compress(inputs, frequent)), list(compress(outputs, frequent))


def _score_project(
    known: KnownModel,
    ids: list[list[int]],
    outputs: list[str],
    shuffled: list[str],
    sites: list[str],
    card: Scorecard,
) -> None:
    data, called = _projected(known, ids, outputs, sites)
    card.count(APART, sites[1] in called)
    card.add(NEIGHBOURS, _neighbour_share(data, sites[1]))
    if not known.program.asks:
        card.add(BELOW, _neighbour_share(data, sites[0]))
    data, called = _projected(known, ids, shuffled, sites)
    card.count(SHUFFLED, bool(called))
    card.add(CHANCE, _neighbour_share(data, sites[1]))


def _projected(
    known: KnownModel, ids: list[list[int]], labels: list[str], sites: list[str]
) -> tuple[xarray.Dataset, list[str]]:
    """Project the states, and return the data and the sites that are called apart."""
    pattern = ",".join(sites)
    result = hs.project(
        known.model, (ids, labels), method="pca", pool="last", sites=pattern
    )
    separation = result.facts["parts"][0].get("separation")
    called = [] if separation is None else list(map(str, separation["apart_at"]))
    return result.data, called


def _neighbour_share(data: xarray.Dataset, site: str) -> float:
    """Return the share of states at a site whose nearest one has the same label."""
    return float(data.sel(site=site)["neighbour"].squeeze())


def _score_cluster(
    known: KnownModel,
    ids: list[list[int]],
    outputs: list[str],
    shuffled: list[str],
    sites: list[str],
    card: Scorecard,
) -> None:
    clusters = _clusters(known, ids, sites[1])
    card.add(GROUPED, adjusted_rand_score(outputs, clusters))
    card.add(GROUPED_SHUFFLED, adjusted_rand_score(shuffled, clusters))
    card.add(PURE, _pure_share(clusters, outputs))
    card.add(PURE_SHUFFLED, _pure_share(clusters, shuffled))
    if not known.program.asks:
        # Elsewhere the last tokens are all question marks, and their states are equal.
        below = _clusters(known, ids, sites[0])
        card.add(GROUPED_BELOW, adjusted_rand_score(outputs, below))


def _clusters(known: KnownModel, ids: list[list[int]], site: str) -> NDArray[np.int64]:
    result = hs.cluster(known.model, ids, site=site, pool="last")
    clusters: NDArray[np.int64] = result.data["cluster_of"].to_numpy()
    return clusters


def _pure_share(clusters: NDArray[np.int64], outputs: list[str]) -> float:
    """Return the share of rows in clusters of one output; noise is in none."""
    pure = 0
    for cluster in set(clusters.tolist()) - {-1}:
        rows = np.flatnonzero(clusters == cluster)
        if len({outputs[row] for row in rows}) == 1:
            pure += len(rows)
    return pure / len(outputs)

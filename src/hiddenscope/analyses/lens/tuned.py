"""The tuned lens: for each layer, the affine map nearest to the last layer.

It is a ridge regression of the last layer on this one, held towards the identity. Every
row is divided by the size of its last state, which the final norm takes away. The
penalty is selected for each layer by the KL divergence on half of the held-out texts,
and the map is judged on the other half. A layer has no map where none is better on the
first half, or where the selected one is worse on the second. Copies of a text, and
texts of a group, stay together, or what was learnt by heart would count.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.lens.maps import Map, layer_states, mapped
from hiddenscope.analyses.lens.reading import LensSites, read_predictions
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Facts

# As a share of each channel's own sum of squares.
PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
# One group of texts in five is held out.
HELD_OUT = 5
# Tokens by which maps are selected, and judged: each costs a product with the whole
# vocabulary.
MOST_HELD_OUT = 256
# Tokens whose states are held at a time.
BATCH_TOKENS = 2_048


def fit_tuned(
    model: Model, inputs: Inputs, sites: LensSites, groups: Sequence[int]
) -> tuple[dict[int, Map], Facts]:
    """Fit a map to every layer that is better with one, and return it with its facts.

    `groups` numbers the group of each text.
    """
    fitting_texts, held_out = _split(groups)
    fitting = inputs.some(fitting_texts)
    regressions = _regressions(model, fitting, sites)
    # One text of each held-out group: the others would say the same again.
    firsts = [group[0] for group in held_out]
    selecting = _held_out_states(model, inputs.some(firsts[::2]), sites)
    judging = _held_out_states(model, inputs.some(firsts[1::2] or firsts), sites)
    unembedding = Unembedding(model, sites.last)
    maps = _best_maps(unembedding, selecting, sites, regressions)
    before = _divergence(unembedding, judging, sites, {})
    after = _divergence(unembedding, judging, sites, maps)
    for worse in np.flatnonzero(after > before):
        maps.pop(sites.layers[worse].layer or 0, None)
    after = np.minimum(before, after)
    layers = []
    for site, kl_before, kl_after in zip(sites.layers, before, after, strict=True):
        layers.append(
            {
                "site": str(site),
                "kl_before": float(kl_before),
                "kl_after": float(kl_after),
                "mapped": site.layer in maps,
            }
        )
    judged_on_selected = len(held_out) == 1
    notes = []
    if judged_on_selected:
        notes.append(
            "One text was held out, both to choose and to judge: the KL after is"
            " optimistic."
        )
    facts = {
        "texts": len(fitting),
        "tokens": sum(fitting.of(sites.last.stack).lengths),
        "groups": len(set(groups)),
        "held_out": {
            "texts": sum(map(len, held_out)),
            "tokens_chosen_on": selecting.shape[1],
            "tokens_judged_on": judging.shape[1],
            "judged_on_chosen": judged_on_selected,
        },
        "layers": layers,
        "notes": notes,
    }
    return maps, facts


def _split(groups: Sequence[int]) -> tuple[list[int], list[list[int]]]:
    """Return the texts to fit on, and the held-out texts, group by group."""
    count = max(groups) + 1
    if count < 2:
        reason = "all are copies of one, or of one group"
        if len(groups) == 1:
            reason = "there is only one"
        remedy = "Some are held out: give a few hundred, with some thousand tokens."
        raise TextError("Too few texts to fit a tuned lens", reason, remedy)
    members: list[list[int]] = [[] for _ in range(count)]
    for text, group in enumerate(groups):
        members[group].append(text)
    held_out = list(range(HELD_OUT - 1, count, HELD_OUT)) or [count - 1]
    fitting = [text for text, group in enumerate(groups) if group not in held_out]
    return fitting, [members[group] for group in held_out]


def _regressions(
    model: Model, inputs: Inputs, sites: LensSites
) -> list["RidgeRegression"]:
    """Sum up the regression of every layer but the last over all texts."""
    regressions = [RidgeRegression() for _ in sites.layers[:-1]]
    with progress.track("Fitting", total=sum(inputs.costs)) as advance:
        for _, batch in inputs.batches(model, batch_tokens=BATCH_TOKENS):
            states = layer_states(model, batch, sites).cpu().double()
            for regression, layer in zip(regressions, states[:-1], strict=True):
                regression.add(layer, states[-1])
            advance(sum(batch.costs))
    return regressions


def _held_out_states(model: Model, inputs: Inputs, sites: LensSites) -> Tensor:
    """Capture the states [layer, token, width] of the first held-out tokens."""
    # No more texts are run than have these tokens.
    ends = np.cumsum(inputs.of(sites.last.stack).lengths)
    count = int(np.searchsorted(ends, MOST_HELD_OUT)) + 1
    first_texts = inputs.some(range(min(len(inputs), count)))
    return layer_states(model, first_texts, sites)[:, :MOST_HELD_OUT]


def _best_maps(
    unembedding: Unembedding,
    states: Tensor,
    sites: LensSites,
    regressions: Sequence["RidgeRegression"],
) -> dict[int, Map]:
    """Select the penalty of every layer's map, where a map is better than none."""
    best_maps: dict[int, Map] = {}
    lowest = _divergence(unembedding, states, sites, {})
    with progress.track("Choosing", total=len(PENALTIES)) as advance:
        for penalty in PENALTIES:
            maps = {
                layer: regression.map(penalty)
                for layer, regression in enumerate(regressions)
            }
            divergence = _divergence(unembedding, states, sites, maps)
            for layer, candidate in maps.items():
                if divergence[layer] < lowest[layer]:
                    best_maps[layer] = candidate
            lowest = np.minimum(lowest, divergence)
            advance(1)
    return best_maps


def _divergence(
    unembedding: Unembedding, states: Tensor, sites: LensSites, maps: Mapping[int, Map]
) -> NDArray[np.float64]:
    """Return each layer's mean KL divergence, through its map, from the prediction."""
    values = mapped(states, sites.layers, maps)
    reading = read_predictions([(unembedding, values)], len(values) - 1, k=1)
    divergence: NDArray[np.float64] = reading.kl.mean(1, dtype=np.float64)
    return divergence


class RidgeRegression:
    """The sums, in float64, of the ridge regression of the last layer on another."""

    def __init__(self) -> None:
        self.squares = torch.zeros(0)
        self.products = torch.zeros(0)

    def add(self, layer: Tensor, last: Tensor) -> None:
        """Add the states [token, width] of some tokens at the layer and at the last."""
        smallest = torch.finfo(torch.float64).tiny
        norms = last.norm(dim=1, keepdim=True).clamp_min(smallest)
        scale = last.shape[1] ** 0.5 / norms
        # The column of ones is the bias.
        rows = torch.cat([layer, torch.ones_like(layer[:, :1])], 1) * scale
        squares = rows.T @ rows
        products = rows.T @ ((last - layer) * scale)
        if self.squares.numel():
            squares = self.squares + squares
            products = self.products + products
        self.squares = squares
        self.products = products

    def map(self, penalty: float) -> Map:
        """Solve for the map h + A h + b, with a penalty on A."""
        diagonal = self.squares.diagonal()
        sizes = diagonal.clone()
        # The bias is nearly free.
        sizes[-1] *= 1e-6
        ridge = penalty * sizes + 1e-9 * diagonal.mean()
        penalised = self.squares + torch.diag(ridge)
        solution = torch.linalg.solve(penalised, self.products).T
        matrix = solution[:, :-1] + torch.eye(len(solution), dtype=solution.dtype)
        bias = solution[:, -1]
        return Map(matrix.float().contiguous(), bias.float().contiguous())

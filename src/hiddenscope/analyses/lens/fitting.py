"""Fit a lens to a model: one affine map for each layer, and the files that hold them.

The tuned lens has for each layer the affine map nearest to the last layer. It is a
ridge regression of the last layer on this one, held towards the identity. Every row is
divided by the size of its last state, which the final norm takes away. The penalty is
selected for each layer by the KL divergence on half of the held-out texts, and the map
is judged on the other half. A layer has no map where none is better on the first half,
or where the selected one is worse on the second. Copies of a text, and texts of a
group, stay together, or what was learnt by heart would count.

The Jacobian lens has for each layer the mean derivative of the last layer. For layer k
it is the mean over texts, and over the tokens t of each, of the sum over t' of the
derivative of layer.L at t' with respect to layer.k at t; in a causal model only the
tokens from t on contribute. One product of a vector with the pass gives a row of it for
every layer and token at once, so each text takes as many products as a state is wide.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.lens.reading import LensSites, read_predictions
from hiddenscope.errors import FileError, TextError
from hiddenscope.files import PathLike, read_tensors, save_tensors
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.jacobian import tape
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Facts
from hiddenscope.sites import Site
from hiddenscope.states import States
from hiddenscope.states.arrays import Floats
from hiddenscope.states.mixed import one_tensor

# As a share of each channel's own sum of squares.
PENALTIES = (0.001, 0.01, 0.1, 1.0, 10.0)
# One group of texts in five is held out.
HELD_OUT = 5
# Tokens by which maps are selected, and judged: each costs a product with the whole
# vocabulary.
MOST_HELD_OUT = 256
# Tokens whose states are held at a time.
BATCH_TOKENS = 2_048
FORMAT = "hiddenscope.lens.partial/1"
# Products that go through the pass together.
VECTORS = 64
# Seconds between two writes of an unfinished fit.
SAVE_EVERY = 30.0


@dataclass(frozen=True, eq=False)
class Map:
    """An affine map of states: `matrix` [width, width], and `bias` [width] if any.

    >>> double = Map(2 * torch.eye(2), torch.tensor([1.0, 0.0]))
    >>> double.apply(torch.tensor([[1.0, 1.0]]))
    tensor([[3., 2.]])
    """

    matrix: Tensor
    bias: Tensor | None = None

    def apply(self, rows: Tensor) -> Tensor:
        """Map rows [token, width]; they keep their dtype."""
        wide = rows.to(torch.promote_types(rows.dtype, self.matrix.dtype))
        result = wide @ self.matrix.to(wide).T
        if self.bias is not None:
            result = result + self.bias.to(wide)
        return result.to(rows.dtype)


def mapped(states: Tensor, layers: Sequence[Site], maps: Mapping[int, Map]) -> Tensor:
    """Map states [layer, token, width]; a layer without a map stays as it is."""
    results = []
    for site, rows in zip(layers, states, strict=True):
        layer_map = maps.get(site.layer or 0)
        if layer_map is not None:
            rows = layer_map.apply(rows)
        results.append(rows)
    return torch.stack(results)


def layer_states(model: Model, inputs: Inputs, sites: LensSites) -> Tensor:
    """Capture all layers [layer, token, width], on the device that computes them."""
    states = model.capture(inputs, list(sites.layers), keep="device")
    assert isinstance(states, States), "the sites are in one stack"
    return one_tensor(states.values)


def fit_tuned(
    model: Model, inputs: Inputs, sites: LensSites, groups: Sequence[int]
) -> tuple[dict[int, Map], Facts]:
    """Fit a map to every layer that is better with one, and return it with its facts.

    `groups` numbers the group of each text.
    """
    fitting_texts, held_out = _split(groups)
    fitting = inputs.some(fitting_texts)
    regressions = [RidgeRegression() for _ in sites.layers[:-1]]
    with progress.track("Fitting", total=sum(fitting.costs)) as advance:
        for _, batch in fitting.batches(model, batch_tokens=BATCH_TOKENS):
            states = layer_states(model, batch, sites).cpu().double()
            for regression, layer in zip(regressions, states[:-1], strict=True):
                regression.add(layer, states[-1])
            advance(sum(batch.costs))
    # One text of each held-out group: the others would say the same again.
    firsts = [group[0] for group in held_out]
    selecting = _held_out_states(model, inputs.some(firsts[::2]), sites)
    judging = _held_out_states(model, inputs.some(firsts[1::2] or firsts), sites)
    unembedding = Unembedding(model)
    # Select the penalty of every layer's map, where a map is better than none.
    maps = {}
    lowest = _divergence(unembedding, selecting, sites, {})
    with progress.track("Choosing", total=len(PENALTIES)) as advance:
        for penalty in PENALTIES:
            candidates = {
                layer: regression.map(penalty)
                for layer, regression in enumerate(regressions)
            }
            divergence = _divergence(unembedding, selecting, sites, candidates)
            for layer, candidate in candidates.items():
                if divergence[layer] < lowest[layer]:
                    maps[layer] = candidate
            lowest = np.minimum(lowest, divergence)
            advance(1)
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


def _held_out_states(model: Model, inputs: Inputs, sites: LensSites) -> Tensor:
    """Capture the states [layer, token, width] of the first held-out tokens."""
    # No more texts are run than have these tokens.
    ends = np.cumsum(inputs.of(sites.last.stack).lengths)
    count = int(np.searchsorted(ends, MOST_HELD_OUT)) + 1
    first_texts = inputs.some(range(min(len(inputs), count)))
    return layer_states(model, first_texts, sites)[:, :MOST_HELD_OUT]


def _divergence(
    unembedding: Unembedding, states: Tensor, sites: LensSites, maps: Mapping[int, Map]
) -> Floats:
    """Return each layer's mean KL divergence, through its map, from the prediction."""
    values = mapped(states, sites.layers, maps)
    parts = [(values, sites.last)]
    reading = read_predictions(unembedding, parts, len(values) - 1, k=1)
    divergence: Floats = reading.kl.mean(1, dtype=np.float64)
    return divergence


class RidgeRegression:
    """The sums, in float64, of the ridge regression of the last layer on another."""

    def __init__(self) -> None:
        self.squares = self.products = torch.zeros((), dtype=torch.float64)

    def add(self, layer: Tensor, last: Tensor) -> None:
        """Add the states [token, width] of some tokens at the layer and at the last."""
        smallest = torch.finfo(torch.float64).tiny
        norms = last.norm(dim=1, keepdim=True).clamp_min(smallest)
        scale = last.shape[1] ** 0.5 / norms
        # The column of ones is the bias.
        rows = torch.cat([layer, torch.ones_like(layer[:, :1])], 1) * scale
        self.squares = self.squares + rows.T @ rows
        self.products = self.products + rows.T @ ((last - layer) * scale)

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


def fit_jacobian(
    model: Model, inputs: Inputs, sites: LensSites, partial: PathLike | None
) -> tuple[dict[int, Map], Facts]:
    """Average the Jacobian of every layer; `partial` continues an interrupted fit."""
    sums = JacobianSums(model, inputs, sites, partial)
    with progress.track("Fitting", total=len(inputs)) as advance:
        advance(sums.texts)
        try:
            while sums.texts < len(inputs):
                sums.add(jacobians(model, inputs.some([sums.texts]), sites))
                advance(1)
        finally:
            sums.save()
    maps = {
        layer: Map((total / sums.texts).float()) for layer, total in sums.totals.items()
    }
    tokens = sum(inputs.of(sites.last.stack).lengths)
    return maps, {"texts": sums.texts, "tokens": tokens}


class JacobianSums:
    """The sums of the Jacobians of the first `texts` texts, saved to a file if any.

    `identity` is what a saved sum must have in common with this fit.
    """

    def __init__(
        self, model: Model, inputs: Inputs, sites: LensSites, partial: PathLike | None
    ) -> None:
        targets = None if inputs.targets is None else inputs.targets.ids
        ids = json.dumps([inputs.ids, targets])
        self.identity = {
            "weights": model.source(sites.last.stack).weights,
            "texts": hashlib.sha256(ids.encode()).hexdigest(),
        }
        self.partial = partial
        self.texts = 0
        self.totals: dict[int, Tensor] = {}
        self._saved_at = time.monotonic()
        if partial is not None and os.path.exists(partial):
            tensors, header = read_lens_file(partial, FORMAT)
            for name, value in self.identity.items():
                if header.get(name) != value:
                    problem = f"Cannot continue from {os.fspath(partial)!r}"
                    raise FileError(
                        problem, f"it was begun with other {name}", "Give another path."
                    )
            self.texts = int(header["done"])
            self.totals = {
                int(name.removeprefix("layer.")): total
                for name, total in tensors.items()
            }

    def add(self, text: Mapping[int, Tensor]) -> None:
        """Add the Jacobians of one text."""
        for layer, jacobian in text.items():
            self.totals[layer] = self.totals.get(layer, 0) + jacobian
        self.texts += 1
        if time.monotonic() - self._saved_at > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Write the file, if there is a path and anything to write."""
        if self.partial is None or not self.texts:
            return
        tensors = {f"layer.{layer}": total for layer, total in self.totals.items()}
        write_lens_file(
            self.partial, FORMAT, tensors, {"done": self.texts, **self.identity}
        )
        self._saved_at = time.monotonic()


def jacobians(model: Model, text: Inputs, sites: LensSites) -> Mapping[int, Tensor]:
    """Return the Jacobians [width, width] of one text by layer, in float64.

    Each is the mean over the tokens of the text.
    """
    parts: dict[int, list[Tensor]] = {site.layer or 0: [] for site in sites.layers[:-1]}
    with model.lock:
        run = tape(model, text, sites.layers)
        last = run.values(sites.last)
        for rows in torch.split(torch.eye(last.shape[1]), VECTORS):
            # The same vectors at every token: the sum over t' above.
            vectors = rows[:, None].expand(-1, len(last), -1).to(last)
            for site, products in run.pull({sites.last: vectors}):
                if site != sites.last:
                    parts[site.layer or 0].append(products.double().mean(1).cpu())
    return {layer: torch.cat(rows) for layer, rows in parts.items()}


def write_lens_file(
    path: PathLike,
    file_format: str,
    tensors: Mapping[str, Tensor],
    header: Mapping[str, object],
) -> None:
    """Write tensors and their header."""
    save_tensors(path, tensors, {"format": file_format, "lens": json.dumps(header)})


def read_lens_file(
    path: PathLike, file_format: str
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read what `write_lens_file` wrote."""
    tensors, header = read_tensors(path, "a lens", file_format)
    try:
        return tensors, dict(json.loads(header["lens"]))
    except (KeyError, TypeError, ValueError) as error:
        raise unreadable(path, error) from error


def unreadable(path: PathLike, error: Exception) -> FileError:
    """Return the error for a file that holds no lens."""
    return FileError(
        f"Cannot read a lens from {os.fspath(path)!r}",
        f"it is damaged or of another kind ({error})",
        "Fit the lens again.",
    )

"""The Jacobian lens: for each layer, the mean derivative of the last layer.

For layer k it is the mean over texts, and over the tokens t of each, of the sum over t'
of the derivative of layer.L at t' with respect to layer.k at t; in a causal model only
the tokens from t on contribute. One product of a vector with the pass gives a row of it
for every layer and token at once, so each text takes as many products as a state is
wide.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.lens.files import PathLike, read_lens_file, write_lens_file
from hiddenscope.analyses.lens.maps import Map
from hiddenscope.analyses.lens.reading import LensSites
from hiddenscope.errors import FileError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.passes.jacobian import tape
from hiddenscope.results import Facts

FORMAT = "hiddenscope.lens.partial/1"
# Products that go through the pass together.
VECTORS = 64
# Seconds between two writes of an unfinished fit.
SAVE_EVERY = 30.0


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
            self._load(partial)

    def add(self, text: Mapping[int, Tensor]) -> None:
        """Add the Jacobians of one text."""
        for layer, jacobian in text.items():
            if layer in self.totals:
                jacobian = self.totals[layer] + jacobian
            self.totals[layer] = jacobian
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

    def _load(self, path: PathLike) -> None:
        tensors, header = read_lens_file(path, FORMAT)
        for name, value in self.identity.items():
            if header.get(name) != value:
                problem = f"Cannot continue from {os.fspath(path)!r}"
                raise FileError(
                    problem, f"it was begun with other {name}", "Give another path."
                )
        self.texts = int(header["done"])
        self.totals = {
            int(name.removeprefix("layer.")): total for name, total in tensors.items()
        }


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

"""Jacobian: how the last layer, at a token and those after it, moves with each layer, on average over texts.

For a layer k it is the mean over texts, and over the tokens t of each, of the sum over t' of the derivative of layer.L
at t' with respect to layer.k at t; in a causal model only tokens from t on are moved. One product of a vector with the
pass gives a row of it for every layer and token at once, so it takes as many as a state is wide, for each text.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.lens.asked import Asked, Plan
from hiddenscope.analyses.lens.files import Kept, read_kept, write_kept
from hiddenscope.analyses.lens.maps import Map
from hiddenscope.errors import FileError
from hiddenscope.model import Model
from hiddenscope.passes import make_batch, prepare
from hiddenscope.passes.jacobian import tape

TOGETHER = 64  # products that go through the pass at once
EVERY = 30.0  # seconds between two savings of what was added up
PARTIAL = "hiddenscope.lens.partial/1"


def fit(
    model: Model, texts: Asked, plan: Plan, partial: str | os.PathLike[str] | None
) -> tuple[dict[int, Map], dict[str, Any]]:
    """The mean Jacobian of every layer, and what was found; with `partial` an interrupted fit goes on from there."""
    work = _Work(model, texts, plan, partial)
    with progress.track("Fitting", total=len(texts.texts)) as advance:
        advance(work.done)
        try:
            while work.done < len(texts.texts):
                work.add()
                advance(1)
        finally:
            work.save()
    means = {layer: Map((total / work.done).float()) for layer, total in work.sums.items()}
    return means, {"texts": work.done, "tokens": sum(texts.lengths)}


class _Work:
    """Sums over the texts that are done, kept in a file if one is given."""

    def __init__(self, model: Model, texts: Asked, plan: Plan, partial: str | os.PathLike[str] | None) -> None:
        self.model, self.texts, self.plan, self.partial = model, texts, plan, partial
        self.weights = model.source(plan.last.stack).weights
        self.digest = hashlib.sha256(repr((texts.texts, texts.targets)).encode("utf-8", "surrogatepass")).hexdigest()
        self.done, self.sums, self.saved = 0, dict[int, Tensor](), time.monotonic()
        if partial is not None and Path(partial).exists():
            self._go_on(read_kept(partial, PARTIAL))

    def add(self) -> None:
        """One more text; the sums change only when all of it is known."""
        found = _jacobians(self.model, self.texts.some([self.done]), self.plan)
        for layer, mean in found.items():
            self.sums[layer] = self.sums[layer] + mean if layer in self.sums else mean
        self.done += 1
        if time.monotonic() - self.saved > EVERY:
            self.save()

    def save(self) -> None:
        if self.partial is not None and self.done:
            said = {"done": self.done, "weights": self.weights, "texts": self.digest}
            write_kept(self.partial, PARTIAL, Kept({f"layer.{k}": total for k, total in self.sums.items()}, said))
            self.saved = time.monotonic()

    def _go_on(self, kept: Kept) -> None:
        for what, own in (("weights", self.weights), ("texts", self.digest)):
            if kept.said.get(what) != own:
                reason = f"it was begun with other {what}"
                raise FileError(f"Going on from {os.fspath(self.partial or '')}", reason, "Give another path.")
        self.done = int(kept.said["done"])
        self.sums = {int(name.removeprefix("layer.")): total for name, total in kept.tensors.items()}


def _jacobians(model: Model, text: Asked, plan: Plan) -> Mapping[int, Tensor]:
    """The Jacobians of one text [width, width], the mean over its tokens, in float64."""
    encoded, aims, _ = prepare(model, text.texts, text.targets)
    with model.lock:
        run = tape(model, make_batch(model, encoded, aims, [0]), plan.layers)
        tokens, width = run.values(plan.last).shape
        found: dict[int, list[Tensor]] = {site.layer or 0: [] for site in plan.layers[:-1]}
        for begin in range(0, width, TOGETHER):
            rows = torch.eye(width)[begin : begin + TOGETHER]
            seeds = rows[:, None].expand(-1, tokens, -1).to(run.values(plan.last))
            for site, products in run.pull({plan.last: seeds}):
                if site != plan.last:
                    found[site.layer or 0].append(products.double().mean(1).cpu())
    return {layer: torch.cat(parts) for layer, parts in found.items()}

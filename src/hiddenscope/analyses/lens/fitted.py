"""Lenses that are fitted to a model: how they are made, saved and loaded."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hiddenscope.analyses.lens.fitting import (
    Map,
    fit_jacobian,
    fit_tuned,
    read_lens_file,
    unreadable,
    write_lens_file,
)
from hiddenscope.analyses.lens.reading import LensSites
from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError
from hiddenscope.files import PathLike
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Facts
from hiddenscope.texts import copy_key, number_groups

KINDS = ("tuned", "jacobian")
FORMAT = "hiddenscope.lens/2"


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """One map for each layer, fitted to the weights of one model.

    A layer without a map is read as it is.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> Lens.fit(model, [[5, 6, 7, 8], [9, 10, 11, 12]], "jacobian")
    Lens(jacobian, of GPT2LMHeadModel: 3 layers have a map)
    """

    kind: Literal["tuned", "jacobian"]
    maps: Mapping[int, Map]
    model: str
    weights: str
    facts: Facts

    def __repr__(self) -> str:
        return f"Lens({self.kind}, of {self.model}: {len(self.maps)} layers have a map)"

    @classmethod
    def fit(
        cls,
        model: ModelLike,
        texts: Texts | Inputs,
        kind: Literal["tuned", "jacobian"] = "tuned",
        *,
        targets: Texts | None = None,
        partial: PathLike | None = None,
    ) -> "Lens":
        """Fit a lens to a model on texts; `facts` hold what was measured.

        "tuned" is the affine map that brings a layer nearest to the last. It is never
        worse than no map on the texts it is judged on, which are neither those it is
        fitted on nor, from ten texts on, those its penalty is chosen by. "jacobian" is
        the mean derivative of the last layer. It takes long; an interrupted fit
        continues from `partial`, a path.
        """
        model = as_model(model)
        if kind not in KINDS:
            raise StatesError(
                f"No {kind!r} lens",
                f"the kinds are {' and '.join(KINDS)}",
                "Choose one of these.",
            )
        if partial is not None and kind != "jacobian":
            raise StatesError(
                f"Cannot continue a {kind} lens",
                "it is fitted in one step",
                "Leave `partial` out.",
            )
        sites = LensSites.of(model)
        # A model without one is refused before anything is computed.
        Unembedding(model)
        inputs = model.encode(texts, targets=targets)
        if kind == "tuned":
            # Copies of a text, and texts that the data say belong together.
            copies = [copy_key(text) for text in inputs.texts or inputs.ids]
            groups = number_groups(copies, getattr(texts, "groups", None))
            maps, facts = fit_tuned(model, inputs, sites, groups.tolist())
        else:
            maps, facts = fit_jacobian(model, inputs, sites, partial)
        weights = model.source(sites.last.stack).weights
        return cls(kind, maps, model.name, weights, facts)

    def save(self, path: PathLike) -> None:
        """Write it as one safetensors file; `Lens.load` gives it back exactly."""
        tensors = {}
        for layer, layer_map in self.maps.items():
            tensors[f"layer.{layer}.matrix"] = layer_map.matrix
            if layer_map.bias is not None:
                tensors[f"layer.{layer}.bias"] = layer_map.bias
        header = {
            "kind": self.kind,
            "model": self.model,
            "weights": self.weights,
            "facts": dict(self.facts),
        }
        write_lens_file(path, FORMAT, tensors, header)

    @classmethod
    def load(cls, path: PathLike) -> "Lens":
        """Read what `save` wrote."""
        tensors, header = read_lens_file(path, FORMAT)
        try:
            layers = sorted({int(name.split(".")[1]) for name in tensors})
            maps = {
                k: Map(tensors[f"layer.{k}.matrix"], tensors.get(f"layer.{k}.bias"))
                for k in layers
            }
            return cls(
                header["kind"],
                maps,
                str(header["model"]),
                str(header["weights"]),
                dict(header["facts"]),
            )
        except (LookupError, TypeError, ValueError) as error:
            raise unreadable(path, error) from error

    def check(self, model: Model) -> None:
        """Refuse a model that this lens was not fitted to."""
        if model.source(LensSites.of(model).last.stack).weights != self.weights:
            problem = f"Cannot read {model.name} with this {self.kind} lens"
            reason = (
                f"it was fitted to the weights of {self.model}, and these are others"
            )
            raise StatesError(problem, reason, "Fit one to this model.")


def resolve(model: Model, lens: PathLike | Lens) -> Lens | None:
    """Return a fitted lens, or one from a file; None for the logit lens."""
    if isinstance(lens, str) and lens == "logit":
        return None
    if isinstance(lens, str) and lens in KINDS:
        remedy = (
            f"Give lens=hs.Lens.fit(model, texts, {lens!r}), or the path of one that"
            " was saved."
        )
        raise StatesError(
            f"No {lens} lens of {model.name}", "it has to be fitted first", remedy
        )
    if isinstance(lens, str) and not lens.lower().endswith(".safetensors"):
        remedy = "Give 'logit', a fitted lens, or the path of one (.safetensors)."
        raise StatesError(
            f"No lens {lens[:60]!r}", "there is no lens of that name", remedy
        )
    if not isinstance(lens, Lens | str | os.PathLike):
        raise StatesError(
            "lens must be a lens",
            f"got {type(lens).__name__}",
            "Give 'logit', a fitted lens, or a path.",
        )
    fitted = lens if isinstance(lens, Lens) else Lens.load(lens)
    fitted.check(model)
    return fitted

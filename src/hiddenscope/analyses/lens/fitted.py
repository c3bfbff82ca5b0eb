"""Lens: a lens that was fitted to a model, to be used again and kept in a file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hiddenscope.analyses.lens import jacobian, tuned
from hiddenscope.analyses.lens.asked import listed, plan_of
from hiddenscope.analyses.lens.files import Kept, read_kept, write_kept
from hiddenscope.analyses.lens.maps import Map
from hiddenscope.errors import FileError, StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Texts
from hiddenscope.passes.tail import Tail

KINDS = ("tuned", "jacobian")
FORMAT = "hiddenscope.lens/1"


@dataclass(frozen=True, eq=False, repr=False)
class Lens:
    """One map for each layer, fitted to the weights of one model; a layer that has none is read as it is.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> Lens.fit(model, [[5, 6, 7, 8], [9, 10, 11, 12]], "jacobian")
    Lens(jacobian, of GPT2LMHeadModel: 3 layers have a map)
    """

    kind: str
    maps: Mapping[int, Map]
    model: str
    weights: str
    facts: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Lens({self.kind}, of {self.model}: {len(self.maps)} layers have a map)"

    @classmethod
    def fit(
        cls,
        model: Model,
        texts: Texts,
        kind: Literal["tuned", "jacobian"] = "tuned",
        *,
        targets: Texts | None = None,
        partial: str | os.PathLike[str] | None = None,
    ) -> "Lens":
        """Fit a lens to a model on texts; `facts` say what was found.

        "tuned" is the affine map that brings a layer nearest to the last, and is never worse than none on the texts
        it is judged on, which are neither those it is fitted on nor, from ten texts on, those it is chosen by.
        "jacobian" is the mean derivative of the last layer; it takes long, and with `partial`, a path, a fit that was
        interrupted goes on where it was.
        """
        if kind not in KINDS:
            raise StatesError(f"A {kind!r} lens", f"the kinds are {' and '.join(KINDS)}", "Ask for one of these.")
        if partial is not None and kind != "jacobian":
            raise StatesError(f"A partial {kind} lens", "it is fitted at once", "Leave `partial` out.")
        plan = plan_of(model, "layer.*")
        Tail(model, plan.last)  # a model without one is refused before anything is computed
        asked = listed(model, texts, targets)
        maps, facts = tuned.fit(model, asked, plan) if kind == "tuned" else jacobian.fit(model, asked, plan, partial)
        return cls(kind, maps, model.name, model.source(plan.last.stack).weights, facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as one safetensors file; `Lens.load` gives it back exactly."""
        tensors = {f"layer.{layer}.matrix": one.matrix for layer, one in self.maps.items()}
        tensors |= {f"layer.{layer}.bias": one.bias for layer, one in self.maps.items() if one.bias is not None}
        said = {"kind": self.kind, "model": self.model, "weights": self.weights, "facts": dict(self.facts)}
        write_kept(path, FORMAT, Kept(tensors, said))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Lens":
        """Read what `save` wrote."""
        kept = read_kept(path, FORMAT)
        try:
            layers = {int(name.split(".")[1]) for name in kept.tensors}
            maps = {k: Map(kept.tensors[f"layer.{k}.matrix"], kept.tensors.get(f"layer.{k}.bias")) for k in layers}
            said = [str(kept.said[name]) for name in ("kind", "model", "weights")]
            return cls(said[0], dict(sorted(maps.items())), said[1], said[2], dict(kept.said["facts"]))
        except (LookupError, TypeError, ValueError) as error:
            reason = f"it is damaged or of another kind ({error})"
            raise FileError(f"Cannot read a lens from {os.fspath(path)!r}", reason, "Fit the lens again.") from error

    def check(self, model: Model) -> None:
        """Refuse a model that this lens was not fitted to."""
        if model.source(plan_of(model, "layer.*").last.stack).weights != self.weights:
            reason = f"it was fitted to the weights of {self.model}, and these are others"
            raise StatesError(f"A {self.kind} lens for {model.name}", reason, "Fit one to this model.")


def lens_of(model: Model, given: Any) -> Lens | None:
    """The lens that is meant: none for the logit lens, one that was fitted, or one from a file."""
    if given == "logit":
        return None
    if isinstance(given, str) and given in KINDS:
        remedy = f"Give lens=hs.Lens.fit(model, texts, {given!r}), or the path of one that was saved."
        raise StatesError(f"The {given} lens of {model.name}", "it has to be fitted first", remedy)
    if isinstance(given, str) and not given.lower().endswith(".safetensors"):
        remedy = "Give 'logit', a fitted lens, or the path of one (.safetensors)."
        raise StatesError(f"The lens {given[:60]!r}", "there is none of that name", remedy)
    if not isinstance(given, Lens | str | os.PathLike):
        raise StatesError("A lens", f"it is {type(given).__name__}", "Give 'logit', a fitted lens, or a path.")
    lens = given if isinstance(given, Lens) else Lens.load(given)
    lens.check(model)
    return lens

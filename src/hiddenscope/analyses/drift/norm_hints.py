"""List what goes wrong in norms: the mean, the weight, and the size and place of eps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hiddenscope.analyses.drift.suspect import Suspect, Trial


class Norm(NamedTuple):
    """A norm over the last axis. With `outside`, eps is added to the root and not under
    it.
    """

    centred: bool
    gain: Tensor
    shift: Tensor
    eps: float
    outside: bool = False

    def __call__(self, state: Tensor) -> Tensor:
        """Normalise in float64."""
        x, variance = self.moments(state)
        root = (variance + self.eps).sqrt()
        if self.outside:
            root = variance.sqrt() + self.eps
        return x / root * self.gain + self.shift

    def moments(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state, without its mean where that is taken off, and its variance."""
        x = state.double()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x, x.square().mean(-1, keepdim=True)


def norms(suspect: Suspect) -> Iterator[Trial]:
    """Normalise as other norms do."""
    state, norm = suspect.state, _norm_of(suspect)
    if state is None or norm is None:
        return
    eps = _fit_eps(norm, state, suspect.made)
    for fault, words, fields in _changes(norm, eps):
        yield (
            fault,
            f"The output is that of a norm {words}.",
            norm._replace(**fields)(state),
        )


def _changes(norm: Norm, eps: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """List names of faults, what the norm is then like, and fields that differ."""
    gain = norm.gain
    mean = "does not take" if norm.centred else "takes"
    yield "norm_kind", f"that {mean} the mean off", {"centred": not norm.centred}
    yield (
        "norm_weight_less_one",
        "without the 1 that is added to its weight",
        {"gain": gain - 1},
    )
    yield "norm_weight_plus_one", "with 1 added to its weight", {"gain": gain + 1}
    yield "norm_weight_missing", "without its weight", {"gain": torch.ones_like(gain)}
    yield "norm_weight_twice", "with its weight applied twice", {"gain": gain**2}
    yield (
        "norm_eps",
        f"with eps {eps:.2g}; the reference's is {norm.eps:.2g}",
        {"eps": eps},
    )
    yield "norm_eps_outside", "with eps added to the root", {"outside": True}
    yield (
        "norm_root_eps",
        "with the root of eps added to the root",
        {"outside": True, "eps": norm.eps**0.5},
    )


def _norm_of(suspect: Suspect) -> Norm | None:
    """Describe the reference's module as that norm which gives its output."""
    state, weight = suspect.state, suspect.reference._parameters.get("weight")
    values = vars(suspect.reference)
    eps = [values[name] for name in ("eps", "variance_epsilon") if name in values]
    if state is None or weight is None or not eps:
        return None
    gain = weight.detach().double()
    bias = suspect.reference._parameters.get("bias")
    shift = torch.zeros_like(gain) if bias is None else bias.detach().double()
    # Gemma adds 1 to its weight.
    for centred, added in product((True, False), (0, 1)):
        norm = Norm(centred, gain + added, shift, eps[0])
        if suspect.distance(suspect.expected, norm(state)) <= suspect.rounding:
            return norm
    return None


def _fit_eps(norm: Norm, state: Tensor, output: Tensor) -> float:
    """Fit the eps that every row's size would come from."""
    x, variance = norm.moments(state)
    plain = x * norm.gain
    roots = plain.square().sum(-1) / (plain * (output - norm.shift)).sum(-1)
    fitted = float((roots**2 - variance[..., 0]).nanmedian())
    return max(fitted, 0.0)

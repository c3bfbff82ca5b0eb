"""What explains a difference: other weights, or other code.

The candidate's weights are put into the reference's code. What the two still differ by
is not in the weights. Of quantised weights only those are put in that rounding the
reference's weights can have made, so that a block in the wrong place is not taken for
quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.dtypes import NARROW
from hiddenscope.analyses.drift.errors import Errors
from hiddenscope.analyses.drift.live_model import LiveModel
from hiddenscope.analyses.drift.parts import ComparedSides, compare_parts
from hiddenscope.model import Model
from hiddenscope.modules import trials
from hiddenscope.modules.adapters import below_adapters, has_adapters
from hiddenscope.modules.module_copy import private_copy
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.modules.weights import offloaded_tensor
from hiddenscope.passes import Inputs

Explanation = Literal["quantisation", "adapter", "weights", "dtype"]

# The largest relative error of a weight that was rounded to so many bits. Rounding to
# nearest makes at most 1.2% in int8, 2.6% in fp8, 10% in nf4 and 15% in fp4 (smollm2);
# weights with outliers, and methods that round otherwise, make a few times that.
LARGEST_ROUNDING = {8: 0.1, 4: 0.35}
# Rounding has no direction: only this share of it may be along the weight itself (at
# most 5% in smollm2), and so many standard errors.
ALONG_WEIGHT, STANDARD_ERRORS = 0.1, 4


class ChangedWeight(NamedTuple):
    """A weight that differs: the size of the difference as a share of its norm.

    `is_rounding` says that quantising the reference's weight can have made it, and
    `is_narrow` that it is the reference's in fewer digits.
    """

    name: str
    relative: float
    is_rounding: bool
    is_narrow: bool


@dataclass(frozen=True)
class Cause:
    """What explains a difference, and what is left unexplained.

    `errors` and `sides` are those of the comparison in which nothing but the fault is
    left, for the search; without a fault they are None. A fault in weights is one in
    those that are no rounding: with the others, what is left differs.
    """

    explained_by: Explanation | None
    errors: Errors | None = None
    sides: ComparedSides | None = None


@dataclass
class WeightComparison:
    """The weights of two models with the same modules, in one dtype.

    `paths` gives the path of each of the reference's weights in the candidate.
    """

    sides: ComparedSides
    changed: list[ChangedWeight] = field(default_factory=list)
    misread: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, sides: ComparedSides) -> WeightComparison:
        """Compare every weight, quantised ones by what they stand for."""
        comparison = cls(sides)
        # The weights of a port may have another layout.
        if sides.candidate.is_port:
            return comparison
        reference, candidate = sides.equal_reference, sides.equal_candidate
        packed = _unpackers(reference.module), _unpackers(candidate.module)
        bits = {*_bits(reference.module), *_bits(candidate.module)}
        largest = LARGEST_ROUNDING[min(bits, default=8)]
        for name, path in comparison.paths():
            expected = _numbers(reference.module, name, packed[0])
            actual = _numbers(candidate.module, path, packed[1])
            if expected is None or actual is None or expected is actual:
                continue
            both = packed[0].get(name), packed[1].get(path)
            unpackers = [weight for weight in both if weight is not None]
            if any(weight.is_misread for weight in unpackers):
                comparison.misread.append(path)
                unpackers = []
            # bitsandbytes keeps the weights of GPT-2 the other way round.
            if _is_transposed(reference, name) != _is_transposed(candidate, path):
                actual = actual.mT
            if expected.shape == actual.shape:
                change = _change(name, expected, actual, largest if unpackers else 0.0)
                if change is not None:
                    comparison.changed.append(change)
        return comparison

    def paths(self) -> Iterator[tuple[str, str]]:
        """Yield the names of the reference's weights with those of the candidate."""
        reference, candidate = self.sides.equal_reference, self.sides.equal_candidate
        known = {name for name, _ in candidate.module.named_parameters()}
        for name, _ in reference.module.named_parameters():
            path = _path_in(candidate, reference, name)
            if path in known:
                yield name, path


def explain(weights: WeightComparison, model: Model, inputs: Inputs) -> Cause:
    """Find out whether an adapter or the weights explain a difference of two models."""
    below = _below_adapters(weights.sides)
    if below is not None:
        errors = compare_parts(below, model, inputs)
        if errors.drifting:
            return Cause(None, errors, below)
        return Cause("adapter")
    changed = weights.changed
    if not changed:
        return Cause(None)
    everything = [change.name for change in changed]
    rounded = [change.name for change in changed if change.is_rounding]
    exchanged = rounded or everything
    errors, sides = _compare_exchanged(weights, exchanged, model, inputs)
    if rounded and not errors.drifting:
        return Cause("quantisation")
    others = Cause("weights", errors, sides) if rounded else None
    if exchanged != everything:
        errors, sides = _compare_exchanged(weights, everything, model, inputs)
    if errors.drifting:
        return Cause(None, errors, sides)
    if others is not None:
        return others
    if all(change.is_narrow for change in changed):
        return Cause("dtype")
    return Cause("weights")


def _below_adapters(sides: ComparedSides) -> ComparedSides | None:
    """Return both sides without adapters, if exactly one of them has any."""
    reference, candidate = sides.equal_reference, sides.equal_candidate
    if candidate.is_port:
        return None
    if has_adapters(reference.module) == has_adapters(candidate.module):
        return None
    # The side without adapters has its modules where the other has them below.
    if has_adapters(candidate.module):
        candidate = _moved_below(candidate, reference)
    else:
        reference = _moved_below(reference, candidate)
    return ComparedSides(reference, candidate, reference, candidate)


def _moved_below(model: LiveModel, plain: LiveModel) -> LiveModel:
    return replace(
        model,
        module=below_adapters(model.module),
        anatomy=plain.anatomy,
        taps=plain.taps,
        blocks=plain.blocks,
        passes=0,
    )


def _compare_exchanged(
    weights: WeightComparison, names: list[str], model: Model, inputs: Inputs
) -> tuple[Errors, ComparedSides]:
    """Compare the candidate with the reference's code and some of its own weights."""
    reference, candidate = weights.sides.equal_reference, weights.sides.equal_candidate
    paths = {name: path for name, path in weights.paths() if name in names}
    module = _with_weights(reference, candidate, paths)
    exchanged = replace(reference, module=module, passes=0)
    counted = replace(candidate, passes=0)
    sides = ComparedSides(exchanged, counted, exchanged, counted)
    errors = compare_parts(sides, model, inputs)
    if sides.rounds_inputs and exchanged.device == counted.device:
        _hold_to_digits(errors, exchanged.dtype)
    return errors, sides


def _hold_to_digits(errors: Errors, dtype: torch.dtype) -> None:
    """Hold the errors of a comparison to rounding in its dtype.

    Layers that round their input to 8 bits are far from float64, by which noise is
    measured. But here both sides run the very same layers.
    """
    allowed = trials.tolerance(dtype, 0)
    for verdict in errors.verdicts.values():
        verdict.beyond = max(verdict.beyond, verdict.error / allowed)
        verdict.envelope = min(verdict.envelope, allowed)


def _with_weights(
    reference: LiveModel, candidate: LiveModel, paths: Mapping[str, str]
) -> nn.Module:
    """Copy the reference's module with some weights of the candidate."""
    copied = private_copy(reference.module)
    tied: dict[int, list[str]] = {}
    for name, weight in copied.named_parameters(remove_duplicate=False):
        tied.setdefault(id(weight), []).append(name)
    for name, path in paths.items():
        original = copied.get_parameter(name)
        for place in tied[id(original)]:
            source = _path_in(candidate, reference, place) if place != name else path
            _exchange(copied, place, candidate, source)
    return copied


def _exchange(copied: nn.Module, name: str, candidate: LiveModel, path: str) -> None:
    """Put a weight of the candidate into a copy of the reference."""
    container, _, weight_name = name.rpartition(".")
    part = copied.get_submodule(container)
    other = candidate.module.get_submodule(path.rpartition(".")[0])
    replaced = _own_parameter(part, name)
    if type(part) is type(other) and not _is_offloaded(other):
        weight = _own_parameter(other, path)
        # Packed weights have a dtype of their own; others must fit the states.
        if type(weight) is type(replaced) is nn.Parameter:
            weight = nn.Parameter(weight.detach().to(replaced), requires_grad=False)
        elif weight.device != replaced.device:
            weight = nn.Parameter(
                weight.detach().to(replaced.device), requires_grad=False
            )
        part.register_parameter(weight_name, weight)
        return
    # Packed weights come with the code that multiplies by them.
    outside, _, attribute = container.rpartition(".")
    exchanged = private_copy(other)
    if not _is_offloaded(other):
        exchanged.to(replaced.device)
    setattr(copied.get_submodule(outside), attribute, exchanged)


def _own_parameter(part: nn.Module, path: str) -> Any:
    return part._parameters[path.rpartition(".")[2]]


def _is_offloaded(part: nn.Module) -> bool:
    return any(weight.is_meta for weight in part.parameters(recurse=False))


def _is_transposed(model: LiveModel, name: str) -> bool:
    """Tell whether a weight is kept as [input, output]."""
    part = model.part(name.rpartition(".")[0])
    return type(part).__name__ == "Conv1D" and name.endswith("weight")


def _path_in(candidate: LiveModel, reference: LiveModel, name: str) -> str:
    """Return the path of a weight in the candidate, whose blocks may lie elsewhere."""
    for site, block in reference.blocks.items():
        if name.startswith(f"{block}."):
            return candidate.blocks.get(site, block) + name[len(block) :]
    return name


def _unpackers(module: nn.Module) -> dict[str, Any]:
    return {weight.full_name: weight for weight in quantised_weights(module)}


def _bits(module: nn.Module) -> Iterator[int]:
    """Yield how many bits the numbers of each quantised weight have, roughly."""
    for weight in quantised_weights(module):
        yield 4 if "4" in weight.scheme.partition(" ")[2] else 8


def _numbers(module: nn.Module, name: str, packed: Mapping[str, Any]) -> Tensor | None:
    """Return the numbers of a weight, unpacked, or read from where it is kept."""
    if name in packed:
        numbers: Tensor = packed[name].unpack()
        return numbers
    weight = module.get_parameter(name)
    if not weight.is_meta:
        return weight
    container, _, own_name = name.rpartition(".")
    return offloaded_tensor(module.get_submodule(container), own_name)


def _change(
    name: str, expected: Tensor, actual: Tensor, largest: float
) -> ChangedWeight | None:
    """Measure how a weight differs from the reference's; None if it does not.

    Up to a relative error of `largest` it may be rounded by quantisation.
    """
    expected, actual = expected.detach(), actual.detach().to(expected.device)
    if torch.equal(expected, actual.to(expected.dtype)):
        return None
    wide, other = expected.double(), actual.double()
    size = float(wide.norm())
    relative = float((other - wide).norm()) / size if size else torch.inf
    is_rounding = False
    if relative <= largest:
        along = abs(float((other * wide).sum()) / size**2 - 1)
        share = ALONG_WEIGHT + STANDARD_ERRORS / wide.numel() ** 0.5
        is_rounding = along <= share * relative
    return ChangedWeight(name, relative, is_rounding, _is_narrow(expected, actual))


def _is_narrow(expected: Tensor, actual: Tensor) -> bool:
    """Tell whether a weight is another one in fewer digits."""
    for dtype in NARROW:
        if torch.equal(expected.to(dtype).to(actual.dtype), actual):
            return True
    return False

"""What explains a difference: other weights, or other code.

The candidate's weights are put into the reference's code. What the two still differ by
is not in the weights. Of quantised weights only those are put in that rounding the
reference's weights can have made, so that a block in the wrong place is not taken for
quantisation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.compare import ComparedSides, compare_parts
from hiddenscope.analyses.drift.errors import Errors
from hiddenscope.analyses.drift.live_model import NARROW, LiveModel
from hiddenscope.analyses.drift.search import path_in
from hiddenscope.modules import trials
from hiddenscope.modules.adapters import below_adapters, has_adapters
from hiddenscope.modules.module_copy import private_copy
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.modules.weights import offloaded_tensor
from hiddenscope.passes import Inputs

# The largest relative error of a weight that was rounded to this many bits. Rounding to
# nearest makes at most 1.2% in int8, 2.6% in fp8, 10% in nf4 and 15% in fp4 (smollm2);
# weights with outliers, and methods that round otherwise, make a few times that.
LARGEST_ROUNDING = {8: 0.1, 4: 0.35}
# Rounding has no direction: only this share of it may be along the weight itself (at
# most 5% in smollm2), and this many standard errors.
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

    explained_by: Literal["quantisation", "adapter", "weights", "dtype"] | None
    errors: Errors | None = None
    sides: ComparedSides | None = None


def compare_weights(sides: ComparedSides) -> tuple[list[ChangedWeight], list[str]]:
    """Compare every weight in one dtype, quantised ones by what they stand for.

    Return those that differ, and the names of those that their library misreads.
    """
    changed: list[ChangedWeight] = []
    misread: list[str] = []
    # The weights of a port may have another layout.
    if sides.candidate.is_port:
        return changed, misread
    reference = sides.equal_reference
    candidate = sides.equal_candidate
    packed = []
    for model in (reference, candidate):
        quantised = quantised_weights(model.module)
        packed.append({weight.full_name: weight for weight in quantised})
    # How many bits their numbers have, roughly.
    bits = {8}
    for weight in (*packed[0].values(), *packed[1].values()):
        bits.add(4 if "4" in weight.scheme.partition(" ")[2] else 8)
    for name, path in _paths(sides):
        expected = _numbers(reference.module, name, packed[0])
        actual = _numbers(candidate.module, path, packed[1])
        if expected is None or actual is None or expected is actual:
            continue
        largest = 0.0
        if name in packed[0] or path in packed[1]:
            largest = LARGEST_ROUNDING[min(bits)]
            both = packed[0].get(name), packed[1].get(path)
            if any(weight is not None and weight.is_misread for weight in both):
                misread.append(path)
                largest = 0.0
        # bitsandbytes keeps the weights of GPT-2 the other way round.
        if _is_transposed(reference, name) != _is_transposed(candidate, path):
            actual = actual.mT
        if expected.shape == actual.shape:
            change = _change(name, expected, actual, largest)
            changed += [] if change is None else [change]
    return changed, misread


def _paths(sides: ComparedSides) -> Iterator[tuple[str, str]]:
    """Yield the names of the reference's weights with those of the candidate."""
    reference = sides.equal_reference
    candidate = sides.equal_candidate
    known = {name for name, _ in candidate.module.named_parameters()}
    for name, _ in reference.module.named_parameters():
        path = path_in(candidate, reference, name)
        if path in known:
            yield name, path


def _numbers(module: nn.Module, name: str, packed: Mapping[str, Any]) -> Tensor | None:
    """Return the numbers of a weight, unpacked, or read from where it is kept."""
    if name in packed:
        numbers: Tensor = packed[name].unpack()
        return numbers
    weight = module.get_parameter(name)
    if not weight.is_meta:
        return weight
    container, _, attribute = name.rpartition(".")
    return offloaded_tensor(module.get_submodule(container), attribute)


def _is_transposed(model: LiveModel, name: str) -> bool:
    """Tell whether a weight is kept as [input, output]."""
    part = model.part(name.rpartition(".")[0])
    return type(part).__name__ == "Conv1D" and name.endswith("weight")


def _change(
    name: str, expected: Tensor, actual: Tensor, largest: float
) -> ChangedWeight | None:
    """Measure how a weight differs from the reference's; None if it does not.

    Up to a relative error of `largest` it may be rounded by quantisation.
    """
    expected, actual = expected.detach(), actual.detach().to(expected.device)
    if torch.equal(expected, actual.to(expected.dtype)):
        return None
    wide = expected.double()
    other = actual.double()
    size = float(wide.norm())
    relative = float((other - wide).norm()) / size if size else inf
    is_rounding = False
    if relative <= largest:
        along = abs(float((other * wide).sum()) / size**2 - 1)
        share = ALONG_WEIGHT + STANDARD_ERRORS / wide.numel() ** 0.5
        is_rounding = along <= share * relative
    rounded = [expected.to(dtype).to(actual.dtype) for dtype in NARROW]
    is_narrow = any(torch.equal(narrow, actual) for narrow in rounded)
    return ChangedWeight(name, relative, is_rounding, is_narrow)


def explain(
    sides: ComparedSides, changed: list[ChangedWeight], inputs: Inputs
) -> Cause:
    """Find out whether an adapter or the weights explain a difference of two models."""
    below = _below_adapters(sides)
    if below is not None:
        errors = compare_parts(below, inputs, check=False)
        return Cause(None, errors, below) if errors.drifting else Cause("adapter")
    if not changed:
        return Cause(None)
    everything = {change.name for change in changed}
    rounded = {change.name for change in changed if change.is_rounding}
    exchanged = rounded or everything
    errors, left = _compare_exchanged(sides, exchanged, inputs)
    if rounded and not errors.drifting:
        return Cause("quantisation")
    cause = Cause("weights")
    if rounded:
        cause = Cause("weights", errors, left)
    elif all(change.is_narrow for change in changed):
        cause = Cause("dtype")
    if exchanged != everything:
        errors, left = _compare_exchanged(sides, everything, inputs)
    return Cause(None, errors, left) if errors.drifting else cause


def _below_adapters(sides: ComparedSides) -> ComparedSides | None:
    """Return both sides without adapters, if exactly one of them has any."""
    reference = sides.equal_reference
    candidate = sides.equal_candidate
    is_adapted = has_adapters(candidate.module)
    if sides.candidate.is_port or is_adapted == has_adapters(reference.module):
        return None
    # The side without adapters has its modules where the other has them below.
    adapted, plain = (candidate, reference) if is_adapted else (reference, candidate)
    below = replace(
        adapted,
        module=below_adapters(adapted.module),
        anatomy=plain.anatomy,
        taps=plain.taps,
        blocks=plain.blocks,
    )
    if is_adapted:
        return ComparedSides(reference, below, reference, below)
    return ComparedSides(below, candidate, below, candidate)


def _compare_exchanged(
    sides: ComparedSides, names: Collection[str], inputs: Inputs
) -> tuple[Errors, ComparedSides]:
    """Compare the candidate with the reference's code and some of its own weights."""
    reference = sides.equal_reference
    candidate = sides.equal_candidate
    copied = private_copy(reference.module)
    tied = defaultdict(list)
    for name, weight in copied.named_parameters(remove_duplicate=False):
        tied[id(weight)].append(name)
    for name, path in _paths(sides):
        if name not in names:
            continue
        for place in tied[id(copied.get_parameter(name))]:
            source = path_in(candidate, reference, place) if place != name else path
            _exchange(copied, place, candidate.module, source)
    exchanged = replace(reference, module=copied)
    compared = ComparedSides(exchanged, candidate, exchanged, candidate)
    errors = compare_parts(compared, inputs, check=False)
    if compared.rounds_inputs and exchanged.device == candidate.device:
        # Layers that round their input to 8 bits are far from float64, by which noise
        # is measured. But here both sides run the very same layers, so that errors are
        # held to rounding in the dtype.
        allowed = trials.tolerance(reference.dtype, 0)
        for verdict in errors.verdicts.values():
            verdict.beyond = max(verdict.beyond, verdict.error / allowed)
            verdict.envelope = min(verdict.envelope, allowed)
    return errors, compared


def _exchange(copied: nn.Module, name: str, module: nn.Module, path: str) -> None:
    """Put a weight of the candidate's module into a copy of the reference."""
    container, _, attribute = name.rpartition(".")
    part = copied.get_submodule(container)
    source, _, source_attribute = path.rpartition(".")
    other = module.get_submodule(source)
    replaced: Any = part._parameters[attribute]
    is_offloaded = any(weight.is_meta for weight in other.parameters(recurse=False))
    if type(part) is type(other) and not is_offloaded:
        weight: Any = other._parameters[source_attribute]
        # Packed weights have a dtype of their own; others must fit the states.
        if type(weight) is type(replaced) is nn.Parameter:
            weight = nn.Parameter(weight.detach().to(replaced), requires_grad=False)
        elif weight.device != replaced.device:
            moved = weight.detach().to(replaced.device)
            weight = nn.Parameter(moved, requires_grad=False)
        part.register_parameter(attribute, weight)
        return
    # Packed weights come with the code that multiplies by them.
    outside, _, part_name = container.rpartition(".")
    exchanged = private_copy(other)
    if not is_offloaded:
        exchanged.to(replaced.device)
    setattr(copied.get_submodule(outside), part_name, exchanged)

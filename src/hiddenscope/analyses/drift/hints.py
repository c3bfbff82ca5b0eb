"""Describe a fault by changes of the reference's module that reproduce it.

Hints never decide where the fault is: the search has measured that before. A hypothesis
becomes a hint if its output equals the candidate's up to rounding and no other
hypothesis is much nearer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hiddenscope.analyses.drift import hypotheses
from hiddenscope.analyses.drift.attention_hypotheses import attention
from hiddenscope.analyses.drift.calls import tensors_in
from hiddenscope.analyses.drift.facts import Hint
from hiddenscope.analyses.drift.live_model import LiveModel
from hiddenscope.analyses.drift.noise import Noise
from hiddenscope.analyses.drift.search import FaultyModule, Search
from hiddenscope.analyses.drift.suspect import Hypothesis, Suspect
from hiddenscope.modules import hooks

# A hypothesis is named beside the nearest one if it leaves at most this many times as
# much of the error.
AS_NEAR = 3.0
# These read the modules themselves, and need no error that can be measured.
FROM_MODULES = (hypotheses.weights, hypotheses.attributes)
HYPOTHESES = (
    *FROM_MODULES,
    hypotheses.effects,
    hypotheses.biases,
    hypotheses.other_blocks,
    hypotheses.activations,
    hypotheses.exchanged_parts,
    hypotheses.norms,
    attention,
)


def describe_hint(search: Search, fault: FaultyModule) -> tuple[list[Hint], list[str]]:
    """Return what a fault looks like, most certain first, and notes on failed tests."""
    hints: list[Hint] = []
    notes: list[str] = []
    call = fault.call
    if call is None:
        return [*fault.hints], notes
    blocks = search.reference.blocks.values()
    if search.is_or_holds_block(call.path) and call.path not in blocks:
        reference = _block_arguments(search, search.reference, call.path)
        candidate = _block_arguments(search, search.candidate, call.path)
        hints += argument_hints(reference, candidate)
    elif fault.output is not None:
        explained, notes = explain_fault(_suspect(search, fault, fault.output))
        hints += explained
    return [*hints, *fault.hints], notes


def _suspect(search: Search, fault: FaultyModule, output: Tensor) -> Suspect:
    call = fault.call
    assert call is not None
    reference = search.reference
    is_block = call.path in reference.blocks.values()
    role: Literal["module", "block"] = "block" if is_block else "module"
    blocks = {
        str(site): reference.part(path) for site, path in reference.blocks.items()
    }
    # Encoder and decoder read different texts.
    fitting = [mask for mask in search.masks if mask.shape == output.shape[:2]]
    mask = next(iter(fitting), search.masks[-1])
    return Suspect(
        fault.path,
        reference.part(call.path),
        search.candidate.part(fault.path),
        call,
        output,
        reference.device,
        role,
        same_make=not search.candidate.is_port,
        padded=search.batch.has_padding,
        mask=mask,
        blocks=blocks,
        model=reference.module,
        distance=lambda expected, other: search.gap(expected, other).worst,
        rounding=Noise.assumed(output.dtype).envelope,
    )


def explain_fault(suspect: Suspect) -> tuple[list[Hint], list[str]]:
    """Return the hypotheses that explain a fault, and notes on those that failed.

    Each kind of fault is named at most once.
    """
    notes: list[str] = []
    measured = list(_measure(suspect, notes))
    nearest = min((rest for _, rest in measured), default=0.0)
    bound = min(suspect.largest_rest, max(suspect.rounding, AS_NEAR * nearest))
    hints: dict[str, Hint] = {}
    for hint, rest in measured:
        if rest <= bound:
            hints.setdefault(hint["fault"], hint)
    return list(hints.values()), notes


def _measure(suspect: Suspect, notes: list[str]) -> Iterator[tuple[Hint, float]]:
    """Yield every hypothesis with the part of the error that it leaves."""
    topics: Sequence[Callable[[Suspect], Iterator[Hypothesis]]] = HYPOTHESES
    is_comparable = suspect.output.shape == suspect.expected.shape
    # Within rounding, any hypothesis that changes little would fit.
    if not is_comparable or suspect.error <= suspect.rounding:
        topics = FROM_MODULES
    for topic in topics:
        try:
            for fault, evidence, output in topic(suspect):
                yield Hint(fault=fault, evidence=evidence), suspect.rest(output)
        # A hypothesis runs modules of any make with arguments they do not expect.
        except Exception as error:
            name = topic.__name__.replace("_", " ")
            reason, _, _ = f"{type(error).__name__}: {error}".partition("\n")
            notes.append(
                f"Hints on {name} of `{suspect.path}` could not be tried: {reason}"
            )


def _block_arguments(
    search: Search, model: LiveModel, container: str
) -> Mapping[str, Any]:
    """Record the named arguments of the first block inside a module."""
    prefix = f"{container}." if container else ""
    paths = [path for path in model.blocks.values() if path.startswith(prefix)]
    if not paths:
        return {}
    calls: list[Mapping[str, Any]] = []

    def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        calls.append(dict(kwargs))

    with hooks.watching([hooks.Watch(model.part(paths[0]), "input", before)]):
        model.run(model.batch(search.inputs))
    return calls[0] if calls else {}


def argument_hints(
    reference: Mapping[str, Any], candidate: Mapping[str, Any]
) -> list[Hint]:
    """Return hints on arguments that differ between the blocks of two models."""
    hints = []
    for name, value in reference.items():
        evidence = _difference(name, value, candidate.get(name))
        if evidence:
            hints.append(Hint(fault="block_argument", evidence=evidence))
    return hints


def _difference(name: str, value: object, other: object) -> str:
    words = f"The blocks are given `{name}` in the"
    if value is None and other is not None:
        return f"{words} candidate and not in the reference."
    if value is not None and other is None:
        return f"{words} reference and not in the candidate."
    for tensor, other_tensor in zip(tensors_in(value), tensors_in(other), strict=False):
        if tensor.shape != other_tensor.shape:
            continue
        moved = other_tensor.to(tensor)
        if not torch.equal(tensor, moved):
            difference = _tensor_difference(tensor, moved)
            return f"`{name}`, which the blocks are given, {difference}."
    return ""


def _tensor_difference(tensor: Tensor, other: Tensor) -> str:
    shift = (other.double() - tensor.double()).flatten()
    if bool((shift == shift[0]).all()):
        return f"is the reference's plus {float(shift[0]):g}"
    return f"differs in {int((tensor != other).sum()):,} of {tensor.numel():,} elements"

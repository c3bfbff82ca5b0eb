"""Say what a fault looks like: each hint is a change of the reference's module that
gives what the candidate gives.

Hints never decide where the fault is: that was measured before. A hypothesis becomes a
hint where its output is the candidate's up to rounding, and no other hypothesis is much
nearer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hiddenscope.analyses.drift import (
    attention_hints,
    module_hints,
    norm_hints,
    weight_hints,
)
from hiddenscope.analyses.drift.calls import tensors_in
from hiddenscope.analyses.drift.suspect import Suspect

Hint = dict[str, str]
"""What a fault looks like: the name of a `fault`, and the `evidence` in a sentence."""
# How much more of the error than the nearest hypothesis another may leave, to be named
# beside it.
AS_NEAR = 3.0
# What can be read off the modules themselves.
FACTS = (weight_hints.weights, module_hints.attributes)
HYPOTHESES = (
    *FACTS,
    *module_hints.HYPOTHESES,
    norm_hints.norms,
    attention_hints.attention,
)


class Hints(list[Hint]):
    """Hints, and `notes` on what could not be tried."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []


def hints(suspect: Suspect) -> Hints:
    """Say what the fault looks like, at most once for each kind of fault; nothing where
    nothing known fits.
    """
    result = Hints()
    measured = list(_measure(suspect, result.notes))
    nearest = min((rest for _, _, rest in measured), default=0.0)
    bound = min(suspect.largest_rest, max(suspect.rounding, AS_NEAR * nearest))
    sentences: dict[str, str] = {}
    for fault, evidence, rest in measured:
        if rest <= bound:
            sentences.setdefault(fault, evidence)
    result.extend(
        {"fault": fault, "evidence": evidence} for fault, evidence in sentences.items()
    )
    return result


def _measure(suspect: Suspect, notes: list[str]) -> Iterator[tuple[str, str, float]]:
    """Measure what every hypothesis leaves of the error; note those that fail otherwise
    than by a refused argument.
    """
    comparable = (
        suspect.role != "model" and suspect.made.shape == suspect.expected.shape
    )
    # Within rounding, any hypothesis that changes little would fit.
    measurable = comparable and suspect.error > suspect.rounding
    for hypotheses in HYPOTHESES if measurable else FACTS:
        try:
            for fault, evidence, output in hypotheses(suspect):
                yield fault, evidence, suspect.rest(output)
        except Exception as error:
            topic = hypotheses.__name__.replace("_", " ")
            reason, _, _ = f"{type(error).__name__}: {error}".partition("\n")
            notes.append(
                f"Hints on {topic} of `{suspect.path}` could not be tried: {reason}"
            )


def argument_hints(
    reference: Mapping[str, Any], candidate: Mapping[str, Any]
) -> list[Hint]:
    """Say which arguments the candidate's blocks are given otherwise than the
    reference's.
    """
    sentences = [
        _difference(name, value, candidate.get(name))
        for name, value in reference.items()
    ]
    return [
        {"fault": "block_argument", "evidence": sentence}
        for sentence in sentences
        if sentence
    ]


def _difference(name: str, value: Any, other: Any) -> str:
    if (value is None) != (other is None):
        sides = (
            ("candidate", "reference") if value is None else ("reference", "candidate")
        )
        return (
            f"The blocks are given `{name}` in the {sides[0]} and not in the"
            f" {sides[1]}."
        )
    for tensor, unmoved in zip(tensors_in(value), tensors_in(other), strict=False):
        if tensor.shape == unmoved.shape and not torch.equal(
            tensor, unmoved.to(tensor)
        ):
            return (
                f"`{name}`, which the blocks are given,"
                f" {_tensor_difference(tensor, unmoved.to(tensor))}."
            )
    return ""


def _tensor_difference(tensor: Tensor, other: Tensor) -> str:
    shift = (other.double() - tensor.double()).flatten()
    if bool((shift == shift[0]).all()):
        return f"is the reference's plus {float(shift[0]):g}"
    return f"differs in {int((tensor != other).sum()):,} of {tensor.numel():,} elements"

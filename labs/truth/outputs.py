"""Check that a compiled model is its program: answers, logits and states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.layout import LOGIT, Compiled
from labs.truth.program import Trace

MOST_INPUTS = 10_000
BATCH = 1_000
# States are compared on fewer inputs.
DECODED_INPUTS = 50


@dataclass(frozen=True)
class Outputs:
    """What a model gives for many inputs, or for all.

    `logit_error` is how far a logit is off, of 10. `leak` is how far any channel of
    any state is off, of 1.
    """

    inputs: int
    is_every_input: bool
    wrong: int
    logit_error: float
    leak: float


def check_outputs(known: KnownModel, most: int = MOST_INPUTS) -> Outputs:
    """Run the model and the program on the same inputs."""
    program = known.program
    is_every_input = program.count_inputs() <= most
    inputs = list(program.every_input()) if is_every_input else program.draw(most)
    wrong, logit_error = 0, 0.0
    for batch in _batches(inputs):
        places = program.answers(batch[0])
        logits = _logits(known, batch)[:, places]
        wanted = _wanted(known, batch, places)
        wrong += int((logits.argmax(-1) != wanted).any(1).sum())
        ideal = LOGIT * torch.nn.functional.one_hot(wanted, logits.shape[-1])
        logit_error = max(logit_error, float((logits - ideal).abs().max()))
    leak = max(_leak(known, tokens) for tokens in program.draw(DECODED_INPUTS))
    return Outputs(len(inputs), is_every_input, wrong, logit_error, leak)


def _batches(inputs: list[list[str]]) -> Iterator[list[list[str]]]:
    """Yield inputs of one length at a time."""
    for _, group in groupby(sorted(inputs, key=len), key=len):
        of_one_length = list(group)
        for start in range(0, len(of_one_length), BATCH):
            yield of_one_length[start : start + BATCH]


def _logits(known: KnownModel, batch: list[list[str]]) -> Tensor:
    module: Any = known.module
    device = next(module.parameters()).device
    ids = torch.tensor([known.ids(tokens) for tokens in batch], device=device)
    with torch.no_grad():
        logits: Tensor = module(ids).logits
    return logits.cpu()


def _wanted(known: KnownModel, batch: list[list[str]], places: list[int]) -> Tensor:
    rows = []
    for tokens in batch:
        answers = known.program.run(tokens)["output"]
        rows.append([known.id(str(answers[place])) for place in places])
    return torch.tensor(rows)


def _leak(known: KnownModel, tokens: list[str]) -> float:
    """Return how far the channels of an input's states are from the program's."""
    compiled = known.compiled
    assert compiled is not None, "only what was compiled has channels"
    trace = known.program.run(tokens)
    states = known.model.capture(known.ids(tokens), known.sites)
    assert isinstance(states, hs.States)
    largest = 0.0
    for site in known.sites:
        channels = compiled.decoded(states[site].cpu())
        ideal = _ideal(known, compiled, site, trace)
        error = (channels - ideal)[:, : compiled.channels.idle_head]
        largest = max(largest, float(error.abs().max()))
    return largest


def _ideal(known: KnownModel, compiled: Compiled, site: str, trace: Trace) -> Tensor:
    """Return the channels `[token, channel]` that a state should have."""
    length = len(trace["token"])
    ideal = torch.zeros(length, compiled.channels.count, dtype=torch.float64)
    for name in known.circuit.present(site):
        variable = known.circuit.place(name).variable
        for place, value in enumerate(trace[name]):
            channel = compiled.channels.of(variable, value)
            ideal[place, channel] = float(value) if variable.is_numeric else 1.0
    return ideal

"""A compiled program as matrices of a host's width, whatever the host calls them.

A host with layer norms has every channel twice, the second time negated, so that the
mean is zero. Each variable with a direction for every value adds exactly 1 to a state's
squared norm, so that the norm's gain undoes its division; only numbers, whose squares
differ, leak. The constant channel makes that leak small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labs.truth.circuit import Circuit, Written
from labs.truth.program import Attended, Mapped, Positions, Term
from labs.truth.units import (
    Channels,
    HeadUnit,
    Matrix,
    NeuronUnits,
    head_unit,
    idle_head,
    idle_neuron,
    joined,
    neuron_units,
)

# The constant channel: far larger than any number, and small enough for float32.
CONSTANT = 100.0
# What the output's value adds to its token's logit.
LOGIT = 10.0


@dataclass(frozen=True)
class BlockUnits:
    """The heads and neurons of one block."""

    heads: list[HeadUnit]
    neurons: NeuronUnits


class Compiled:
    """A circuit in matrices, for a host of some width.

    `is_doubled` says that every channel is there twice, for layer norms. `gain` is what
    the norms multiply states with before they are read. `idle_terms` say where the idle
    heads look; without any they look everywhere.
    """

    def __init__(
        self,
        circuit: Circuit,
        activation: Callable[[Tensor], Tensor],
        *,
        is_doubled: bool,
        gain: float = 1.0,
        idle_terms: Sequence[Term] = (),
    ) -> None:
        self.circuit = circuit
        self.idle_terms = idle_terms
        self.gain = gain
        self.is_doubled = is_doubled
        self.channels = Channels(circuit, CONSTANT)

        def of_number(number: float) -> float:
            return float(activation(torch.tensor(number, dtype=torch.float64)))

        self.blocks = []
        for block in range(circuit.blocks):
            self.blocks.append(self._block(block, of_number))
        # One more than the circuit has, for the idle one.
        self.heads = circuit.heads + 1
        needed = self.channels.count * (2 if is_doubled else 1)
        widest = 1
        for units in self.blocks:
            for head in units.heads:
                widest = max(widest, len(head.query), len(head.value))
        self.widest_head = widest
        self.head_width = max(widest, math.ceil(needed / self.heads))
        self.width = self.heads * self.head_width
        self.neurons = max(1, *(units.neurons.reads.shape[0] for units in self.blocks))

    def _block(self, block: int, activation: Callable[[float], float]) -> BlockUnits:
        heads: list[HeadUnit] = []
        neurons: list[NeuronUnits] = []
        for written in self.circuit.written:
            variable = written.variable
            if written.block != block:
                continue
            if isinstance(variable, Attended):
                heads.append(head_unit(variable, self.channels))
            elif isinstance(variable, Mapped):
                neurons.append(neuron_units(variable, self.channels, activation))
        heads.append(idle_head(self.channels, self.idle_terms))
        neurons.append(idle_neuron(self.channels, activation))
        return BlockUnits(heads, joined(neurons))

    @property
    def vocabulary(self) -> list[str]:
        """Return the tokens of the program."""
        return self.circuit.program.vocabulary

    def reading(self, rows: Matrix) -> Tensor:
        """Return rows over channels as rows over the host's width."""
        return self._wide(rows, 0.5) / self.gain

    def decoded(self, states: Tensor) -> Tensor:
        """Return the channels `[..., channel]` of states of the residual stream."""
        everything = np.eye(self.channels.count)
        return states.double() @ self._wide(everything, 0.5).double().T

    def writing(self, columns: Matrix) -> Tensor:
        """Return columns over channels as columns over the host's width."""
        return self._wide(columns.T, 1.0).T

    def _wide(self, rows: Matrix, weight: float) -> Tensor:
        wide = np.zeros((len(rows), self.width))
        if self.is_doubled:
            last = 2 * self.channels.count
            wide[:, 0:last:2] = weight * rows
            wide[:, 1:last:2] = -weight * rows
        else:
            wide[:, : self.channels.count] = rows
        return torch.tensor(wide, dtype=torch.float32)

    def embeddings(self) -> Tensor:
        """Return the embeddings of the tokens, `[token, width]`, with the constant."""
        columns = np.zeros((self.channels.count, len(self.vocabulary)))
        tokens = self.circuit.program.tokens
        for row, token in enumerate(self.vocabulary):
            columns[-1, row] = CONSTANT
            if token in tokens.values:
                columns[self.channels.of(tokens, token), row] = 1
        return self.writing(columns).T

    def positions(self) -> Tensor:
        """Return the embeddings of the positions; zeros where none are read."""
        longest = self.circuit.program.longest
        columns = np.zeros((self.channels.count, longest))
        for written in self.circuit.written:
            if isinstance(written.variable, Positions):
                for place in range(longest):
                    columns[self.channels.of(written.variable, place), place] = 1
        return self.writing(columns).T

    def unembedding(self) -> Tensor:
        """Return what each token's logit reads, `[token, width]`."""
        rows = np.zeros((len(self.vocabulary), self.channels.count))
        output = self.circuit.program.output
        for value in output.values:
            row = self.vocabulary.index(str(value))
            rows[row, self.channels.of(output, value)] = LOGIT
        return self.reading(rows)

    def set_gain(self, norm: Any, step: tuple[int, int], epsilon: float) -> None:
        """Set a norm so that it only multiplies the states after a step."""
        mean_square = self.size(step) / self.width
        with torch.no_grad():
            norm.weight.fill_(self.gain * math.sqrt(mean_square + epsilon))
            if getattr(norm, "bias", None) is not None:
                norm.bias.zero_()

    def size(self, step: tuple[int, int]) -> float:
        """Return the squared norm of a state after some step of the forward pass."""
        present = [each for each in self.circuit.written if each.step <= step]
        squares = CONSTANT**2 + sum(map(_square, present))
        # The idle parts of every block have added one to their channels.
        block, part = step
        squares += (block + 1) ** 2 + (block + part) ** 2
        return squares * (2 if self.is_doubled else 1)


def _square(written: Written) -> float:
    """Return what a variable adds to the squared norm: the mean over its values."""
    variable = written.variable
    if not variable.is_numeric:
        return 1.0
    return float(np.mean([float(value) ** 2 for value in variable.values]))


def copy_rows(weight: Tensor, rows: Tensor) -> None:
    """Write rows at the beginning of a weight, which is zero elsewhere."""
    with torch.no_grad():
        weight.zero_()
        weight[: rows.shape[0], : rows.shape[1]] = rows


def clear(module: nn.Module) -> None:
    """Set every weight to zero."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()

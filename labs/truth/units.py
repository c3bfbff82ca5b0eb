"""The heads and neurons that compute a variable, as matrices over channels.

A channel holds a number: whether a variable has one of its values, or the value of a
numeric one. The last channel is a constant, which norms are neutralised by, and of
which every bias is made. A host says where its channels are.

Every block has an idle head and an idle neuron too. They write to two channels that
nothing reads, so that no part of any block is silent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from labs.truth.circuit import Circuit
from labs.truth.program import Attended, Mapped, Share, Term, Value, Variable

Matrix: TypeAlias = NDArray[np.float64]

# How far a neuron is from its threshold, before the activation function: so far from
# it none leaks.
CLEAR = 30.0
# Scores are multiplied by this, so that the second best gets next to nothing.
SHARPNESS = 40.0
# The height of a step, far below CLEAR so that both its neurons are on or off.
STEP = 10.0


class Channels:
    """Where each variable lies among the channels.

    `constant` is the number that the last channel always has.
    """

    def __init__(self, circuit: Circuit, constant: float) -> None:
        self.constant = constant
        self._starts: dict[str, int] = {}
        count = 0
        for written in circuit.written:
            variable = written.variable
            self._starts[variable.name] = count
            count += 1 if variable.is_numeric else len(variable.values)
        self.idle_head, self.idle_neuron = count, count + 1
        self.count = count + 3

    def of(self, variable: Variable, value: Value) -> int:
        """Return the channel of a value, or that of a numeric variable."""
        start = self._starts[variable.name]
        if variable.is_numeric:
            return start
        return start + variable.values.index(value)

    def all_of(self, variable: Variable) -> list[int]:
        """Return the channels of a variable."""
        start = self._starts[variable.name]
        width = 1 if variable.is_numeric else len(variable.values)
        return list(range(start, start + width))

    def zeros(self) -> Matrix:
        """Return a row that reads nothing yet, or a column that writes nothing."""
        return np.zeros(self.count)

    def add_constant(self, row: Matrix, number: float) -> None:
        """Make a row read a constant."""
        row[-1] += number / self.constant


@dataclass(frozen=True)
class HeadUnit:
    """A head: what its queries, keys and values read, and what it writes.

    Rows of the first three read channels; columns of the last write them.
    """

    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix


@dataclass(frozen=True)
class NeuronUnits:
    """Neurons: the channels that they read, and those that they write."""

    reads: Matrix
    writes: Matrix


def head_unit(variable: Attended, channels: Channels) -> HeadUnit:
    """Build the head that gathers a variable."""
    queries, keys = _scores(variable.terms, channels)
    values, output = _gathered(variable, channels)
    return HeadUnit(queries, keys, values, output)


def idle_head(channels: Channels, terms: Sequence[Term] = ()) -> HeadUnit:
    """Build a head that always gathers the same, wherever it looks."""
    queries, keys = _scores(terms, channels)
    value, output = channels.zeros(), channels.zeros()
    channels.add_constant(value, 1.0)
    output[channels.idle_head] = 1
    return HeadUnit(queries, keys, value[None], output[:, None])


def _scores(terms: Sequence[Term], channels: Channels) -> tuple[Matrix, Matrix]:
    """Return what queries and keys read, a row for each value of each term's key."""
    queries, keys = [], []
    for term in terms:
        for key in term.key.values:
            key_row, query_row = channels.zeros(), channels.zeros()
            key_row[channels.of(term.key, key)] = 1
            if term.query is None:
                score = term.of(None, key)
                channels.add_constant(query_row, SHARPNESS * score)
            else:
                for query in term.query.values:
                    score = term.of(query, key)
                    query_row[channels.of(term.query, query)] = SHARPNESS * score
            queries.append(query_row)
            keys.append(key_row)
    if not queries:
        nothing = np.zeros((0, channels.count))
        return nothing, nothing
    return np.array(queries), np.array(keys)


def _gathered(variable: Attended, channels: Channels) -> tuple[Matrix, Matrix]:
    """Return what a head reads at the places it looks at, and where it writes that."""
    targets = channels.all_of(variable)
    values = np.zeros((len(targets), channels.count))
    output = np.zeros((channels.count, len(targets)))
    for row, target in enumerate(targets):
        output[target, row] = 1
    if isinstance(variable, Share):
        for value in variable.counted:
            values[0, channels.of(variable.source, value)] = 1
        return values, output
    for row, value in enumerate(variable.values):
        values[row, channels.of(variable.source, value)] = 1
    return values, output


def neuron_units(
    variable: Mapped, channels: Channels, activation: Callable[[float], float]
) -> NeuronUnits:
    """Build the neurons that compute a map."""
    if variable.inputs[0].is_numeric:
        return _steps(variable, channels)
    return _lookup(variable, channels, activation)


def _lookup(
    variable: Mapped, channels: Channels, activation: Callable[[float], float]
) -> NeuronUnits:
    """Give every combination of input values a neuron, which only that switches on."""
    reads, writes = [], []
    on = activation(CLEAR)
    for values in itertools.product(*(read.values for read in variable.inputs)):
        row, column = channels.zeros(), channels.zeros()
        for read, value in zip(variable.inputs, values, strict=True):
            row[channels.of(read, value)] += 2 * CLEAR
        # One missing input is enough to switch it off.
        channels.add_constant(row, -2 * CLEAR * (len(values) - 0.5))
        result = variable.function(*values)
        column[channels.of(variable, result)] = 1 / on
        reads.append(row)
        writes.append(column)
    return NeuronUnits(np.array(reads), np.array(writes).T)


def idle_neuron(
    channels: Channels, activation: Callable[[float], float]
) -> NeuronUnits:
    """Build a neuron that is always on."""
    row, column = channels.zeros(), channels.zeros()
    channels.add_constant(row, CLEAR)
    column[channels.idle_neuron] = 1 / activation(CLEAR)
    return NeuronUnits(row[None], column[:, None])


def _steps(variable: Mapped, channels: Channels) -> NeuronUnits:
    """Find out which of its values a number has, by steps between them.

    A step is the difference of two neurons, one of which is switched on a little later.
    """
    (number,) = variable.inputs
    levels = [float(value) for value in number.values]
    gap = min(np.diff(levels))
    slope = 2 * CLEAR / gap
    reads, writes = [], []
    results = [variable.function(value) for value in number.values]
    base = channels.zeros()
    base[channels.of(variable, results[0])] += 1
    for level in range(1, len(levels)):
        threshold = (levels[level - 1] + levels[level]) / 2
        column = channels.zeros()
        column[channels.of(variable, results[level])] += 1
        column[channels.of(variable, results[level - 1])] -= 1
        for delay, sign in ((0.0, 1.0), (STEP, -1.0)):
            row = channels.zeros()
            row[channels.of(number, None)] = slope
            channels.add_constant(row, -slope * threshold - delay)
            reads.append(row)
            writes.append(sign * column / STEP)
    # The lowest level is there until a step replaces it: two neurons that are always on.
    for delay, sign in ((0.0, 1.0), (STEP, -1.0)):
        row = channels.zeros()
        channels.add_constant(row, CLEAR - delay)
        reads.append(row)
        writes.append(sign * base / STEP)
    return NeuronUnits(np.array(reads), np.array(writes).T)


def joined(units: Sequence[NeuronUnits]) -> NeuronUnits:
    """Put the neurons of several variables side by side."""
    reads = np.concatenate([unit.reads for unit in units])
    writes = np.concatenate([unit.writes for unit in units], axis=1)
    return NeuronUnits(reads, writes)

"""The edges of a circuit: which part reads a variable from which, and what that does.

A part reads by the queries, keys and values of a head, by an MLP, or by the logits. They
are named as `hs.edges` names them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from labs.truth.circuit import Circuit
from labs.truth.program import Attended, Forced, Mapped, Term, Trace, Variable

LOGITS = "logits"


class Edge(NamedTuple):
    """A part that writes, and one that reads what it wrote."""

    writer: str
    reader: str


def declared_edges(circuit: Circuit) -> dict[Edge, list[str]]:
    """Return every edge of a circuit, with the variables that are read through it."""
    edges: dict[Edge, list[str]] = {}
    for written in circuit.written:
        for reader, read in _reads(circuit, written.variable):
            variables = edges.setdefault(Edge(writer_of(circuit, read), reader), [])
            if read.name not in variables:
                variables.append(read.name)
    output = circuit.program.output
    edges[Edge(writer_of(circuit, output), LOGITS)] = [output.name]
    return edges


def with_edge(circuit: Circuit, edge: Edge, tokens: list[str], donor: Trace) -> Trace:
    """Run the program with what one part reads from one other from another run.

    It fails with a ValueError where the program does not say what comes of it: where a
    head would copy two values at once.
    """
    if edge.reader == LOGITS:
        # Nothing else is read from the writer, and nothing comes after the logits.
        return donor
    exchanged = _Exchanged(circuit, edge)
    program = replace(circuit.program, output=exchanged.of(circuit.program.output))
    forced: dict[tuple[str, int], object] = {}
    for leaf, name in exchanged.leaves.items():
        for place, value in enumerate(donor[name]):
            forced[leaf, place] = value
    values: Forced = forced
    return program.run(tokens, values)


def writer_of(circuit: Circuit, variable: Variable) -> str:
    """Return the part that writes a variable."""
    writer = circuit.place(variable.name).writer
    return "layer.0" if writer == "embeddings" else writer


def reader_of(circuit: Circuit, variable: Variable, operand: str) -> str:
    """Return the part that reads for a variable: an operand of its head, or an MLP."""
    place = circuit.place(variable.name)
    layer = f"layer.{place.block + 1}"
    if place.head is None:
        return f"{layer}.mlp"
    return f"{layer}.attn.{operand}.{place.head}"


def _reads(circuit: Circuit, variable: Variable) -> Iterator[tuple[str, Variable]]:
    """Yield what a variable is computed from, each with the part that reads it."""
    if isinstance(variable, Mapped):
        for read in variable.inputs:
            yield reader_of(circuit, variable, "mlp"), read
    elif isinstance(variable, Attended):
        for term in variable.terms:
            if term.query is not None:
                yield reader_of(circuit, variable, "q"), term.query
            yield reader_of(circuit, variable, "k"), term.key
        yield reader_of(circuit, variable, "v"), variable.source


class _Exchanged:
    """Rebuilds a graph of variables in which one edge reads leaves of its own.

    `leaves` has the name of the variable that each of them stands for.
    """

    def __init__(self, circuit: Circuit, edge: Edge) -> None:
        self.circuit = circuit
        self.edge = edge
        self.leaves: dict[str, str] = {}
        self.done: dict[Variable, Variable] = {}

    def of(self, variable: Variable) -> Variable:
        """Return a variable with everything below it rebuilt."""
        if variable not in self.done:
            self.done[variable] = self._rebuilt(variable)
        return self.done[variable]

    def _rebuilt(self, variable: Variable) -> Variable:
        if isinstance(variable, Mapped):
            inputs = [self._read(variable, "mlp", read) for read in variable.inputs]
            return replace(variable, inputs=tuple(inputs))
        if not isinstance(variable, Attended):
            return variable
        terms = []
        for term in variable.terms:
            query = None
            if term.query is not None:
                query = self._read(variable, "q", term.query)
            key = self._read(variable, "k", term.key)
            terms.append(Term(key, term.score, query))
        source = self._read(variable, "v", variable.source)
        return replace(variable, source=source, terms=tuple(terms))

    def _read(self, variable: Variable, operand: str, read: Variable) -> Variable:
        """Return what is read: a leaf if it is read through the edge."""
        writer = writer_of(self.circuit, read)
        reader = reader_of(self.circuit, variable, operand)
        if self.edge != (writer, reader):
            return self.of(read)
        leaf = Variable(f"{read.name} of the other run", read.values)
        self.leaves[leaf.name] = read.name
        return leaf

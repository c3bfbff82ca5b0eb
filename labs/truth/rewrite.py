"""Programs for hosts that lack something: positions, or a mask that hides the future."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from labs.truth.program import (
    Attended,
    Mapped,
    Positions,
    Program,
    Term,
    Variable,
    count,
)

# Lower than any sum of other scores.
HIDDEN = -1000.0


def with_counted_positions(program: Program) -> Program:
    """Return a program that counts its positions, for a host that adds none."""
    counted = count("position", program.tokens, program.longest, lambda _, token: True)
    exchanged: dict[Variable, Variable] = {}
    for variable in program.variables:
        if isinstance(variable, Positions):
            exchanged[variable] = counted
    return replace(program, output=_Rewriter(exchanged).of(program.output))


def with_hidden_future(program: Program) -> tuple[Program, Term]:
    """Return a program whose heads look back by their scores, for a host without mask.

    The term that makes them look back is returned too, for heads beyond the program.
    """
    position: Variable = Positions("position", tuple(range(program.longest)))
    for variable in program.variables:
        if isinstance(variable, Positions):
            position = variable

    def looks_back(mine: int, other: int) -> float:
        return 0.0 if other <= mine else HIDDEN

    term = Term(position, looks_back, position)
    output = _Rewriter({}, (term,)).of(program.output)
    return replace(program, output=output), term


class _Rewriter:
    """Rebuilds a graph of variables with some of them exchanged, or with more terms."""

    def __init__(
        self, exchanged: Mapping[Variable, Variable], terms: tuple[Term, ...] = ()
    ) -> None:
        self.terms = terms
        self.done = dict(exchanged)

    def of(self, variable: Variable) -> Variable:
        """Return a variable with everything below it rebuilt."""
        if variable not in self.done:
            self.done[variable] = self._rebuilt(variable)
        return self.done[variable]

    def _rebuilt(self, variable: Variable) -> Variable:
        if isinstance(variable, Mapped):
            return replace(variable, inputs=tuple(map(self.of, variable.inputs)))
        if not isinstance(variable, Attended):
            return variable
        terms = []
        for term in variable.terms:
            query = None if term.query is None else self.of(term.query)
            terms.append(Term(self.of(term.key), term.score, query))
        source = self.of(variable.source)
        return replace(variable, source=source, terms=(*terms, *self.terms))

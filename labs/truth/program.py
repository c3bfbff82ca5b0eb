"""A small language of programs that a transformer can run.

A program is a graph of variables. Each has a value at every position of a sequence, out
of a short list of values. The inputs are the tokens and the positions; every other
variable is a map of variables at the same position, or is gathered by attention from
positions before it. Position 0 holds the start token.

This follows RASP (Weiss et al., 2021), with the one difference that every variable is
finite, so that each has a place in a residual stream.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

Value: TypeAlias = Any
START, ASK = "<s>", "?"

Forced: TypeAlias = Mapping[tuple[str, int], Value]
"""Values that are put in the place of computed ones, by variable and position."""

Trace: TypeAlias = dict[str, list[Value]]
"""The value of every variable at every position."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable: its name, and the values that it can have.

    A numeric one is a single number in the residual stream; the others have a direction
    for each of their values.
    """

    name: str
    values: tuple[Value, ...]

    is_numeric = False

    @property
    def reads(self) -> tuple[Variable, ...]:
        """Return the variables that it is computed from."""
        return ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {len(self.values)} values)"


class Tokens(Variable):
    """The tokens themselves."""


class Positions(Variable):
    """The positions, from 0 at the start token."""


@dataclass(frozen=True, eq=False, repr=False)
class Mapped(Variable):
    """A function of one or two variables at the same position."""

    function: Callable[..., Value]
    inputs: tuple[Variable, ...]

    @property
    def reads(self) -> tuple[Variable, ...]:
        """Return the inputs of the function."""
        return self.inputs


@dataclass(frozen=True)
class Term:
    """One part of a score: that of a key's value for a query's value.

    Without a query it is the same for all of them.
    """

    key: Variable
    score: Callable[..., float]
    query: Variable | None = None

    def of(self, query: Value, key: Value) -> float:
        """Return the score of one pair of values."""
        if self.query is None:
            return float(self.score(key))
        return float(self.score(query, key))


@dataclass(frozen=True, eq=False, repr=False)
class Attended(Variable):
    """A variable that attention gathers from the positions of the highest score.

    The score of a position is the sum of the terms; without terms all score the same.
    """

    source: Variable
    terms: tuple[Term, ...]

    @property
    def reads(self) -> tuple[Variable, ...]:
        """Return what decides where it looks, and what it gathers there."""
        read: dict[Variable, None] = {}
        for term in self.terms:
            if term.query is not None:
                read[term.query] = None
            read[term.key] = None
        read[self.source] = None
        return tuple(read)

    def attended(self, trace: Trace, position: int) -> list[int]:
        """Return the positions that one looks at: the best of those up to itself."""
        scores = []
        for other in range(position + 1):
            score = 0.0
            for term in self.terms:
                query = None
                if term.query is not None:
                    query = trace[term.query.name][position]
                score += term.of(query, trace[term.key.name][other])
            scores.append(score)
        best = max(scores)
        return [other for other, score in enumerate(scores) if score == best]


@dataclass(frozen=True, eq=False, repr=False)
class Copied(Attended):
    """The value that the source has at the attended positions, which must agree."""


@dataclass(frozen=True, eq=False, repr=False)
class Share(Attended):
    """The share of the attended positions at which the source has one of some values.

    It is a number, and `values` are all that can come out.
    """

    counted: frozenset[Value] = field(default_factory=frozenset)

    is_numeric = True


def mapped(name: str, function: Callable[..., Value], *inputs: Variable) -> Mapped:
    """Make a variable of a function, with every value that it can return."""
    returned: dict[Value, None] = {}
    for values in itertools.product(*(variable.values for variable in inputs)):
        returned[function(*values)] = None
    return Mapped(name, tuple(sorted(returned, key=_order)), function, inputs)


def copied(name: str, source: Variable, *terms: Term) -> Copied:
    """Make a variable that attention copies from another position."""
    return Copied(name, source.values, source, terms)


def share(
    name: str, source: Variable, counted: Sequence[Value], longest: int, *terms: Term
) -> Share:
    """Make a variable of how large a share of the attended positions is counted.

    `longest` is the largest number of positions, the start token included.
    """
    shares = set()
    for total in range(1, longest + 1):
        for hits in range(total + 1):
            shares.add(Fraction(hits, total))
    return Share(name, tuple(sorted(shares)), source, terms, frozenset(counted))


def count(
    name: str,
    tokens: Tokens,
    longest: int,
    is_counted: Callable[[Value, Value], bool],
    query: Variable | None = None,
) -> Mapped:
    """Make a variable of how many tokens so far are counted, for a query's value.

    Attention averages, and so cannot count. But the start token is always attended, so
    that its share is 1 / (1 + count).
    """

    def score(value: Value, token: Value) -> float:
        return 0.0 if token == START or is_counted(value, token) else -1.0

    term = Term(tokens, score, query)
    if query is None:
        term = Term(tokens, lambda token: score(None, token))
    shares = tuple(Fraction(1, 1 + total) for total in range(longest - 1, -1, -1))
    start_share = Share(f"{name}_share", shares, tokens, (term,), frozenset([START]))
    return mapped(name, lambda fraction: int(1 / fraction) - 1, start_share)


@dataclass(frozen=True)
class Program:
    """A program: its variables, and what it does.

    `output` is what the model predicts at each position that answers. `lengths` are
    those of the inputs, without the start token. An input is a sequence of `letters`;
    where the program `asks`, a question mark for each letter follows, and only they answer.
    `tolerance` is how far a logit of a compiled model may be off, where the right
    token's is 10 and the others' are 0.
    """

    name: str
    task: str
    tokens: Tokens
    output: Variable
    letters: tuple[str, ...]
    lengths: range
    tolerance: float
    asks: bool = False

    @property
    def longest(self) -> int:
        """Return the largest number of positions, with the start token."""
        return longest_input(self.lengths, self.asks)

    @property
    def vocabulary(self) -> list[str]:
        """Return every token: those that are read, then those that are only written."""
        written = [str(value) for value in self.output.values]
        return list(dict.fromkeys([*self.tokens.values, *written]))

    def answers(self, tokens: Sequence[str]) -> list[int]:
        """Return the positions that answer."""
        if not self.asks:
            return list(range(1, len(tokens)))
        return [place for place, token in enumerate(tokens) if token == ASK]

    def count_inputs(self) -> int:
        """Return how many inputs there are."""
        return sum(len(self.letters) ** length for length in self.lengths)

    def every_input(self) -> Iterator[list[str]]:
        """Yield every input."""
        for length in self.lengths:
            for letters in itertools.product(self.letters, repeat=length):
                yield self.input_of(letters)

    def draw(self, count: int, seed: int = 0) -> list[list[str]]:
        """Draw random inputs of all lengths."""
        chance = random.Random(seed)
        drawn = []
        for _ in range(count):
            length = chance.choice(self.lengths)
            drawn.append(self.input_of(chance.choices(self.letters, k=length)))
        return drawn

    def input_of(self, letters: Sequence[str]) -> list[str]:
        """Return the input of some letters."""
        questions = [ASK] * len(letters) if self.asks else []
        return [START, *letters, *questions]

    @cached_property
    def variables(self) -> list[Variable]:
        """Return all variables that the output depends on, inputs first."""
        ordered: dict[Variable, None] = {}
        _visit(self.output, ordered)
        return list(ordered)

    def run(self, tokens: Sequence[str], forced: Forced | None = None) -> Trace:
        """Compute every variable at every position.

        `forced` values replace computed ones, and what depends on them follows.
        """
        forced = forced or {}
        trace: Trace = {}
        for variable in self.variables:
            values: list[Value] = []
            for position in range(len(tokens)):
                value = forced.get((variable.name, position), _UNFORCED)
                if value is _UNFORCED:
                    value = _compute(variable, trace, tokens, position)
                values.append(value)
            trace[variable.name] = values
        return trace


_UNFORCED = object()


def longest_input(lengths: range, asks: bool) -> int:
    """Return the largest number of positions of inputs of some lengths."""
    letters = max(lengths)
    return 1 + letters + letters * asks


def _visit(variable: Variable, ordered: dict[Variable, None]) -> None:
    for read in variable.reads:
        _visit(read, ordered)
    ordered.setdefault(variable)


def _compute(
    variable: Variable, trace: Trace, tokens: Sequence[str], position: int
) -> Value:
    if isinstance(variable, Tokens):
        return tokens[position]
    if isinstance(variable, Positions):
        return position
    if isinstance(variable, Mapped):
        inputs = [trace[read.name][position] for read in variable.inputs]
        return variable.function(*inputs)
    assert isinstance(variable, Attended)
    places = variable.attended(trace, position)
    gathered = [trace[variable.source.name][place] for place in places]
    if isinstance(variable, Share):
        hits = sum(value in variable.counted for value in gathered)
        return Fraction(hits, len(gathered))
    if len(set(gathered)) > 1:
        raise ValueError(f"{variable.name} finds {len(set(gathered))} values at once")
    return gathered[0]


def _order(value: Value) -> tuple[str, Value]:
    return type(value).__name__, value

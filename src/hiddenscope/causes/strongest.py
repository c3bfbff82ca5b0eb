"""The strongest edges of a result, as reports list them and stories show them."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hiddenscope.results import frozen
from hiddenscope.results.dataset import Attributes
from hiddenscope.results.pictures import Graph
from hiddenscope.results.sentences import counted
from hiddenscope.results.story import Table
from hiddenscope.states.arrays import Floats, Ints

if TYPE_CHECKING:
    import xarray

SHARE: Attributes = {"units": "share of the logit difference", "meaning": "diverging"}
MOST, MOST_PRINTED = 40, 20
OPERANDS = ("q", "k", "v")


@frozen
class StrongEdge:
    """An edge, its effect, and the exact one where it was computed."""

    writer: str
    reader: str
    effect: float
    exact: float | None = None

    @property
    def best(self) -> float:
        """Return the exact effect, or else the estimate."""
        return self.effect if self.exact is None else self.exact


def preferring_other(clean: Sequence[float]) -> list[str]:
    """Return a note where a model prefers the other answer after clean prompts."""
    wrong = sum(difference < 0 for difference in clean)
    if not wrong:
        return []
    pairs = counted(len(clean), "pair")
    return [
        f"In {wrong:,} of {pairs} the model gives the clean prompt the other answer."
    ]


def largest(effects: Floats, most: int) -> Ints:
    """Return the edges with the largest effects [edge, (writer, reader)], in order."""
    sizes = np.nan_to_num(np.abs(effects))
    order = np.argsort(-sizes, axis=None, kind="stable")[:most]
    edges = np.stack(np.unravel_index(order, effects.shape), axis=1)
    return edges[sizes.flat[order] > 0]


def strongest_edges(data: "xarray.Dataset") -> list[StrongEdge]:
    """Return the strongest edges, by their exact effects where these are known."""
    best = data["effect"].values
    if "exact" in data:
        exact = data["exact"].values
        best = np.where(np.isnan(exact), best, exact)
    return edges_at(data, largest(best, MOST))


def edges_at(data: "xarray.Dataset", places: Ints) -> list[StrongEdge]:
    """Return edges [edge, (writer, reader)] of a result."""
    effects = data["effect"].values
    exactly = np.full_like(effects, np.nan)
    if "exact" in data:
        exactly = data["exact"].values
    listed = []
    for writer, reader in places:
        value = float(exactly[writer, reader])
        listed.append(
            StrongEdge(
                writer=str(data["writer"].values[writer]),
                reader=str(data["reader"].values[reader]),
                effect=float(effects[writer, reader]),
                exact=None if np.isnan(value) else value,
            )
        )
    return listed


def table(edges: Sequence[StrongEdge], title: str) -> Table:
    """Return the strongest edges as a table of a terminal; pages have the graph's."""
    rows = []
    for edge in edges[:MOST_PRINTED]:
        cells = [edge.writer, edge.reader, f"{edge.effect:.3f}"]
        if edge.exact is not None:
            cells.append(f"{edge.exact:.3f}")
        rows.append(cells)
    columns = ["writer", "reader", "effect", "exact"]
    most = max(map(len, rows), default=len(columns))
    padded = [[*cells, *[""] * (most - len(cells))] for cells in rows]
    return Table(columns[:most], padded, (0, 1), title)


def graph(title: str, edges: Sequence[StrongEdge], data: "xarray.Dataset") -> Graph:
    """Draw the strongest edges between the parts of the model."""
    readers = Counter(reader.rpartition(".")[0] for reader in data["reader"].values)
    drawn = []
    for edge in edges:
        part, _, number = edge.reader.rpartition(".")
        block, _, kind = part.rpartition(".")
        if kind not in OPERANDS:
            drawn.append((edge.writer, edge.reader, "", edge.effect))
        elif readers[part] == readers[f"{block}.q"]:
            head = f"{block}.head.{number}"
            drawn.append((edge.writer, head, kind, edge.effect))
        else:
            # Keys and values that several heads share are a part of their own.
            drawn.append((edge.writer, part, f"{kind} {number}", edge.effect))
    exact = np.array([edge.exact for edge in edges], dtype=float)
    possible = int(np.isfinite(data["effect"].values).sum())
    note = f"The {len(edges)} strongest of {possible:,} edges."
    unit = SHARE["units"]
    return Graph.of(title, drawn, unit=unit, note=note, exact=exact)

"""Which part reads what from which: path patching with plain hooks.

A reader is computed in a pass in which what it takes from the stream is forced. What it
made of that is then put into another pass: its queries, keys or values where they are
projected, or what its MLP adds.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.oracles.plain import NoTable, Pair, Plain, repeated

Edge = tuple[int, int]
STEPS = 5


class Wiring:
    """The writers and readers of a model, by their names."""

    def __init__(self, plain: Plain, writers: Sequence[str], readers: Sequence[str]):
        if len(plain.shapes) > 1 or plain.shapes[0].kind in ("post-norm", "mixer"):
            raise NoTable("edges are those of one stack that its parts sum up to")
        self.plain = plain
        self.shape = plain.shapes[0]
        self.writers = list(writers)
        self.readers = list(readers)
        # Neurons are shares of what their MLP writes.
        self.parts = [name for name in writers if ".neuron." not in name]

    @cached_property
    def possible(self) -> np.ndarray:
        """Tell which reader comes after which writer."""
        possible = np.zeros((len(self.writers), len(self.readers)), dtype=bool)
        for row, writer in enumerate(self.writers):
            for column, reader in enumerate(self.readers):
                possible[row, column] = self.comes_after(reader, writer)
        return possible

    def comes_after(self, reader: str, writer: str) -> bool:
        """Tell whether a reader can read a writer."""
        if reader == "logits":
            return True
        above, below = layer_of(reader), layer_of(writer)
        if above != below:
            return above > below
        attention_first = self.shape.kind != "parallel" and ".attn." in writer
        return attention_first and reader.endswith(".mlp")

    def edges_into(self, layer: int) -> list[Edge]:
        """Return the edges whose readers are in a layer, or those of the logits."""
        edges = []
        for row, column in np.argwhere(self.possible).tolist():
            name = self.readers[column]
            last = layer == self.plain.depth + 1 and name == "logits"
            if last or (name != "logits" and layer_of(name) == layer):
                edges.append((row, column))
        return edges

    def written(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return what every part writes [writer, token, width]."""
        states = self.plain.run(inputs, self.writers)[1]
        return torch.stack([states[name][0] for name in self.writers])

    def columns(self, reader: str) -> tuple[str, Tensor]:
        """Return where the queries, keys or values of a reader are made."""
        layer, _, rest = reader.partition(".attn.")
        kind, head = rest.split(".")
        place = self.plain.columns(self.shape, kind, int(head))
        return f"{layer}.attn.{kind}", place


def layer_of(name: str) -> int:
    """Return the layer that a name is of."""
    return int(name.split(".")[1])


class Patched:
    """Two runs, and what comes of single edges that carry what the other wrote."""

    def __init__(self, wiring: Wiring, pair: Pair, into: str) -> None:
        self.wiring = wiring
        self.plain = wiring.plain
        self.pair = pair
        sides = [pair.clean, pair.corrupt]
        self.base, self.other = sides if into == "clean" else sides[::-1]
        self.away = wiring.written(self.other) - wiring.written(self.base)
        logits = self.plain.run(self.base)[0]
        self.start = float(self.difference(logits)[0])
        end = float(self.difference(self.plain.run(self.other)[0])[0])
        self.span = end - self.start

    def difference(self, logits: Tensor) -> Tensor:
        """Return the answer's logit less the other's [row]."""
        return self.pair.difference(logits, 0)

    def exact(self) -> np.ndarray:
        """Return the effect of every edge, each by a run of its own."""
        effects = np.full(self.wiring.possible.shape, np.nan)
        for layer in range(1, self.plain.depth + 2):
            edges = self.wiring.edges_into(layer)
            logits, _ = self._run(layer, edges, [])
            found = (self.difference(logits) - self.start) / self.span
            for edge, effect in zip(edges, found.tolist(), strict=True):
                effects[edge] = effect
        return effects

    def estimated(self, gradients: str) -> np.ndarray:
        """Return estimates: what the reader makes of a change, times the gradient."""
        wiring, plain = self.wiring, self.plain
        effects = self._into_logits()
        slopes = self._slopes(gradients)
        span = abs(self.span) if gradients == "dropped" else self.span
        for layer in range(1, plain.depth + 1):
            edges = wiring.edges_into(layer)
            z, inner = f"layer.{layer}.attn.z", f"layer.{layer}.mlp.input"
            before = plain.run(self.base, [z, inner])[1]
            _, states = self._run(layer, edges, [z, inner])
            for row, edge in enumerate(edges):
                reader = wiring.readers[edge[1]]
                place = inner if reader.endswith(".mlp") else z
                away = states[place][row] - before[place][0]
                products = [float((away * slope).sum()) for slope in slopes[place]]
                effect = float(np.mean(products))
                if gradients == "dropped":
                    effect = float(np.abs(products).sum()) / max(1, len(products) - 1)
                effects[edge] = effect / span
        return effects

    def _into_logits(self) -> np.ndarray:
        effects = np.full(self.wiring.possible.shape, np.nan)
        edges = self.wiring.edges_into(self.plain.depth + 1)
        logits, _ = self._run(self.plain.depth + 1, edges, [])
        found = (self.difference(logits) - self.start) / self.span
        for edge, effect in zip(edges, found.tolist(), strict=True):
            effects[edge] = effect
        return effects

    def _run(
        self, layer: int, edges: Sequence[Edge], record: Sequence[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the text with one changed edge in each row."""
        plain, wiring = self.plain, self.wiring
        rows = repeated(self.base, len(edges))
        away = self.away[[writer for writer, _ in edges]]
        if layer == plain.depth + 1:
            return plain.run(rows, record, {f"layer.{plain.depth}": lambda x: x + away})
        attn, mlp = f"layer.{layer}.attn", f"layer.{layer}.mlp"
        kinds = [f"{attn}.{kind}" for kind in "qkv"]
        read_inner = f"{mlp}.input"
        by_heads = plain.run(rows, kinds, {f"{attn}.in": lambda x: x + away})[1]
        by_mlp = plain.run(rows, [mlp, read_inner], {f"{mlp}.in": lambda x: x + away})[
            1
        ]
        changes: dict[str, Callable[[Tensor], Tensor]] = {}
        for kind in kinds:
            changes[kind] = _Replace([], by_heads[kind])
        changes[mlp] = _Replace([], by_mlp[mlp])
        for row, (_, column) in enumerate(edges):
            reader = wiring.readers[column]
            if reader.endswith(".mlp"):
                changes[mlp].places.append((row, slice(None)))
                continue
            kind, columns = wiring.columns(reader)
            changes[kind].places.append((row, columns))
        logits, states = plain.run(rows, record, changes)
        if read_inner in record:
            # What the MLP takes in where it reads the change.
            states[read_inner] = by_mlp[read_inner]
        return logits, states

    def _slopes(self, gradients: str) -> dict[str, list[Tensor]]:
        """Return the gradients of the logit difference, where readers give."""
        plain = self.plain
        first = plain.run(self.base, ["layer.0"])[1]["layer.0"]
        last = plain.run(self.other, ["layer.0"])[1]["layer.0"]
        shares = [0.0]
        if gradients == "integrated":
            shares = [step / STEPS for step in range(STEPS)]
        cuts: list[int | None] = [None]
        if gradients == "dropped" and plain.depth > 1:
            cuts = [*range(1, plain.depth + 1)]
        places = []
        for layer in range(1, plain.depth + 1):
            places += [f"layer.{layer}.attn.z", f"layer.{layer}.mlp.input"]
        slopes: dict[str, list[Tensor]] = {place: [] for place in places}
        for share in shares:
            for cut in cuts:
                start = first + share * (last - first)
                for place in places:
                    slopes[place].append(self._slope(place, start, cut))
        return slopes

    def _slope(self, place: str, start: Tensor, cut: int | None) -> Tensor:
        """Return the gradient at one place, in a run that starts with a state.

        No gradient flows through what the block `cut` adds.
        """
        leaves: list[Tensor] = []
        entered: list[Tensor] = []

        def leaf(state: Tensor) -> Tensor:
            # Where several modules take the same state, one leaf stands for it.
            if not leaves:
                leaves.append(state.detach().clone().requires_grad_())
            return leaves[0]

        def enter(state: Tensor) -> Tensor:
            entered[:] = [state]
            return state

        def leave(state: Tensor) -> Tensor:
            return entered[0] + (state - entered[0]).detach()

        changes: dict[str, Callable[[Tensor], Tensor]] = {"layer.0": lambda _: start}
        if cut is not None:
            if cut == 1:
                changes["layer.0"] = lambda _: enter(start)
            else:
                changes[f"layer.{cut - 1}"] = enter
            changes[f"layer.{cut}"] = leave
        changes[place] = leaf
        if cut is not None and cut < self.plain.depth:
            # The next block enters with what leaves this one.
            changes = {**changes}
        logits, _ = self.plain.run(self.base, (), changes, grad=True)
        total = self.difference(logits).sum()
        if not total.requires_grad:
            return torch.zeros_like(leaves[0])[0]
        (slope,) = torch.autograd.grad(total, leaves[0], allow_unused=True)
        return (torch.zeros_like(leaves[0]) if slope is None else slope)[0]


class _Replace:
    """Put some columns of some rows in the place of what is there."""

    def __init__(self, places: list[Any], values: Tensor) -> None:
        self.places = places
        self.values = values

    def __call__(self, state: Tensor) -> Tensor:
        state = state.clone()
        for row, columns in self.places:
            state[row][:, columns] = self.values[row][:, columns]
        return state


def rewired(
    wiring: Wiring, inputs: Mapping[str, Any], ablated: Tensor, kept: np.ndarray
) -> Tensor:
    """Return the logits of runs in which only some edges are kept [row].

    `kept` is [row, writer, reader]. All other edges carry what is `ablated`
    [writer, token, width].
    """
    plain = wiring.plain
    rows = repeated(inputs, len(kept))
    known = torch.as_tensor(kept & wiring.possible).double()
    cut = torch.as_tensor(~kept & wiring.possible).double()
    writers = {name: row for row, name in enumerate(wiring.writers)}
    written = torch.zeros(len(kept), *ablated.shape, dtype=torch.float64)
    start = plain.run(inputs, ["layer.0"])[1]["layer.0"]
    written[:, writers["layer.0"]] = start
    rest = torch.zeros_like(written[:, 0])

    def reads(column: int) -> Tensor:
        kept_part = torch.einsum("nw,nwtd->ntd", known[:, :, column], written)
        return (
            rest + kept_part + torch.einsum("nw,wtd->ntd", cut[:, :, column], ablated)
        )

    for layer in range(1, plain.depth + 1):
        attn, mlp = f"layer.{layer}.attn", f"layer.{layer}.mlp"
        below = rest.clone()
        changes: dict[str, Any] = {}
        for column, reader in enumerate(wiring.readers):
            if not reader.startswith(f"{attn}."):
                continue
            kind, columns = wiring.columns(reader)
            stream = reads(column)
            made = plain.run(rows, [kind], {f"{attn}.in": lambda _, s=stream: s})[1]
            change = changes.setdefault(kind, _Columns())
            change.parts.append((columns, made[kind]))
        heads = [name for name in writers if name.startswith(f"{attn}.head.")]
        states = plain.run(rows, [attn, *heads], changes)[1]
        bias = states[attn]
        for head in heads:
            written[:, writers[head]] = states[head]
            bias = bias - states[head]
        # An MLP beside attention does not read its bias.
        if wiring.shape.kind != "parallel":
            below = rest + bias
        after, rest = rest + bias, below
        stream = reads(wiring.readers.index(mlp))
        made = plain.run(rows, [mlp], {f"{mlp}.in": lambda _, s=stream: s})[1]
        written[:, writers[mlp]] = made[mlp]
        rest = after
    stream = reads(wiring.readers.index("logits"))
    return plain.run(rows, (), {f"layer.{plain.depth}": lambda _: stream})[0]


class _Columns:
    """Put other columns in the place of what is there, in all rows."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, Tensor]] = []

    def __call__(self, state: Tensor) -> Tensor:
        state = state.clone()
        for columns, values in self.parts:
            state[..., columns] = values[..., columns]
        return state

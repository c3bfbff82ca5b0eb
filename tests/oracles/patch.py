"""What patched states restore: one pass for each cell, one gradient for each site."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from tests.oracles.plain import (
    NoTable,
    Pair,
    Plain,
    error_of_mean,
    groups_of,
    pairs_of,
)

ABLATIONS = ("zero", "mean", "resample")


def patch(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return the effects and their standard errors, without intervals."""
    plain = Plain(model.module)
    pairs = pairs_of(model, asked["contrasts"])
    patching = _Patching(plain, asked, result)
    patching.find_means(pairs)
    of_pairs = [patching.numbers(pair) for pair in pairs]
    groups = groups_of(pairs)
    numbers = {}
    for name in of_pairs[0]:
        rows = np.array([one[name] for one in of_pairs])
        numbers[name] = rows.mean(0)
        error = error_of_mean(rows, groups)
        if error is not None:
            numbers[f"{name}_error"] = error
    return numbers


class _Patching:
    def __init__(
        self, plain: Plain, asked: Mapping[str, Any], result: hs.Result
    ) -> None:
        self.plain = plain
        self.data = result.data
        self.sites = [str(site) for site in result.data["site"].values]
        self.method = asked.get("method", "exact")
        self.into = asked.get("into", "corrupt")
        if self.method in ABLATIONS:
            self.into = "clean"
        self.window = asked.get("window")
        self.together = "token" not in self.data.dims
        self.layers = asked.get("layers")
        if self.layers is None:
            self.layers = max(1, plain.depth // 6)
        self.means: dict[str, Tensor] = {}

    def find_means(self, pairs: Sequence[Pair]) -> None:
        """Find the mean state of each site, over all tokens of all prompts."""
        if self.method != "mean":
            return
        for site in self.sites:
            place, _ = self.place(site)
            rows = []
            for pair in pairs:
                for side in (pair.clean, pair.corrupt):
                    rows.append(self.plain.run(side, [place])[1][place][0])
            self.means[place] = torch.cat(rows).mean(0)

    def place(self, site: str) -> tuple[str, slice]:
        """Return where the state of a site is put, and in which of its columns."""
        for ending, whole in ((".head.", ".z"), (".neuron.", ".neurons")):
            if ending in site:
                before, _, number = site.partition(ending)
                size = 1
                if whole == ".z":
                    shape, _ = self.plain.stack(site)
                    block = self.plain.blocks(shape)[0]
                    weight: Any = block.get_submodule(shape.out).weight
                    width = weight.numel() // self.plain.config.hidden_size
                    size = width // self.plain.heads(shape)[0]
                columns = slice(int(number) * size, (int(number) + 1) * size)
                return before + whole, columns
        return site, slice(None)

    def columns(self, site: str, pair: Pair) -> list[tuple[int, int]]:
        """Return the positions (clean, corrupt) of each column of tokens; -1: a gap."""
        encoder = site.startswith("encoder.")
        name = "input_ids"
        if len(self.plain.shapes) == 2 and not encoder:
            name = "decoder_input_ids"
        lengths = [len(side[name][0]) for side in (pair.clean, pair.corrupt)]
        if lengths[0] == lengths[1]:
            return [(place, place) for place in range(lengths[0])]
        if self.together:
            raise NoTable("no alignment of tokens that are patched together")
        kept = np.ones(self.data.sizes["token"], bool)
        if "stack" in self.data.coords:
            kept = self.data["stack"].values == ("encoder" if encoder else "decoder")
        sides = [
            self.data[name].values[kept] for name in ("position", "other_position")
        ]
        return [(int(a), int(b)) for a, b in zip(*sides, strict=True)]

    def numbers(self, pair: Pair) -> dict[str, np.ndarray]:
        """Return the numbers of one pair of prompts."""
        plain, side = self.plain, 0 if self.into == "clean" else 1
        base_in, source_in = (pair.clean, pair.corrupt)[:: -1 if side else 1]
        places = [self.place(site)[0] for site in self.sites]
        base_logits, base = plain.run(base_in, places)
        source_logits, source = plain.run(source_in, places)
        start = pair.difference(base_logits[0], side)
        span = pair.difference(source_logits[0], 1 - side) - start
        clean = (source_logits if side else base_logits)[0, pair.at[0]].log_softmax(-1)

        def put(changes: list[tuple[str, list[int]]]) -> Any:
            made = {}
            for site, columns in changes:
                made |= self.change(site, columns, pair, base, source)
            return made

        def measure(changes: Any) -> tuple[float, float, float]:
            logits = plain.run(base_in, (), changes)[0][0]
            log = logits[pair.at[side]].log_softmax(-1)
            effect = (pair.difference(logits, side) - start) / span
            kl = (clean.exp() * (clean - log)).sum()
            return float(effect), float(log[pair.answer].exp()), float(kl)

        shape = [len(self.sites)]
        if not self.together:
            shape.append(self.data.sizes["token"])
        numbers = {
            name: np.full(shape, np.nan)
            for name in ("effect", "probability", "kl", "attribution")
        }
        for cell, site, columns in self.cells(pair):
            if self.method != "attribution":
                values = measure(put([(site, columns)]))
                for name, value in zip(numbers, values, strict=False):
                    numbers[name][cell] = value
            if self.method in ("attribution", "both"):
                made = self.change(site, columns, pair, base, source)
                numbers["attribution"][cell] = self.estimate(
                    base_in, made, base, lambda x: pair.difference(x[0], side)
                ) / float(span)
        kept = {name: numbers[name] for name in numbers if name in self.data}
        return kept | self.swaps(pair, side, put, measure, base)

    def cells(self, pair: Pair) -> Iterator[tuple[tuple[int, ...], str, list[int]]]:
        """Yield each cell, with its site and the columns that are patched at once."""
        for row, site in enumerate(self.sites):
            columns = self.columns(site, pair)
            if self.together:
                chosen = [*range(len(columns))]
                if self.window is not None and not isinstance(self.window, int):
                    length = len(columns)
                    chosen = [place % length for place in self.window]
                yield (row,), site, chosen
                continue
            first = 0
            if "stack" in self.data.coords and not site.startswith("encoder."):
                first = int((self.data["stack"].values == "encoder").sum())
            for column in range(len(columns)):
                window = [
                    *range(column, min(len(columns), column + (self.window or 1)))
                ]
                paired = [place for place in window if -1 not in columns[place]]
                if paired or (self.method in ("zero", "mean") and window):
                    yield (row, first + column), site, window

    def change(
        self,
        site: str,
        columns: list[int],
        pair: Pair,
        base: Mapping[str, Tensor],
        source: Mapping[str, Tensor],
        *,
        hold: bool = False,
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return the change of one site at some columns of tokens."""
        place, channels = self.place(site)
        positions = self.columns(site, pair)

        def change(state: Tensor) -> Tensor:
            state = state.clone()
            for column in columns:
                clean, corrupt = positions[column]
                into, of = (
                    (clean, corrupt) if self.into == "clean" else (corrupt, clean)
                )
                if hold:
                    state[0, into, channels] = base[place][0, into, channels]
                elif self.method == "zero":
                    state[0, into, channels] = 0
                elif self.method == "mean":
                    state[0, into, channels] = self.means[place][channels]
                elif -1 not in (into, of):
                    state[0, into, channels] = source[place][0, of, channels]
            return state

        return {place: change}

    def estimate(
        self,
        inputs: Mapping[str, Any],
        changes: Mapping[str, Callable[[Tensor], Tensor]],
        base: Mapping[str, Tensor],
        difference: Callable[[Tensor], Tensor],
    ) -> float:
        """Return the change of the logit difference, were it linear in the state."""
        ((place, change),) = changes.items()
        leaf = base[place].clone().requires_grad_()
        logits, _ = self.plain.run(inputs, (), {place: lambda _: leaf}, grad=True)
        (gradient,) = torch.autograd.grad(difference(logits), leaf, allow_unused=True)
        if gradient is None:
            return 0.0
        return float((gradient * (change(base[place]) - base[place])).sum())

    def swaps(
        self, pair: Pair, side: int, put: Any, measure: Any, base: Mapping[str, Tensor]
    ) -> dict[str, np.ndarray]:
        """Return what whole layers restore, all tokens at once."""
        swaps = {
            name: np.full(len(self.sites), np.nan)
            for name in ("swap", "swap_window")
            if name in self.data
        }
        for row, site in enumerate(self.sites if swaps else ()):
            kind = _kind(site)
            stream = kind[1] in ("", "mid")
            encoder = kind[0] == "encoder"
            chosen = []
            for column, place in enumerate(self.columns(site, pair)):
                answers = stream and not encoder and place[side] == pair.at[side]
                gap = -1 in place and self.method not in ("zero", "mean")
                if not answers and not gap:
                    chosen.append(column)
            if not chosen:
                continue
            swaps["swap"][row] = measure(put([(site, chosen)]))[0]
            above = [upper for upper in self.sites[row:] if _kind(upper) == kind]
            if len(above) < self.layers or (stream and encoder):
                continue
            changes = put([(upper, chosen) for upper in above[: self.layers]])
            for upper in above[self.layers :] if stream else ():
                changes |= self.change(upper, chosen, pair, base, {}, hold=True)
            swaps["swap_window"][row] = measure(changes)[0]
        return swaps


def _kind(site: str) -> tuple[str, str, bool]:
    """Return the stack and the part of a site, and whether it is final."""
    stack = ""
    for name in ("encoder", "decoder"):
        if site.startswith(f"{name}."):
            stack, site = name, site.removeprefix(f"{name}.")
    if site == "final":
        return stack, "", True
    return stack, ".".join(site.split(".")[2:]), False

"""The effect of every edge: estimated from gradients, or exact for chosen ones.

An edge changes what one part reads, and nothing else. What the reader then gives to the
model is computed anew, with its norm, and with the softmax of its head. The estimate
takes the rest of the model as linear, with gradients along the way between the runs;
exact effects come from a run of the rest for each edge.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.causes.encoding import EncodedContrast
from hiddenscope.causes.measures import Into, LogitMeasures
from hiddenscope.causes.wiring import OPERANDS, Kind, Runs, Wiring
from hiddenscope.model import Model
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes import resume
from hiddenscope.passes.stepping import Change, Stepper
from hiddenscope.passes.sweep import Patch, logits_tolerance, sweep
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.progress import Advance
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Ints

Gradients: TypeAlias = Literal["integrated", "gradient", "dropped"]
Method: TypeAlias = Gradients | Literal["exact"]
STEPS = 5


class Reading(NamedTuple):
    """One writer's change, as one kind of reader reads it: one head, or all of them."""

    writer: int
    kind: Kind
    head: int | None = None


class Effects:
    """The effects of the edges of two runs, as shares of the logit difference."""

    def __init__(
        self, model: Model, wiring: Wiring, contrast: EncodedContrast, into: Into
    ) -> None:
        self.model = model
        self.wiring = wiring
        self.runs = runs = Runs.of(model, wiring, contrast, into)
        self.stepper = Stepper(model, runs.base.inputs)
        sides = [run.logits[runs.at] for run in (runs.other, runs.base)]
        clean, corrupt = sides if into == "corrupt" else reversed(sides)
        tolerance = logits_tolerance(model)
        self.measures = LogitMeasures(contrast, clean, corrupt, into, tolerance)
        self.base = runs.base.states
        self.differences = runs.differences

    def of_all(self, method: Method, advance: Advance) -> Floats:
        """Return the effects of all edges [writer, reader]; NaN where there is none."""
        if method != "exact":
            effects = self.estimate(method)
            advance(1)
            return effects
        edges = np.argwhere(self.wiring.possible)
        effects = np.full(self.wiring.possible.shape, np.nan)
        share = 1 / len(edges)
        effects[tuple(edges.T)] = self.exact(
            edges.tolist(), lambda amount: advance(amount * share)
        )
        return effects

    @autograd.without_grad
    def estimate(self, gradients: Gradients) -> Floats:
        """Return estimates of the effects of all edges.

        Gradients are averaged over five steps between the runs, taken in the changed
        run alone, or there with one layer's gradient dropped at a time: effects are
        then means of absolute values, which do not cancel.
        """
        possible = self.wiring.possible
        effects = np.where(possible, 0.0, np.nan)
        slopes = self._slopes(gradients)
        span = self.measures.span
        if gradients == "dropped":
            span = abs(span)
        most = max(1, self.stepper.rows_at_a_time // len(OPERANDS))
        for layer, layout in enumerate(self.wiring.layouts, 1):
            readers = self.wiring.columns(layer)
            z = Site(layer, "attn.z")
            writers = np.flatnonzero(possible[:, readers["mlp"]].any(1))
            for start in range(0, len(writers), most):
                some = writers[start : start + most]
                readings = []
                for kind in OPERANDS:
                    readings += [Reading(int(writer), kind) for writer in some]
                read = self._read(layer, readings, [z])
                parts: dict[Kind, Tensor] = {}
                # What every column of z, times its slope, makes of each operand.
                columns = _along(read[z] - self.base[z], slopes[z])
                for kind, of_kind in zip(
                    OPERANDS, columns.chunk(3, dim=1), strict=True
                ):
                    count = len(readers[kind])
                    heads = of_kind.reshape(*of_kind.shape[:2], count, -1)
                    parts[kind] = heads.sum(-1)
                away = self._read_by_mlp(layer, some) - self.base[layout.mlp]
                parts["mlp"] = _along(away, slopes[layout.mlp]).sum(-1, keepdim=True)
                for kind, values in parts.items():
                    mean = values[0]
                    if gradients == "dropped":
                        # Dropping its own layer, nothing is left of a reader.
                        mean = values.abs().sum(0) / max(1, len(values) - 1)
                    own = np.ix_(some, np.array(readers[kind]))
                    shares = mean.double().cpu().numpy() / span
                    effects[own] = np.where(possible[own], shares, np.nan)
        effects[:, -1] = self.through_logits()
        return effects

    def exact(self, edges: Sequence[Sequence[int]], advance: Advance) -> Floats:
        """Return the effects of some edges [edge], given as numbers in the wiring."""
        effects = np.zeros(len(edges))
        by_layer: dict[int, list[int]] = defaultdict(list)
        for number, (_, reader) in enumerate(edges):
            by_layer[self.wiring.readers[reader].layer].append(number)
        logits = by_layer.pop(len(self.wiring.layouts) + 1, [])
        if logits:
            through = self.through_logits()
            effects[logits] = [through[edges[number][0]] for number in logits]
            advance(len(logits))
        variants = {}
        for layer, numbers in sorted(by_layer.items()):
            for number, patch in self._patches(layer, edges, numbers):
                variants[number] = [patch]
        advance(len(edges) - len(logits) - len(variants))
        swept = sweep(
            self.model,
            self.runs.base,
            [*variants.values()],
            self.runs.at,
            read=self.measures,
            advance=advance,
        )
        if variants:
            effects[[*variants]] = swept.values[:, 0].cpu().numpy()
        return effects

    def through_logits(self) -> Floats:
        """Return the exact effects of all edges into the logits [writer]."""
        last = Site(len(self.wiring.layouts))
        state = self.base[last][self.runs.at]
        rows = state + self.differences[:, self.runs.at].to(state)
        effects = []
        most = self.stepper.rows_at_a_time
        for logits in Unembedding(self.model).blocks(rows, last, most):
            effects.append(self.measures(logits)[:, 0])
        written: Floats = torch.cat(effects).cpu().numpy()
        # Equal writes change nothing, and rounding is no effect.
        unchanged = (rows == state).all(-1).cpu().numpy()
        return np.where(unchanged, 0.0, written)

    def _patches(
        self, layer: int, edges: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> Iterator[tuple[int, Patch]]:
        """Yield the patch of each edge into a layer, of what its reader then gives."""
        places = {"mlp": Site(layer, "mlp")}
        for kind in OPERANDS:
            places[kind] = Site(layer, "attn.z")
        most = self.stepper.rows_at_a_time
        for start in range(0, len(numbers), most):
            some = numbers[start : start + most]
            readings = []
            for number in some:
                writer, reader = edges[number]
                _, kind, head = self.wiring.readers[reader]
                readings.append(Reading(writer, kind, head))
            read = self._read(layer, readings, sorted({*places.values()}))
            for row, (number, reading) in enumerate(zip(some, readings, strict=True)):
                site = places[reading.kind]
                values = read[site][row]
                changed = (values != self.base[site]).any(-1).nonzero()[:, 0].tolist()
                if changed:
                    tokens = tuple(range(changed[0], len(values)))
                    yield number, Patch(site, tokens, values[changed[0] :])

    def _read(
        self, layer: int, readings: Sequence[Reading], sites: Sequence[Site]
    ) -> dict[Site, Tensor]:
        """Return states of a block [reading, token, width], one reading in each row.

        Its MLP, which comes after all that a head reads, reads the change in every row.
        """
        layout = self.wiring.layouts[layer - 1]
        away = self.differences[[reading.writer for reading in readings]]
        below, mid = self.base[Site(layer - 1)], Site(layer, "mid")
        by_mlp = [site for site in sites if site.branch == "mlp"]
        ahead = by_mlp if layout.parallel else []
        left = [site for site in sites if site not in ahead]
        operands = {kind: Site(layer, f"attn.{kind}") for kind in OPERANDS}
        first = [*operands.values()] if len(by_mlp) < len(sites) else []
        first += ahead
        read: dict[Site, Tensor] = {}
        if first:
            read = self.stepper.call(layer, below + away.to(below), first)
        changes: dict[Site, Change] = {}
        for kind, site in operands.items():
            if site not in read:
                continue
            heads = len(self.wiring.columns(layer)[kind])
            own = np.zeros((len(readings), 1, heads, 1), dtype=bool)
            for row, reading in enumerate(readings):
                if reading.kind == kind:
                    heads_read = slice(None) if reading.head is None else reading.head
                    own[row, 0, heads_read] = True
            reads = torch.tensor(own, device=below.device)
            changes[site] = partial(_replace_heads, reads, read[site])
        if by_mlp and not layout.parallel:
            before = self.base[mid]
            changes[mid] = lambda states: before + away.to(states)
        if left:
            # What else is read of the stream, as where an indexer chooses the tokens
            # that are attended to, is the run's own.
            rows = below.expand(len(readings), -1, -1)
            read |= self.stepper.call(layer, rows, left, changes)
        return read

    def _read_by_mlp(self, layer: int, writers: Ints) -> Tensor:
        """Return what each change makes of what the MLP reads [writer, token, width].

        Where a norm alone makes that of the middle of the block, no block is called.
        """
        mid, site = Site(layer, "mid"), self.wiring.layouts[layer - 1].mlp
        if mid in self.base and site.part == "mlp.input":
            tap = self.model.anatomy.taps[mid]
            norm = self.model.module.get_submodule(tap.path)
            stream, expected = self.base[mid][None], self.base[site][None]
            if tap.side == "input" and torch.equal(norm.forward(stream), expected):
                away = self.differences[torch.from_numpy(writers)]
                read: Tensor = norm.forward(stream + away.to(stream))
                return read
        readings = [Reading(int(writer), "mlp") for writer in writers]
        return self._read(layer, readings, [site])[site]

    def _slopes(self, gradients: Gradients) -> dict[Site, Tensor]:
        """Return the gradients of the logit difference [row, token, width] by site."""
        wiring, runs = self.wiring, self.runs
        depth = len(wiring.layouts)
        shares = torch.zeros(depth if gradients == "dropped" else 1)
        if gradients == "integrated":
            shares = torch.arange(STEPS) / STEPS
        first, other = runs.base.states[Site(0)], runs.other.states[Site(0)]
        between = first + shares.to(first)[:, None, None] * (other - first)
        sites = []
        for layer, layout in enumerate(wiring.layouts, 1):
            sites += [Site(layer, "attn.z"), layout.mlp]
        watches: list[hooks.Watch] = []
        # Of a single block there is no other to drop.
        if gradients == "dropped" and depth > 1:
            for row, tap in enumerate(self.model.anatomy.stacks[0].proof.taps[1:]):
                block = self.model.module.get_submodule(tap.path)
                watches += _dropping(block, row)
        inputs = runs.base.inputs.some([0] * len(shares))
        with autograd.restored(inference=False), torch.enable_grad():
            with hooks.watching(watches):
                run = resume(self.model, inputs, Site(0), between, sites, grad=True)
            assert run.logits is not None
            logits = run.logits.reshape(len(shares), -1, run.logits.shape[-1])
            logits = logits[:, runs.at]
            total = self.measures.difference(logits.double()).sum()
            live = [run.live[site] for site in sites]
            found = torch.autograd.grad(total, live, allow_unused=True)
        slopes = {}
        for site, tensor, slope in zip(sites, live, found, strict=True):
            known: Tensor | None = slope
            # The logits need not depend on every part.
            if known is None:
                known = torch.zeros_like(tensor)
            place = self.model.anatomy.tap(site)
            rows = place.layout.gradients(known, self.stepper.tokens).float()
            slopes[site] = rows if gradients == "dropped" else rows.mean(0)[None]
        return slopes


def _along(away: Tensor, slopes: Tensor) -> Tensor:
    """Return sums over tokens of products [slope, row, column]."""
    wide = away.float()
    return torch.stack([(wide * slope).sum(1) for slope in slopes])


def _replace_heads(own: Tensor, given: Tensor, states: Tensor) -> Tensor:
    """Return what heads read: what is given in some rows, and else what they did."""
    heads = states.reshape(*states.shape[:2], own.shape[2], -1)
    return torch.where(own, given.reshape(heads.shape), heads).flatten(-2)


def _dropping(block: torch.nn.Module, row: int) -> list[hooks.Watch]:
    """Watch a block so that no gradient of one row flows through what it adds."""
    entered: list[Tensor] = []

    def enter(args: hooks.Args, kwargs: hooks.Kwargs) -> None:
        state = hooks.state_in(args, kwargs)
        assert state is not None, "a state enters every block"
        entered[:] = [state]

    def leave(output: Any) -> Any:
        state = hooks.first_tensor(output)
        assert state is not None, "every block gives a state"
        before = entered.pop()
        rows = torch.arange(len(state), device=state.device)[:, None, None]
        cut = before + (state - before).detach()
        return hooks.with_first_tensor(output, torch.where(rows == row, cut, state))

    return [hooks.Watch(block, "input", enter), hooks.Watch(block, "output", leave)]

"""Cells: patch every site and token of one contrast, and whole layers.

Effects are exact, with each cell run, or estimated by attribution from one gradient. A
head is patched in its columns of `attn.z`, and a neuron in `mlp.neurons`: the model's
own projection makes of that what it adds.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.analyses.patch.story import Check
from hiddenscope.causes.encoding import EncodedContrast
from hiddenscope.causes.measures import MEASURES, Into, LogitMeasures
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import record
from hiddenscope.passes.sweep import (
    Patch,
    Shortcuts,
    SweepResult,
    UnpatchedRun,
    Variant,
    logits_tolerance,
    run_unbatched,
    run_unpatched,
    sweep,
)
from hiddenscope.progress import Advance
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Bools, Floats

PatchedValues: TypeAlias = Literal["run", "zero", "mean"]


class Plan(NamedTuple):
    """What is patched into which run, how many tokens and layers at a time, and how.

    With `together` the tokens of a site are patched at once: all of them, or those at
    `positions` of the clean prompt. `values` come from the other run, or are zero or
    the mean over all prompts.
    """

    sites: tuple[Site, ...]
    window: int
    layers: int
    into: Into
    exact: bool
    attribution: bool
    together: bool = False
    positions: tuple[int, ...] | None = None
    values: PatchedValues = "run"


@dataclass
class Effects:
    """The effects of one contrast: arrays [site, column] or [site] by name.

    `runs` are numbers of the clean and the corrupt run. `patched` marks the cells
    whose states differ between the runs; `check` is the largest effect computed twice.
    """

    numbers: dict[str, Floats]
    runs: dict[str, list[float]]
    patched: Bools
    passes: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    check: Check | None = None


class PatchTarget(NamedTuple):
    """Where the state of a site is: at a tap of its own, or in columns of another."""

    site: Site
    columns: slice | None = None

    def rows(self, states: Tensor, positions: Sequence[int]) -> Tensor:
        """Return some rows of the states at the tap."""
        rows = states[list(positions)]
        return rows if self.columns is None else rows[:, self.columns]


def patched_at(model: Model, site: Site) -> PatchTarget:
    """Return where the state of a site is patched."""
    if site.index is None:
        return PatchTarget(site)
    return PatchTarget(site.whole, model.anatomy.columns(site))


def patch_contrast(
    model: Model,
    contrast: EncodedContrast,
    plan: Plan,
    advance: Advance,
    means: Mapping[Site, Tensor],
) -> Effects:
    """Patch one contrast at every site and token.

    `means` are the mean states by site, where these are patched.
    """
    targets = {site: patched_at(model, site) for site in plan.sites}
    recorded = tuple(sorted({target.site for target in targets.values()}))
    clean, corrupt = run_unpatched(model, contrast.inputs, recorded)
    clean_at, corrupt_at = contrast.at
    measures = LogitMeasures(
        contrast,
        clean.logits[clean_at],
        corrupt.logits[corrupt_at],
        plan.into,
        logits_tolerance(model),
    )
    if plan.into == "corrupt":
        runs = corrupt, clean, corrupt_at
    else:
        runs = clean, corrupt, clean_at
    cells = Cells(contrast, plan, *runs, targets, means)
    effects = Effects({}, measures.runs, cells.patched)
    # Cells whose states are the same in both runs need no pass.
    advance(cells.patched.size - len(cells.variants))
    if plan.exact:
        swaps = dict(_swaps(cells)) if plan.layers else {}
        variants = [*cells.variants.values(), *swaps.values()]
        swept = _checked_sweep(model, cells, variants, measures, effects, advance)
        values = swept.values.cpu().numpy()
        unpatched = measures(cells.base.logits[cells.at])
        # Equal states change nothing.
        for place, name in enumerate(MEASURES):
            # Computed, the effect would be -0.0 where the span is negative.
            unchanged = 0.0 if name == "effect" else float(unpatched[place])
            grid = np.where(cells.paired, unchanged, np.nan)
            for number, cell in enumerate(cells.variants):
                grid[cell] = values[number, place]
            effects.numbers[name] = grid
        if swaps:
            for name in ("swap", "swap_window"):
                effects.numbers[name] = np.full(len(plan.sites), np.nan)
        for number, (name, row) in enumerate(swaps, len(cells.variants)):
            effects.numbers[name][row] = values[number, 0]
        effects.passes = swept.passes
        effects.tokens = swept.tokens
        effects.notes += swept.notes
    if plan.attribution:
        # Each effect, as if the logit difference were linear in the state. One backward
        # pass gives the gradient at every site and token.
        base = cells.base
        run = record(model, base.inputs, recorded, logits=True, grad=True)
        assert run.logits is not None
        live = [run.live[site] for site in recorded]
        with autograd.restored(inference=False), torch.enable_grad():
            difference = measures.difference(run.logits[cells.at].double())
            gradients = torch.autograd.grad(difference, live, allow_unused=True)
        by_site = dict(zip(recorded, gradients, strict=True))
        estimates = np.where(cells.paired, 0.0, np.nan)
        for cell, (patch,) in cells.variants.items():
            target = targets[plan.sites[cell[0]]]
            gradient: Tensor | None = by_site[target.site]
            # The logits do not depend on this state: its effect is zero.
            if gradient is None:
                continue
            layout = model.anatomy.tap(target.site).layout
            tokens = len(base.input_ids(target.site.stack))
            gradient = layout.gradients(gradient, tokens)[0]
            gradient = target.rows(gradient, patch.tokens).double()
            before = target.rows(base.states[target.site], patch.tokens).double()
            step = patch.values.double() - before
            estimates[cell] = float((gradient * step).sum()) / measures.span
        effects.numbers["attribution"] = estimates
    return effects


class Cells:
    """The cells of one contrast, and the patch of each from the source to the base run.

    `paired` marks the cells [site, column] that have a token in both runs, `patched`
    those whose states differ. `variants` holds the patches of the latter. Tokens that
    are patched together have no columns: these cells are [site].
    """

    def __init__(
        self,
        contrast: EncodedContrast,
        plan: Plan,
        base: UnpatchedRun,
        source: UnpatchedRun,
        at: int,
        targets: Mapping[Site, PatchTarget],
        means: Mapping[Site, Tensor],
    ) -> None:
        self.targets = targets
        self.means = means
        self.columns = contrast.columns
        self.plan = plan
        self.base = base
        self.source = source
        self.at = at
        shape = [len(plan.sites)]
        if not plan.together:
            shape.append(sum(map(len, contrast.columns.values())))
        self.paired = np.zeros(shape, dtype=bool)
        self.patched = np.zeros(shape, dtype=bool)
        self.variants: dict[tuple[int, ...], Variant] = {}
        # The heads of one block stand in one tap, and each comparison waits for a GPU.
        self.incoming: dict[Site, Tensor] = {}
        differences = {}
        for place in {target.site for target in targets.values()}:
            self.incoming[place] = self._incoming(place)
            differs = base.states[place] != self.incoming[place]
            differences[place] = differs.cpu().numpy()
        for row, site in enumerate(plan.sites):
            place, channels = targets[site]
            here = differences[place][:, channels or slice(None)]
            differing = set(np.flatnonzero(here.any(-1)))
            for column, positions in self._windows(site.stack):
                cell = row, *column
                self.paired[cell] = bool(positions)
                # Equal states change nothing, and a run that begins later costs less.
                changed = [position for position in positions if position in differing]
                if changed:
                    self.patched[cell] = True
                    self.variants[cell] = [self.patch(site, changed)]

    def _windows(
        self, stack: str | None
    ) -> Iterator[tuple[tuple[int, ...], list[int]]]:
        """Yield each column, and the positions that are patched at once for it."""
        if self.plan.together:
            yield (), self._chosen(stack)
            return
        first = 0
        if stack == "decoder":
            first = len(self.columns["encoder"])
        for column in range(len(self.columns[stack])):
            stop = column + self.plan.window
            yield (first + column,), self.positions(stack, column, stop)

    def _chosen(self, stack: str | None) -> list[int]:
        """Return the positions of the tokens that are patched together."""
        if self.plan.positions is None:
            return self.positions(stack)
        length = sum(clean is not None for clean, _ in self.columns[stack])
        clean_side = 1 if self.plan.into == "corrupt" else 0
        base_position = {pair[clean_side]: pair[0] for pair in self._pairs(stack)}
        selected = []
        for position in self.plan.positions:
            place = position + length if position < 0 else position
            if place not in base_position:
                reason = f"the clean prompt has {length} tokens"
                if 0 <= place < length:
                    reason = "the corrupt prompt has no token there"
                raise TextError(
                    f"No token at position {position} to patch",
                    reason,
                    "Choose positions of tokens that both prompts have.",
                )
            selected.append(base_position[place])
        return selected

    def _pairs(
        self, stack: str | None, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield positions (base, source) of the columns with a token in both runs.

        Zeros and means need no token of the source run.
        """
        for clean, corrupt in self.columns[stack][start:stop]:
            if self.plan.values != "run":
                corrupt = clean
            if clean is None or corrupt is None:
                continue
            pair = clean, corrupt
            yield pair[::-1] if self.plan.into == "corrupt" else pair

    def positions(
        self, stack: str | None, start: int = 0, stop: int | None = None
    ) -> list[int]:
        """Return the base run's positions of the columns with a token in both runs."""
        return [base for base, _ in self._pairs(stack, start, stop)]

    def _incoming(self, place: Site) -> Tensor:
        """Return what may be put in the place of each state of the base run."""
        base = self.base.states[place]
        if self.plan.values == "zero":
            return torch.zeros_like(base)
        if self.plan.values == "mean":
            return self.means[place].to(base).expand_as(base)
        incoming = base.clone()
        pairs = list(self._pairs(place.stack))
        if pairs:
            base_positions, source_positions = torch.tensor(pairs).T
            incoming[base_positions] = self.source.states[place][source_positions]
        return incoming

    def patch(
        self, site: Site, positions: Sequence[int], *, hold: bool = False
    ) -> Patch:
        """Return a patch that puts states of the source run into the base run.

        With `hold` it keeps those of the base run, whatever changes below.
        """
        target = self.targets[site]
        states = self.base.states if hold else self.incoming
        values = target.rows(states[target.site], positions)
        return Patch(target.site, tuple(positions), values, target.columns)


def _checked_sweep(
    model: Model,
    cells: Cells,
    variants: Sequence[Variant],
    measures: LogitMeasures,
    effects: Effects,
    advance: Advance,
) -> SweepResult:
    """Sweep the variants, and check the largest effect in a pass of its own.

    The shortcuts of a sweep were tried on the model with another text; this is the same
    trial on the text at hand. Where it fails, the sweep is run without shortcuts.
    """
    reason = ""
    for shortcuts in (None, Shortcuts(batched=False)):
        swept = sweep(
            model,
            cells.base,
            variants,
            cells.at,
            read=measures,
            shortcuts=shortcuts,
            advance=advance,
        )
        if not cells.variants:
            return swept
        shares = swept.values[: len(cells.variants), 0]
        largest = int(shares.abs().argmax())
        logits = run_unbatched(model, cells.base, variants[largest], cells.at).double()
        in_sweep = float(shares[largest])
        unbatched = float(measures(logits)[0])
        difference = abs((in_sweep - unbatched) * measures.span)
        if difference <= logits_tolerance(model) * float(logits.norm()) * 2**0.5:
            effects.check = Check(sweep=in_sweep, alone=unbatched)
            return swept
        reason = f"an effect is {in_sweep:.6g} in a batch and {unbatched:.6g} alone"
        effects.notes.append(f"Every cell was computed alone, because {reason}.")
    raise PassError(
        f"Cannot patch {model.name}", reason, "Use float32, or report this model."
    )


def _swaps(cells: Cells) -> Iterator[tuple[tuple[str, int], Variant]]:
    """Yield the patches of all tokens, at one site and at several layers in a row.

    Where the whole residual stream is patched, the token at which the answer is read
    is left out: with it, everything above would be the source run's. In a window of
    layers the other tokens take the source run's states, and above the window their own
    again.
    """
    sites, layers = cells.plan.sites, cells.plan.layers
    for row, site in enumerate(sites):
        whole_stream = site.part in ("", "mid")
        in_encoder = site.stack == "encoder"
        positions = cells.positions(site.stack)
        if whole_stream and not in_encoder:
            positions = [position for position in positions if position != cells.at]
        if not positions:
            continue
        yield ("swap", row), [cells.patch(site, positions)]
        above = [upper for upper in sites[row:] if _place(upper) == _place(site)]
        if len(above) < layers or (whole_stream and in_encoder):
            continue
        window = [cells.patch(upper, positions) for upper in above[:layers]]
        if whole_stream:
            window += [
                cells.patch(upper, positions, hold=True) for upper in above[layers:]
            ]
        yield ("swap_window", row), window


def _place(site: Site) -> tuple[str | None, str, bool]:
    """Return what the sites of a window of layers have in common."""
    return site.stack, site.part, site.layer is None

"""Cells: every (site, token) of one contrast patched, exactly or by attribution, and
whole layers patched.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.patch.contrast import EncodedContrast
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import record
from hiddenscope.passes.clean_run import CleanRun, logits_tolerance, run_clean
from hiddenscope.passes.sweep import (
    Patch,
    Shortcuts,
    SweepResult,
    run_unbatched,
    sweep,
)
from hiddenscope.sites import Site

Into: TypeAlias = Literal["corrupt", "clean"]
Floats: TypeAlias = NDArray[np.float64]
Variant: TypeAlias = list[Patch]
Positions: TypeAlias = list[tuple[int, int]]
Advance: TypeAlias = Callable[[float], None]

MEASURES = ("effect", "probability", "kl")


@dataclass(frozen=True)
class Plan:
    """What is patched: which sites, how many tokens and layers at a time, into which
    run, and by which methods.
    """

    sites: tuple[Site, ...]
    window: int
    layers: int
    into: Into
    exact: bool
    attribution: bool


@dataclass
class Effects:
    """The effects of one contrast: arrays [site, column] and [site] by name, and
    numbers of the clean and corrupt run.

    `exchanged` marks the cells whose states differ between the runs; `check` is the
    largest effect computed twice.
    """

    cells: dict[str, Floats]
    along: dict[str, Floats]
    runs: dict[str, tuple[float, float]]
    exchanged: NDArray[np.bool_]
    passes: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    check: dict[str, float] | None = None


class LogitMeasures:
    """Measures of patched logits: the share of the logit difference, the answer's
    probability, KL from the clean run.

    `tolerance` is what rounding may make of logits, as a share of their norm.
    """

    def __init__(
        self,
        contrast: EncodedContrast,
        clean: Tensor,
        corrupt: Tensor,
        into: Into,
        tolerance: float,
    ) -> None:
        self.answer, self.other = contrast.answer, contrast.other
        self.logs = [
            torch.log_softmax(logits.double(), -1) for logits in (clean, corrupt)
        ]
        base, source = (corrupt, clean) if into == "corrupt" else (clean, corrupt)
        self.start = float(self.difference(base.double()))
        self.span = float(self.difference(source.double())) - self.start
        least = max(self._rounding(logits, tolerance) for logits in (clean, corrupt))
        if abs(self.span) <= least:
            reason = (
                f"both runs prefer the answer by {self.start:.6g} in logits, with a"
                " difference of "
            )
            reason += (
                f"{abs(self.span):.2g} between them, and rounding alone may make"
                f" {least:.2g}"
            )
            remedy = "Give prompts that tell the answers apart, or use float32."
            raise TextError(
                "The effect is a share of the difference between two runs",
                reason,
                remedy,
            )

    def difference(self, logits: Tensor) -> Tensor:
        """The logit difference: the answer's logit less the other's."""
        return logits[..., self.answer] - logits[..., self.other]

    def __call__(self, logits: Tensor) -> Tensor:
        """The measures [variant, measure] of logits [variant, vocabulary], in float64."""
        wide = logits.double()
        total = wide.logsumexp(-1)
        effect = (self.difference(wide) - self.start) / self.span
        clean = self.logs[0].exp()
        # Sum p log p - sum p log q.
        kl = (clean * self.logs[0]).sum() - (wide @ clean - total)
        probability = (wide[..., self.answer] - total).exp()
        return torch.stack([effect, probability, kl.clamp_min(0)], -1)

    @property
    def runs(self) -> dict[str, tuple[float, float]]:
        """The logit difference and the answer's probability, each in the clean and in
        the corrupt run.
        """
        clean, corrupt = self.logs
        return {
            "logit_difference": (
                float(self.difference(clean)),
                float(self.difference(corrupt)),
            ),
            "probability": (
                float(clean[self.answer].exp()),
                float(corrupt[self.answer].exp()),
            ),
        }

    def _rounding(self, logits: Tensor, tolerance: float) -> float:
        """What rounding may make of the difference of two logits.

        The tolerance is a share of the norm of all logits; for one logit it is that
        share of their spread, because what all of them have in common cancels in a
        difference. It is at least the last place of the two logits.
        """
        wide = logits.double()
        largest = float(wide[[self.answer, self.other]].abs().max())
        return max(
            tolerance * float(wide.std(correction=0)) * 2**0.5,
            2 * torch.finfo(logits.dtype).eps * largest,
        )


def patch_contrast(
    model: Model, contrast: EncodedContrast, plan: Plan, advance: Advance
) -> Effects:
    """Patch one contrast at every site and token."""
    clean, corrupt = run_clean(model, contrast.inputs, plan.sites)
    base, source = (corrupt, clean) if plan.into == "corrupt" else (clean, corrupt)
    at = contrast.at[1 if plan.into == "corrupt" else 0]
    logits = clean.logits[contrast.at[0]], corrupt.logits[contrast.at[1]]
    measures = LogitMeasures(contrast, *logits, plan.into, logits_tolerance(model))
    cells = Cells(contrast, plan, base, source, at)
    effects = Effects({}, {}, measures.runs, cells.exchanged)
    advance(cells.exchanged.size - len(cells.variants))
    if plan.exact:
        _exact(model, cells, measures, effects, advance)
    if plan.attribution:
        effects.cells["attribution"] = _attribution(model, cells, measures)
    return effects


class Cells:
    """The cells of one contrast: which states of the source run take the place of which
    states of the base run.
    """

    def __init__(
        self,
        contrast: EncodedContrast,
        plan: Plan,
        base: CleanRun,
        source: CleanRun,
        at: int,
    ) -> None:
        self.columns, self.plan, self.base, self.source, self.at = (
            contrast.columns,
            plan,
            base,
            source,
            at,
        )
        starts, width = {}, 0
        for stack, columns in contrast.columns.items():
            starts[stack], width = width, width + len(columns)
        self.paired = np.zeros((len(plan.sites), width), dtype=bool)
        self.exchanged = np.zeros_like(self.paired)
        self.variants: dict[tuple[int, int], Variant] = {}
        for row, site in enumerate(plan.sites):
            differing = self._differing(site)
            count = len(contrast.columns[site.stack])
            for column in range(count):
                positions = self.positions(
                    site.stack, range(column, min(count, column + plan.window))
                )
                cell = row, starts[site.stack] + column
                self.paired[cell] = bool(positions)
                if any(here in differing for here, _ in positions):
                    self.exchanged[cell] = True
                    self.variants[cell] = [self.exchange(site, positions)]

    def positions(self, stack: str | None, columns: Sequence[int]) -> Positions:
        """The positions (base, source) of the columns that have a token in both runs."""
        known = [
            self.columns[stack][column]
            for column in columns
            if column < len(self.columns[stack])
        ]
        pairs = [
            (clean, corrupt)
            for clean, corrupt in known
            if clean is not None and corrupt is not None
        ]
        return (
            [(corrupt, clean) for clean, corrupt in pairs]
            if self.plan.into == "corrupt"
            else pairs
        )

    def exchange(self, site: Site, positions: Positions) -> Patch:
        """The states of the source run, put into the base run."""
        values = _rows(self.source.states[site], [there for _, there in positions])
        return Patch(site, tuple(here for here, _ in positions), values)

    def keep(self, site: Site, positions: Positions) -> Patch:
        """The states of the base run, kept as they are whatever changes below."""
        here = [here for here, _ in positions]
        return Patch(site, tuple(here), _rows(self.base.states[site], here))

    def _differing(self, site: Site) -> set[int]:
        """The positions of the base run whose states differ between the runs: a bit is
        enough.
        """
        positions = self.positions(site.stack, range(len(self.columns[site.stack])))
        base, source = (
            _rows(run.states[site], [pair[side] for pair in positions])
            for side, run in enumerate((self.base, self.source))
        )
        differs = (base != source).any(-1).tolist()
        return {here for (here, _), one in zip(positions, differs, strict=True) if one}


def _rows(states: Tensor, positions: Sequence[int]) -> Tensor:
    """Some rows of the states; neighbours as a view, because an index would have to be
    sent to a GPU.
    """
    start, stop = (positions[0], positions[-1] + 1) if positions else (0, 0)
    return (
        states[start:stop]
        if list(positions) == list(range(start, stop))
        else states[torch.tensor(positions)]
    )


def _exact(
    model: Model,
    cells: Cells,
    measures: LogitMeasures,
    effects: Effects,
    advance: Advance,
) -> None:
    """Patch every cell whose states differ; a state that is the same in both runs
    changes nothing.
    """
    swaps = dict(_swaps(cells)) if cells.plan.layers else {}
    variants = [*cells.variants.values(), *swaps.values()]
    swept = _checked_sweep(model, cells, variants, measures, effects, advance)
    values = swept.values.cpu().numpy()
    unpatched = measures(cells.base.logits[cells.at])
    for place, name in enumerate(MEASURES):
        grid = np.where(
            cells.paired, 0.0 if name == "effect" else float(unpatched[place]), np.nan
        )
        for number, cell in enumerate(cells.variants):
            grid[cell] = values[number, place]
        effects.cells[name] = grid
    for name in ("swap", "swap_window") if swaps else ():
        effects.along[name] = np.full(len(cells.plan.sites), np.nan)
    for number, (name, row) in enumerate(swaps, len(cells.variants)):
        effects.along[name][row] = values[number, 0]
    effects.passes += swept.passes
    effects.tokens += swept.tokens
    effects.notes += swept.notes


def _checked_sweep(
    model: Model,
    cells: Cells,
    variants: Sequence[Variant],
    measures: LogitMeasures,
    effects: Effects,
    advance: Advance,
) -> SweepResult:
    """Sweep the variants and compute the largest effect again, alone; if the two
    differ, sweep without shortcuts.

    What a sweep may skip was tried on the model with another text; this is the same
    trial on the text at hand.
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
        in_sweep, by_itself = float(shares[largest]), float(measures(logits)[0])
        if (
            abs((in_sweep - by_itself) * measures.span)
            <= logits_tolerance(model) * float(logits.norm()) * 2**0.5
        ):
            effects.check = {"sweep": in_sweep, "alone": by_itself}
            return swept
        reason = f"an effect is {in_sweep:.6g} in a batch and {by_itself:.6g} alone"
        effects.notes.append(f"Every cell was computed alone, because {reason}.")
    raise PassError(
        f"Cannot patch {model.name}", reason, "Use float32, or report this model."
    )


def _swaps(cells: Cells) -> Iterator[tuple[tuple[str, int], Variant]]:
    """All tokens from the source run: at one site, and at several layers in a row.

    Where the whole residual stream is exchanged, the token at which the answer is read
    is left out: with it, everything above would be the source run's. In a window of
    layers the other tokens take the source run's states, and above the window their own
    again.
    """
    for row, site in enumerate(cells.plan.sites):
        stream, encoder = site.part in ("", "mid"), site.stack == "encoder"
        positions = cells.positions(site.stack, range(len(cells.columns[site.stack])))
        if stream and not encoder:
            positions = [pair for pair in positions if pair[0] != cells.at]
        if not positions:
            continue
        yield ("swap", row), [cells.exchange(site, positions)]
        above = [one for one in cells.plan.sites[row:] if _place(one) == _place(site)]
        if len(above) < cells.plan.layers or (stream and encoder):
            continue
        taken = [cells.exchange(one, positions) for one in above[: cells.plan.layers]]
        kept = (
            [cells.keep(one, positions) for one in above[cells.plan.layers :]]
            if stream
            else []
        )
        yield ("swap_window", row), [*taken, *kept]


def _place(site: Site) -> tuple[str | None, str, bool]:
    """What the sites of a window of layers have in common."""
    return site.stack, site.part, site.layer is None


def _attribution(model: Model, cells: Cells, measures: LogitMeasures) -> Floats:
    """Attribution patching: the effect of each exchange if the logit difference were
    linear in the state.
    """
    base, sites = cells.base, cells.plan.sites
    run = record(model, base.inputs, sites, logits=True, grad=True)
    assert run.logits is not None
    live = [run.live[site] for site in sites]
    gradients = torch.autograd.grad(
        measures.difference(run.logits[cells.at].double()), live, allow_unused=True
    )
    grid = np.where(cells.paired, 0.0, np.nan)
    for (row, column), (exchange,) in cells.variants.items():
        gradient: Tensor | None = gradients[row]
        if gradient is None:
            continue
        rows = model.anatomy.taps[sites[row]].layout.states(
            gradient, len(base.input_ids(sites[row].stack))
        )[0]
        step = (
            exchange.values.double()
            - _rows(base.states[sites[row]], exchange.tokens).double()
        )
        grid[row, column] = (
            float((_rows(rows, exchange.tokens).double() * step).sum()) / measures.span
        )
    return grid

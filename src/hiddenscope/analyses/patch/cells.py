"""Cells: every (site, token) of one pair patched, exactly or by the gradient's estimate, and whole layers swapped."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.patch.pairs import TextPair
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import record
from hiddenscope.passes.sweep import Base, Exchange, Swept, Ways, alone, begin, room, sweep
from hiddenscope.sites import Site

Floats: TypeAlias = NDArray[np.float64]
Variant: TypeAlias = list[Exchange]
Advance: TypeAlias = Callable[[float], None]

MEASURES = ("effect", "probability", "kl")


@dataclass(frozen=True)
class Plan:
    """What is patched: sites, tokens at a time, layers at a time, and which run the states come from."""

    sites: tuple[Site, ...]
    window: int
    layers: int
    denoise: bool
    exact: bool
    estimate: bool


@dataclass
class Patched:
    """What one pair gave: arrays [site, column] by name, along the sites by name, and numbers of both runs."""

    cells: dict[str, Floats]
    along: dict[str, Floats]
    runs: dict[str, tuple[float, float]]
    changed: NDArray[np.bool_]
    passes: int = 0
    tokens: int = 0
    notes: list[str] = field(default_factory=list)
    check: dict[str, Any] | None = None


class Reading:
    """Reads the logits of the answer's position: the share of the difference between the runs, and more."""

    def __init__(self, pair: TextPair, clean: Tensor, corrupt: Tensor, denoise: bool, room: float) -> None:
        self.pair = pair
        self.logs = [torch.log_softmax(side.double(), -1) for side in (clean, corrupt)]
        own, from_ = (clean, corrupt)[::-1] if denoise else (clean, corrupt)
        self.start = float(self.difference(own.double()))
        self.span = float(self.difference(from_.double())) - self.start
        least = max(_rounding(side, pair, room) for side in (clean, corrupt))
        if abs(self.span) <= least:
            reason = f"both runs prefer the answer by {self.start:.6g} in logits, "
            reason += f"but for {abs(self.span):.2g}, and rounding may make {least:.2g}"
            remedy = "Give texts that part the answers, or use float32."
            raise TextError("The share of a difference between two runs", reason, remedy)

    def difference(self, logits: Tensor) -> Tensor:
        """By how much the answer is preferred to the other."""
        return logits[..., self.pair.answer] - logits[..., self.pair.other]

    def __call__(self, logits: Tensor) -> Tensor:
        """The measures [variant, measure] of logits [variant, vocabulary], in float64."""
        wide = logits.double()
        total = wide.logsumexp(-1)
        share = (self.difference(wide) - self.start) / self.span
        clean = self.logs[0].exp()
        kl = (clean * self.logs[0]).sum() - (wide @ clean - total)  # sum p log p - sum p log q
        probability = (wide[..., self.pair.answer] - total).exp()
        return torch.stack([share, probability, kl.clamp_min(0)], -1)

    @property
    def runs(self) -> dict[str, tuple[float, float]]:
        """The logit difference and the answer's probability of the clean and the corrupt run."""
        probabilities = [float(logs[self.pair.answer].exp()) for logs in self.logs]
        differences = [float(self.difference(logs)) for logs in self.logs]
        return {
            "logit difference": (differences[0], differences[1]),
            "probability": (probabilities[0], probabilities[1]),
        }


def _rounding(logits: Tensor, pair: TextPair, room: float) -> float:
    """What rounding may make of the difference of two logits.

    What a sweep allows for all logits is a share of their norm; of one it is that share of their spread, for what all
    of them have in common is not in a difference. It is never less than the last place of the logits themselves.
    """
    wide = logits.double()
    read = float(wide[[pair.answer, pair.other]].abs().max())
    return max(room * float(wide.std(correction=0)) * 2**0.5, 2 * torch.finfo(logits.dtype).eps * read)


def run(model: Model, pair: TextPair, plan: Plan, advance: Advance) -> Patched:
    """Patch one pair at every site and token."""
    texts = [list(side) for side in pair.ids]
    targets = None if pair.targets is None else [list(pair.targets)] * 2
    clean, corrupt = begin(model, texts, plan.sites, targets=targets)
    own, source = (corrupt, clean) if plan.denoise else (clean, corrupt)
    at = pair.at[1 if plan.denoise else 0]
    reading = Reading(pair, clean.logits[pair.at[0]], corrupt.logits[pair.at[1]], plan.denoise, room(model))
    cells = _Cells(pair, plan, own, source)
    made = Patched({}, {}, reading.runs, cells.changed)
    advance(cells.changed.size - len(cells.variants))
    if plan.exact:
        _exact(model, cells, reading, at, made, advance)
    if plan.estimate:
        made.cells["attribution"] = _estimate(model, cells, reading, at)
    return made


class _Cells:
    """The cells of one pair: which tokens of which run each exchanges."""

    def __init__(self, pair: TextPair, plan: Plan, own: Base, source: Base) -> None:
        self.pair, self.plan, self.own, self.source = pair, plan, own, source
        self.stacks = list(pair.columns)
        self.width = sum(len(columns) for columns in pair.columns.values())
        self.changed = np.zeros((len(plan.sites), self.width), dtype=bool)
        self.there = np.zeros_like(self.changed)
        self.variants: dict[tuple[int, int], Variant] = {}
        for row, site in enumerate(plan.sites):
            offset = sum(len(pair.columns[stack]) for stack in self.stacks[: self.stacks.index(site.stack)])
            for column in range(len(pair.columns[site.stack])):
                places = self.places(site.stack, range(column, column + plan.window))
                if places:
                    self.there[row, offset + column] = True
                    if not self._same(site, places):
                        self.changed[row, offset + column] = True
                        self.variants[row, offset + column] = [self.exchange(site, places)]

    def places(self, stack: str | None, columns: Sequence[int]) -> list[tuple[int, int]]:
        """The positions (own, source) of the columns that have a token on both sides."""
        every = self.pair.columns[stack]
        both = [every[column] for column in columns if column < len(every)]
        sides = (1, 0) if self.plan.denoise else (0, 1)
        return [(c[sides[0]], c[sides[1]]) for c in both if None not in c]  # type: ignore[misc]

    def exchange(self, site: Site, places: Sequence[tuple[int, int]]) -> Exchange:
        """The states of the source put in their places."""
        rows = torch.tensor([there for _, there in places])
        return Exchange(site, tuple(here for here, _ in places), self.source.states[site][rows])

    def hold(self, site: Site, places: Sequence[tuple[int, int]]) -> Exchange:
        """The run's own states kept in their places, whatever happens below."""
        here = tuple(here for here, _ in places)
        return Exchange(site, here, self.own.states[site][torch.tensor(here)])

    def _same(self, site: Site, places: Sequence[tuple[int, int]]) -> bool:
        here, there = (torch.tensor([pair[side] for pair in places]) for side in (0, 1))
        return torch.equal(self.own.states[site][here], self.source.states[site][there])


def _exact(model: Model, cells: _Cells, reading: Reading, at: int, made: Patched, advance: Advance) -> None:
    """Every cell that holds another state, patched and read; a state put in its own place changes nothing."""
    swaps = dict(_swaps(cells, at)) if cells.plan.layers else {}
    variants = [*cells.variants.values(), *swaps.values()]
    swept = _checked(model, cells, variants, at, reading, made, advance)
    measured = swept.values.cpu().numpy()
    resting = reading(cells.own.logits[at])
    for place, name in enumerate(MEASURES):
        found = np.where(cells.there, 0.0 if name == "effect" else float(resting[place]), np.nan)
        for number, cell in enumerate(cells.variants):
            found[cell] = measured[number, place]
        made.cells[name] = found
    for name in ("swap", "swap_window") if swaps else ():
        made.along[name] = np.full(len(cells.plan.sites), np.nan)
    for number, (name, row) in enumerate(swaps, len(cells.variants)):
        made.along[name][row] = measured[number, 0]
    made.passes, made.tokens = made.passes + swept.passes, made.tokens + swept.tokens
    made.notes += swept.notes


def _checked(
    model: Model,
    cells: _Cells,
    variants: Sequence[Variant],
    at: int,
    reading: Reading,
    made: Patched,
    advance: Advance,
) -> Swept:
    """A sweep of which the cell that moves most is computed again alone, every block run; again without savings if off.

    What is saved was tried on the model with a text of its own; this is the same trial on the text at hand.
    """
    found = ""
    for ways in (None, Ways(together=False)):
        swept = sweep(model, cells.own, variants, at, read=reading, ways=ways, advance=advance)
        if not cells.variants:
            return swept
        shares = swept.values[: len(cells.variants), 0]
        most = int(shares.abs().argmax())
        expected = alone(model, cells.own, variants[most], at).double()
        again = float(reading(expected)[0])
        told = float(shares[most])
        if abs((told - again) * reading.span) <= room(model) * float(expected.norm()) * 2**0.5:
            made.check = {"in the sweep": told, "alone": again}
            return swept
        found = f"an effect is {told:.6g} in the sweep and {again:.6g} alone"
        made.notes.append(f"computed one at a time, for in a batch {found}")
    raise PassError(f"Patching {model.name}", found, "Use float32, or report this model.")


def _swaps(cells: _Cells, at: int) -> Iterator[tuple[tuple[str, int], Variant]]:
    """Whole layers from the other run: at one site, and at several in a row.

    Of whole layers the answer's own token is left as it is, for with it everything above would be the other run's. In
    a window of layers the tokens take the other run's states there and their own again above.
    """
    pair, plan = cells.pair, cells.plan
    for row, site in enumerate(plan.sites):
        places = cells.places(site.stack, range(len(pair.columns[site.stack])))
        answers = site.stack != "encoder" and not site.part
        others = [place for place in places if not answers or place[0] != at]
        above = [one for one in plan.sites[row:] if one.stack == site.stack]
        if not others:
            continue
        yield ("swap", row), [cells.exchange(site, others)]
        if len(above) < plan.layers or (site.stack == "encoder" and not site.part):
            continue
        taken = [cells.exchange(one, others) for one in above[: plan.layers]]
        held = [cells.hold(one, others) for one in above[plan.layers :]] if not site.part else []
        yield ("swap_window", row), [*taken, *held]


def _estimate(model: Model, cells: _Cells, reading: Reading, at: int) -> Floats:
    """The gradient's estimate: what each exchange would do if the difference were linear in the state."""
    own, plan = cells.own, cells.plan
    aims = None if own.targets is None else [list(own.targets)]
    made = record(model, [list(own.ids)], list(plan.sites), targets=aims, logits=True, grad=True)
    assert made.logits is not None
    live = [made.live[site] for site in plan.sites]
    slopes = torch.autograd.grad(reading.difference(made.logits[at].double()), live, allow_unused=True)
    found = np.where(cells.there, 0.0, np.nan)
    for (row, column), variant in cells.variants.items():
        slope: Tensor | None = slopes[row]
        site, (one,) = plan.sites[row], variant
        if slope is None:
            continue
        states = model.anatomy.taps[site].layout.states(slope, len(own.fed(site.stack)))[0]
        here = torch.tensor(one.tokens)
        step = one.values.double() - own.states[site][here].double()
        found[row, column] = float((states[here].double() * step).sum()) / reading.span
    return found

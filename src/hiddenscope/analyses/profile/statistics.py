"""One sweep over the states of a site, a few at a time: what each of them is, and what all of them are together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import StatesError
from hiddenscope.measures import Cloud, chunks, effective_rank, two_nn, widened
from hiddenscope.sites import Site
from hiddenscope.states import Readable

Array: TypeAlias = NDArray[np.float32]

CELLS = ("norm", "mean", "deviation", "kurtosis")
RANKS = 5
NONE = -1


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels with the largest values, the largest first: which, what, where, and over the median of them all."""

    channel: NDArray[np.int64]
    value: Array
    times: Array
    row: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Seen:
    """What a sweep leaves of a site.

    `cells` are the numbers of each state by itself, of the first tokens; `along` those of the whole site. `largest` is
    the row of the `highest` norm and `wrong` that of the first state that is not finite, -1 for none.
    """

    cells: Mapping[str, Array]
    along: Mapping[str, float]
    channels: Channels
    sample: Tensor | None
    largest: int
    highest: float
    wrong: int
    not_finite: int


def sampled(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of the rows, in order: the same ones at every site, and every time."""
    if count <= most:
        return np.arange(count)
    return np.sort(torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].numpy())


def sweep(source: Readable, site: Site, below: Site | None, rows: NDArray[np.int64], kept: int, *, shape: bool) -> Seen:
    """Read a site once, in step with the layer below it where there is one, and keep what is said of it.

    `rows` are the sampled tokens, `kept` is how many tokens are told one by one, `shape` whether the states are looked
    at together too.
    """
    first = torch.from_numpy(source.tokens.positions == 0)
    columns = {name: np.full(len(first), np.nan, dtype=np.float32) for name in (*CELLS, "added")}
    finite = np.zeros(len(first), dtype=bool)
    clouds = Cloud(), Cloud()
    peaks, sample = _Peaks(), []
    for start, chunk, under in _in_step(source, site, below):
        wide, here = widened(chunk), slice(start, start + len(chunk))
        for name, numbers in _each(wide).items():
            columns[name][here] = numbers.float().cpu().numpy()
        if under is not None:
            columns["added"][here] = _added(wide, widened(under)).float().cpu().numpy()
        fine = wide.isfinite().all(1).cpu()
        finite[here] = fine.numpy()
        peaks.see(wide[fine], start + fine.nonzero()[:, 0])
        sample.append(chunk[torch.from_numpy(rows[(rows >= start) & (rows < here.stop)] - start)].detach().cpu())
        if shape:
            for cloud, wanted in zip(clouds, (first[here], ~first[here]), strict=True):
                cloud.add(wide[fine & wanted])
    picked = torch.cat(sample)
    along = _along(columns, first.numpy(), finite)
    if shape:
        along |= _together(*clouds) | _dimensions(picked, first[rows])
    norms = np.where(finite, columns["norm"], -1)
    return Seen(
        {name: columns[name][:kept] for name in CELLS},
        along,
        peaks.channels(picked),
        picked if shape else None,
        int(np.argmax(norms)) if finite.any() else NONE,
        float(norms.max()),
        NONE if finite.all() else int(np.argmin(finite)),
        int((~finite).sum()),
    )


def _in_step(source: Readable, site: Site, below: Site | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The states of a site from the first row on, with those of the layer below; as many as there are tokens."""
    start = 0
    under = None if below is None else chunks(source.blocks(below))
    for chunk in chunks(source.blocks(site)):
        beside = None if under is None else next(under, chunk[:0])
        if start + len(chunk) > len(source.tokens) or (beside is not None and beside.shape != chunk.shape):
            break
        yield start, chunk, beside
        start += len(chunk)
    if start != len(source.tokens):
        reason = f"its blocks do not have as many rows as there are tokens, {len(source.tokens):,}, or not of one width"
        raise StatesError(f"The states at {site}", reason, "Give a source with one row a token at every site.")


def _each(wide: Tensor) -> dict[str, Tensor]:
    """What each state is by itself, over its width."""
    mean = wide.mean(1, keepdim=True)
    square = (wide - mean).square()
    variance = square.mean(1)
    return {
        "norm": torch.linalg.vector_norm(wide, dim=1),
        "mean": mean[:, 0],
        "deviation": variance.sqrt(),
        "kurtosis": square.square().mean(1) / variance.square(),
    }


def _added(wide: Tensor, under: Tensor) -> Tensor:
    """How much a block adds to each state: the norm of what it changes over that of what it was given."""
    changed, given = (torch.linalg.vector_norm(rows, dim=1) for rows in (wide - under, under))
    return torch.div(changed, given)


def _along(columns: Mapping[str, Array], first: NDArray[np.bool_], finite: NDArray[np.bool_]) -> dict[str, float]:
    """First tokens against the others: the medians of what each state is."""
    along = {}
    for name, column in columns.items():
        along[f"{name}_first"] = _quantile(column[first & finite], 0.5)
        along[f"{name}_median"] = _quantile(column[~first & finite], 0.5)
    along["norm_low"], along["norm_high"] = (_quantile(columns["norm"][~first & finite], at) for at in (0.25, 0.75))
    return along


def _quantile(numbers: Array, share: float) -> float:
    numbers = numbers[np.isfinite(numbers)]
    return float(np.quantile(numbers, share)) if len(numbers) else float("nan")


def _together(first: Cloud, others: Cloud) -> dict[str, float]:
    every = first + others
    return {
        "anisotropy": every.anisotropy,
        "anisotropy_others": others.anisotropy,
        "effective_rank": effective_rank(every.variances),
        "effective_rank_others": effective_rank(others.variances) if first.count else effective_rank(every.variances),
    }


def _dimensions(picked: Tensor, first: Tensor) -> dict[str, float]:
    fine = picked.isfinite().all(1)
    every = two_nn(widened(picked[fine]))
    others = two_nn(widened(picked[fine & ~first])) if bool(first.any()) else every
    return {"intrinsic_dimension": every, "intrinsic_dimension_others": others}


class _Peaks:
    """The largest value of every channel so far, by size, and the token that has it."""

    def __init__(self) -> None:
        self.values = torch.zeros(0, dtype=torch.float64)
        self.rows = torch.zeros(0, dtype=torch.long)

    def see(self, wide: Tensor, rows: Tensor) -> None:
        if not len(wide):
            return
        at = wide.abs().argmax(0)
        found, where = wide.gather(0, at[None])[0].cpu(), rows[at.cpu()]
        if not len(self.values):
            self.values, self.rows = found, where
            return
        larger = found.abs() > self.values.abs()
        self.values, self.rows = torch.where(larger, found, self.values), torch.where(larger, where, self.rows)

    def channels(self, picked: Tensor) -> Channels:
        """The first few; their times are over the median of all values, by size, of the sampled states."""
        order = self.values.abs().sort(descending=True, stable=True).indices[:RANKS]
        sizes = widened(picked[picked.isfinite().all(1)]).abs().numpy()
        middle = float(np.median(sizes)) if sizes.size else 0.0
        times = self.values[order].abs() / (middle or torch.nan)
        values = self.values[order].float().numpy()
        return Channels(order.numpy(), values, times.float().numpy(), self.rows[order].numpy())

"""The statistics of every site: what each state is by itself, and what the states of a
site are together.

A site is read once, in chunks, and once more in step with the layer above it, so that a
source may be larger than memory; where it has massive activations it is read a third
time, to count them all. The numbers do not depend on how the source is cut into blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import StatesError
from hiddenscope.measures import (
    FEWEST,
    RunningStatistics,
    chunks,
    effective_rank,
    linear_cka,
    two_nn,
    widened,
)
from hiddenscope.sites import Site
from hiddenscope.states import Readable

Array: TypeAlias = NDArray[np.float32]

# Numbers of one variable over site and token, 32 MiB; of a longer source the first
# tokens are kept.
MOST_CELLS = 1 << 23
# Times the median absolute value of a site: what Sun et al. (2024) call a massive
# activation.
MASSIVE = 1000
PER_STATE = ("norm", "mean", "deviation", "kurtosis")
RANKS = 5
NONE = -1


@dataclass(frozen=True, eq=False)
class LargestValues:
    """The channels with the largest absolute values, the largest first, each with that
    value and the row that has it.

    `times` is the value over `median`, the median absolute value of the sampled states.
    """

    channel: NDArray[np.int64]
    value: Array
    times: Array
    row: NDArray[np.int64]
    median: float


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """The statistics of one site.

    `per_state` are those of each of the first tokens, `per_site` those of all.
    `massive` has the row and the channel of every massive activation, `[2, value]`.
    `largest` is the row of the `highest` norm and `first_not_finite` that of the first
    state that is not finite, -1 for none.
    """

    per_state: Mapping[str, Array]
    per_site: Mapping[str, float]
    largest_values: LargestValues
    massive: NDArray[np.int64]
    sample: Tensor | None
    largest: int
    highest: float
    first_not_finite: int
    not_finite: int


@dataclass(frozen=True, eq=False)
class StackStatistics:
    """The statistics of every site of one stack, and the linear CKA of every pair of
    the `compared` sites.

    `rows` are the sampled tokens, `counts` how many of them are finite at every site,
    with and without first tokens.
    """

    source: Readable
    sites: tuple[Site, ...]
    of_site: tuple[SiteStatistics, ...]
    rows: NDArray[np.int64]
    compared: tuple[Site, ...] = ()
    counts: tuple[int, int] = (0, 0)
    cka: Tensor | None = None
    cka_others: Tensor | None = None
    cka_chance: Tensor | None = None

    @property
    def stack(self) -> str | None:
        """The name of the stack, where there are two."""
        return self.sites[0].stack

    @property
    def pooled(self) -> str | None:
        """How the tokens of each text were made one vector; None where every row is a
        token.
        """
        return pooled_as(self.source)

    @property
    def kept(self) -> int:
        """The number of tokens whose statistics are kept one by one."""
        return len(self.of_site[0].per_state["norm"])

    def per_site(self, name: str) -> Array:
        """One number for each site, NaN where it was not measured."""
        return np.array(
            [one.per_site.get(name, np.nan) for one in self.of_site], dtype=np.float32
        )


def pooled_as(source: Readable) -> str | None:
    """How a store of pooled states made the tokens of each text one vector; None where
    every row is a token.
    """
    how = getattr(source, "pooled", None)
    return None if how is None else str(how)


def first_tokens(source: Readable) -> NDArray[np.bool_]:
    """Which rows are first tokens: none of pooled states, whose rows are whole texts."""
    at_start: NDArray[np.bool_] = source.tokens.positions == 0
    return at_start if pooled_as(source) is None else np.zeros_like(at_start)


def stack_statistics(
    source: Readable,
    sites: tuple[Site, ...],
    compared: frozenset[Site],
    sample: int,
    advance: Callable[[float], None],
) -> StackStatistics:
    """The statistics of every site, and of all pairs of the compared ones over at most
    `sample` tokens.
    """
    rows = sampled(len(source.tokens), sample)
    kept = max(1, MOST_CELLS // len(sites))
    of_site = []
    for place, site in enumerate(sites):
        below = (
            sites[place - 1]
            if place and _one_block_apart(sites[place - 1], site)
            else None
        )
        of_site.append(
            site_statistics(source, site, below, rows, kept, together=site in compared)
        )
        advance(1)
    samples = {
        site: one.sample
        for site, one in zip(sites, of_site, strict=True)
        if one.sample is not None
    }
    finite = torch.stack([sample.isfinite().all(1) for sample in samples.values()]).all(
        0
    )
    others = finite & finite.new_tensor(~first_tokens(source)[rows])
    counts = int(finite.sum()), int(others.sum())
    cka, chance = _cka(list(samples.values()), finite)
    cka_others, chance_others = _cka(list(samples.values()), others)
    chance = chance if chance_others is None else chance_others
    return StackStatistics(
        source,
        sites,
        tuple(of_site),
        rows,
        tuple(samples),
        counts,
        cka,
        cka_others,
        chance,
    )


def sampled(count: int, most: int) -> NDArray[np.int64]:
    """At most so many of the rows, in order: the same ones at every site, and every
    time.
    """
    if count <= most:
        return np.arange(count)
    return np.sort(
        torch.randperm(count, generator=torch.Generator().manual_seed(0))[:most].numpy()
    )


def _one_block_apart(below: Site, site: Site) -> bool:
    """Whether one block lies between two sites."""
    whole = not below.part and not site.part
    return whole and below.layer is not None and site.layer == below.layer + 1


def _cka(
    samples: list[Tensor], rows: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The linear CKA of all pairs of sites over some of the sampled tokens, and what
    chance gives; None for too few.
    """
    return (
        linear_cka([sample[rows] for sample in samples])
        if int(rows.sum()) >= FEWEST
        else (None, None)
    )


def site_statistics(
    source: Readable,
    site: Site,
    below: Site | None,
    rows: NDArray[np.int64],
    kept: int,
    *,
    together: bool,
) -> SiteStatistics:
    """Read a site once, in step with the layer below it where there is one.

    `rows` are the sampled tokens, `kept` is how many tokens are kept one by one, and
    `together` says whether the states are also measured together.
    """
    first = torch.from_numpy(first_tokens(source))
    columns = {
        name: np.full(len(first), np.nan, dtype=np.float32)
        for name in (*PER_STATE, "added")
    }
    finite = np.zeros(len(first), dtype=bool)
    running = RunningStatistics(), RunningStatistics()
    peaks, sample = _ChannelPeaks(), []
    for start, chunk, under in _in_step(source, site, below):
        states, here = widened(chunk), slice(start, start + len(chunk))
        for name, numbers in _per_state(states).items():
            columns[name][here] = numbers.float().cpu().numpy()
        if under is not None:
            columns["added"][here] = (
                _added(states, widened(under)).float().cpu().numpy()
            )
        fine = states.isfinite().all(1).cpu()
        finite[here] = fine.numpy()
        peaks.update(states[fine], start + fine.nonzero()[:, 0])
        sample.append(
            chunk[torch.from_numpy(rows[(rows >= start) & (rows < here.stop)] - start)]
            .detach()
            .cpu()
        )
        if together:
            for statistics, which in zip(
                running, (first[here], ~first[here]), strict=True
            ):
                statistics.add(states[fine & which])
    picked = torch.cat(sample)
    per_site = _medians(columns, first.numpy(), finite)
    if together:
        per_site |= _spread(*running) | _dimensions(picked, first[rows])
    norms = np.where(finite, columns["norm"], -1)
    largest_values = peaks.largest(picked)
    return SiteStatistics(
        {name: columns[name][:kept] for name in PER_STATE},
        per_site,
        largest_values,
        _massive(source, site, largest_values),
        picked if together else None,
        int(np.argmax(norms)) if finite.any() else NONE,
        float(norms.max()),
        NONE if finite.all() else int(np.argmin(finite)),
        int((~finite).sum()),
    )


def _in_step(
    source: Readable, site: Site, below: Site | None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The states of a site in chunks, each with its first row and the same rows of the
    layer below.
    """
    start = 0
    under = None if below is None else chunks(source.blocks(below))
    for chunk in chunks(source.blocks(site)):
        beside = None if under is None else next(under, chunk[:0])
        if start + len(chunk) > len(source.tokens) or (
            beside is not None and beside.shape != chunk.shape
        ):
            break
        yield start, chunk, beside
        start += len(chunk)
    if start != len(source.tokens):
        problem = f"The blocks of {site} do not have as many rows as there are tokens"
        reason = (
            f"there are {len(source.tokens):,} tokens, and every site needs a row of"
            " one width for each"
        )
        raise StatesError(
            problem, reason, "Give a source with one row per token at every site."
        )


def _per_state(states: Tensor) -> dict[str, Tensor]:
    """What each state is by itself, over its width."""
    mean = states.mean(1, keepdim=True)
    square = (states - mean).square()
    variance = square.mean(1)
    return {
        "norm": torch.linalg.vector_norm(states, dim=1),
        "mean": mean[:, 0],
        "deviation": variance.sqrt(),
        "kurtosis": square.square().mean(1) / variance.square(),
    }


def _added(states: Tensor, under: Tensor) -> Tensor:
    """What a block adds to each state: the norm of the change over the norm of what it
    was given.
    """
    change, given = (
        torch.linalg.vector_norm(rows, dim=1) for rows in (states - under, under)
    )
    return torch.div(change, given)


def _medians(
    columns: Mapping[str, Array], first: NDArray[np.bool_], finite: NDArray[np.bool_]
) -> dict[str, float]:
    """The medians over first tokens and over the others, and the quartiles of the
    others' norms.
    """
    medians = {}
    for name, column in columns.items():
        medians[f"{name}_first"] = _quantile(column[first & finite], 0.5)
        medians[f"{name}_median"] = _quantile(column[~first & finite], 0.5)
    quartiles = {"norm_low": 0.25, "norm_high": 0.75}
    return medians | {
        name: _quantile(columns["norm"][~first & finite], q)
        for name, q in quartiles.items()
    }


def _quantile(numbers: Array, share: float) -> float:
    numbers = numbers[np.isfinite(numbers)]
    return float(np.quantile(numbers, share)) if len(numbers) else float("nan")


def _spread(first: RunningStatistics, others: RunningStatistics) -> dict[str, float]:
    every = first + others
    return {
        "anisotropy": every.anisotropy,
        "anisotropy_others": others.anisotropy,
        "effective_rank": effective_rank(every.variances),
        "effective_rank_others": (
            effective_rank(others.variances)
            if first.count
            else effective_rank(every.variances)
        ),
    }


def _dimensions(picked: Tensor, first: Tensor) -> dict[str, float]:
    fine = picked.isfinite().all(1)
    every = two_nn(widened(picked[fine]))
    others = two_nn(widened(picked[fine & ~first])) if bool(first.any()) else every
    return {"intrinsic_dimension": every, "intrinsic_dimension_others": others}


class _ChannelPeaks:
    """The largest absolute value of every channel so far, and the row that has it."""

    def __init__(self) -> None:
        self.values = torch.zeros(0, dtype=torch.float64)
        self.rows = torch.zeros(0, dtype=torch.long)

    def update(self, states: Tensor, rows: Tensor) -> None:
        if not len(states):
            return
        at = states.abs().argmax(0)
        values, where = states.gather(0, at[None])[0].cpu(), rows[at.cpu()]
        if not len(self.values):
            self.values, self.rows = values, where
            return
        larger = values.abs() > self.values.abs()
        self.values, self.rows = (
            torch.where(larger, values, self.values),
            torch.where(larger, where, self.rows),
        )

    def largest(self, picked: Tensor) -> LargestValues:
        """The first few, measured by the median absolute value of the sampled states."""
        order = self.values.abs().sort(descending=True, stable=True).indices[:RANKS]
        sizes = widened(picked[picked.isfinite().all(1)]).abs().numpy()
        median = float(np.median(sizes)) if sizes.size else 0.0
        times = self.values[order].abs() / (median or torch.nan)
        values = self.values[order].float().numpy()
        return LargestValues(
            order.numpy(),
            values,
            times.float().numpy(),
            self.rows[order].numpy(),
            median,
        )


def _massive(source: Readable, site: Site, largest: LargestValues) -> NDArray[np.int64]:
    """The rows and channels of all massive activations of a layer, `[2, value]`.

    The median is known only when the site has been read, so a site whose largest value
    is massive is read again. The final norm scales channels one by one, so `final` is
    not asked.
    """
    places: list[Tensor] = [torch.zeros(0, 2, dtype=torch.long)]
    if site.layer is not None and len(largest.times) and largest.times[0] >= MASSIVE:
        for start, chunk, _ in _in_step(source, site, None):
            states = widened(chunk)
            massive = (
                states.abs() >= MASSIVE * largest.median
            ) & states.isfinite().all(1, keepdim=True)
            places.append(massive.nonzero().cpu() + torch.tensor([start, 0]))
    return torch.cat(places).T.numpy()

"""Statistics of every site: of each state by itself, and of all its states together.

A site is read once, in chunks, and once more in step with the layer above it, so that a
source may be larger than memory; where it has massive activations it is read a third
time, to count them all. The numbers do not depend on how the source is cut into blocks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
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
from hiddenscope.states.arrays import Bools, Floats32, Ints
from hiddenscope.vectors.pooled import pooled_as

# Numbers of one variable over site and token, 32 MiB; of a longer source the first
# tokens are kept.
MOST_CELLS = 1 << 23
# Times the median absolute value of a site: what Sun et al. (2024) call a massive
# activation.
MASSIVE = 1000
PER_STATE = ("norm", "mean", "deviation", "kurtosis")
RANKS = 5
NONE = -1
# States of one text in two batches differ by less, as units of rounding and as a share.
ROUNDING_ULPS = 64
MOST_ROUNDING = 0.02


@dataclass(frozen=True, eq=False)
class LargestValues:
    """The channels with the largest absolute values, the largest first.

    Each comes with that value and with its row. `times` is the value over `median`, the
    median absolute value of the sampled states.
    """

    channel: Ints
    value: Floats32
    times: Floats32
    row: Ints
    median: float


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """The statistics of one site.

    `per_state` are those of each of the first tokens, `per_site` those of all.
    `massive` has the row and the channel of every massive activation, `[2, value]`.
    `largest` is the row of the `highest` norm and `first_not_finite` that of the first
    state that is not finite, -1 for none.
    """

    per_state: Mapping[str, Floats32]
    per_site: Mapping[str, float]
    largest_values: LargestValues
    massive: Ints
    sample: Tensor | None
    largest: int
    highest: float
    first_not_finite: int
    not_finite: int


@dataclass(frozen=True, eq=False)
class StackStatistics:
    """The statistics of one stack, and the CKA of every pair of `compared` sites.

    `counts` says how many of the sampled tokens are finite at every site, with and
    without first tokens.
    """

    source: Readable
    sites: tuple[Site, ...]
    by_site: tuple[SiteStatistics, ...]
    compared: tuple[Site, ...] = ()
    counts: tuple[int, int] = (0, 0)
    cka: Tensor | None = None
    cka_others: Tensor | None = None
    cka_chance: Tensor | None = None

    @property
    def stack(self) -> str | None:
        """Return the name of the stack, where there are two."""
        return self.sites[0].stack

    @property
    def pooled(self) -> str | None:
        """Return the pooling of the source; None where every row is a token."""
        pooling = pooled_as(self.source)
        return None if pooling is None else str(pooling)

    @property
    def stored_tokens(self) -> int:
        """Return the number of tokens whose statistics are stored one by one."""
        return len(self.by_site[0].per_state["norm"])

    def per_site(self, name: str) -> Floats32:
        """Return one number for each site, NaN where it was not measured."""
        numbers = [site.per_site.get(name, np.nan) for site in self.by_site]
        return np.array(numbers, dtype=np.float32)


def mark_first_tokens(source: Readable) -> Bools:
    """Mark the rows that are first tokens; rows of pooled states are whole texts."""
    at_start: Bools = source.tokens.positions == 0
    if pooled_as(source) is not None:
        return np.zeros_like(at_start)
    return at_start


def stack_statistics(
    source: Readable,
    sites: tuple[Site, ...],
    compared: frozenset[Site],
    sample: int,
    advance: Callable[[float], None],
) -> StackStatistics:
    """Measure every site, and all pairs of the compared ones on a sample of tokens."""
    rows = sampled(len(source.tokens), sample)
    most_rows = max(1, MOST_CELLS // len(sites))
    by_site = []
    samples = {}
    below = None
    for site in sites:
        # What a block adds is measured where two layers follow one another.
        if site.part or (below is not None and site.layer != (below.layer or 0) + 1):
            below = None
        statistics = site_statistics(
            source, site, below, rows, most_rows, together=site in compared
        )
        by_site.append(statistics)
        if statistics.sample is not None:
            samples[site] = statistics.sample
        below = None if site.part or site.layer is None else site
        advance(1)
    # CKA compares the same tokens at all sites.
    finite_rows = [states.isfinite().all(1) for states in samples.values()]
    finite = torch.stack(finite_rows).all(0)
    others = finite & finite.new_tensor(~mark_first_tokens(source)[rows])
    # First tokens are so large that they hide the others: everything that is measured
    # together is measured once more without them.
    cka, chance = _cka(list(samples.values()), finite)
    cka_others, chance_others = _cka(list(samples.values()), others)
    return StackStatistics(
        source,
        sites,
        tuple(by_site),
        tuple(samples),
        (int(finite.sum()), int(others.sum())),
        cka,
        cka_others,
        chance if chance_others is None else chance_others,
    )


def sampled(count: int, most: int) -> Ints:
    """Sample at most so many rows, in order: the same ones at every site and time."""
    if count <= most:
        return np.arange(count)
    generator = torch.Generator().manual_seed(0)
    return np.sort(torch.randperm(count, generator=generator)[:most].numpy())


def _cka(
    samples: list[Tensor], rows: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the linear CKA of all pairs of sites, and what chance gives.

    It is over some of the sampled tokens; None for too few.
    """
    if int(rows.sum()) < FEWEST:
        return None, None
    return linear_cka([states[rows] for states in samples])


def site_statistics(
    source: Readable,
    site: Site,
    below: Site | None,
    rows: Ints,
    most_rows: int,
    *,
    together: bool,
) -> SiteStatistics:
    """Read a site once, in step with the layer below it where there is one.

    `rows` are the sampled tokens, the first `most_rows` tokens are stored one by one,
    and `together` says whether the states are also measured together.
    """
    first = torch.from_numpy(mark_first_tokens(source))
    columns = {
        name: np.full(len(first), np.nan, dtype=np.float32)
        for name in (*PER_STATE, "added")
    }
    finite = np.zeros(len(first), dtype=bool)
    running_first, running_others = RunningStatistics(), RunningStatistics()
    peaks = _ChannelPeaks()
    samples = []
    for start, chunk, under in in_step(source, site, below):
        states = widened(chunk)
        here = slice(start, start + len(chunk))
        for name, numbers in _per_state(states).items():
            columns[name][here] = numbers.float().cpu().numpy()
        if under is not None:
            # What the block adds, over what it was given.
            wide_under = widened(under)
            change = torch.linalg.vector_norm(states - wide_under, dim=1)
            added = change / torch.linalg.vector_norm(wide_under, dim=1)
            columns["added"][here] = added.float().cpu().numpy()
        # One state that is not finite would make every sum of its site so.
        fine = states.isfinite().all(1).cpu()
        finite[here] = fine.numpy()
        peaks.update(states[fine], start + fine.nonzero()[:, 0])
        # The sample stays in the dtype of the source: float64 may take four times the
        # memory, and the samples of all sites are held.
        sample_rows = rows[(rows >= start) & (rows < here.stop)] - start
        samples.append(chunk[torch.from_numpy(sample_rows)].detach().cpu())
        if together:
            running_first.add(states[fine & first[here]])
            running_others.add(states[fine & ~first[here]])
    sample = torch.cat(samples)
    first_rows = first.numpy() & finite
    other_rows = ~first.numpy() & finite
    per_site = {}
    for name, column in columns.items():
        per_site[f"{name}_first"] = _quantile(column[first_rows], 0.5)
        per_site[f"{name}_median"] = _quantile(column[other_rows], 0.5)
    norms = columns["norm"][other_rows]
    per_site["norm_low"] = _quantile(norms, 0.25)
    per_site["norm_high"] = _quantile(norms, 0.75)
    if together:
        per_site |= _spread(running_first, running_others)
        fine = sample.isfinite().all(1)
        sampled_first = first[rows]
        # Norms compute in float32 in a float64 model too.
        types = sample.dtype, torch.float32
        unit = max(torch.finfo(dtype).eps for dtype in types)
        rounding = min(MOST_ROUNDING, ROUNDING_ULPS * unit)
        per_site["intrinsic_dimension"] = two_nn(sample[fine], rounding)
        per_site["intrinsic_dimension_others"] = per_site["intrinsic_dimension"]
        if sampled_first.any():
            others = two_nn(sample[fine & ~sampled_first], rounding)
            per_site["intrinsic_dimension_others"] = others
    largest = first_not_finite = NONE
    norms = np.where(finite, columns["norm"], -1)
    if finite.any():
        largest = int(np.argmax(norms))
    if not finite.all():
        first_not_finite = int(np.argmin(finite))
    largest_values = peaks.largest(sample)
    return SiteStatistics(
        per_state={name: columns[name][:most_rows] for name in PER_STATE},
        per_site=per_site,
        largest_values=largest_values,
        massive=_massive(source, site, largest_values),
        sample=sample if together else None,
        largest=largest,
        highest=float(norms.max()),
        first_not_finite=first_not_finite,
        not_finite=int((~finite).sum()),
    )


def in_step(
    source: Readable, site: Site, below: Site | None
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """Yield chunks of a site: first row, states, and states of the layer below."""
    start = 0
    count = len(source.tokens)
    below_chunks = None if below is None else chunks(source.blocks(below))
    for chunk in chunks(source.blocks(site)):
        under = None
        if below_chunks is not None:
            under = next(below_chunks, chunk[:0])
            if under.shape != chunk.shape:
                break
        if start + len(chunk) > count:
            break
        yield start, chunk, under
        start += len(chunk)
    if start != count:
        raise StatesError(
            f"The blocks of {site} do not have as many rows as there are tokens",
            f"there are {count:,} tokens, and every site needs a row of one width for"
            " each",
            "Give a source with one row per token at every site.",
        )


def _per_state(states: Tensor) -> dict[str, Tensor]:
    """Measure each state by itself, over its width."""
    mean = states.mean(1, keepdim=True)
    square = (states - mean).square()
    variance = square.mean(1)
    return {
        "norm": torch.linalg.vector_norm(states, dim=1),
        "mean": mean[:, 0],
        "deviation": variance.sqrt(),
        "kurtosis": square.square().mean(1) / variance.square(),
    }


def _quantile(numbers: Floats32, share: float) -> float:
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return float("nan")
    return float(np.quantile(numbers, share))


def _spread(first: RunningStatistics, others: RunningStatistics) -> dict[str, float]:
    """Measure how the states of a site spread, with and without first tokens."""
    every = first + others
    rank = rank_others = effective_rank(every.variances)
    if first.count:
        rank_others = effective_rank(others.variances)
    return {
        "anisotropy": every.anisotropy,
        "anisotropy_others": others.anisotropy,
        "effective_rank": rank,
        "effective_rank_others": rank_others,
    }


class _ChannelPeaks:
    """The largest absolute value of every channel so far, and the row that has it."""

    def __init__(self) -> None:
        self.values = torch.zeros(0, dtype=torch.float64)
        self.rows = torch.zeros(0, dtype=torch.long)

    def update(self, states: Tensor, rows: Tensor) -> None:
        """Take some more states into account."""
        if not len(states):
            return
        places = states.abs().argmax(0)
        values = states.gather(0, places[None])[0].cpu()
        value_rows = rows[places.cpu()]
        if len(self.values):
            higher = values.abs() > self.values.abs()
            values = torch.where(higher, values, self.values)
            value_rows = torch.where(higher, value_rows, self.rows)
        self.values = values
        self.rows = value_rows

    def largest(self, sample: Tensor) -> LargestValues:
        """Return the first few, relative to the median of the sampled states."""
        order = self.values.abs().sort(descending=True, stable=True).indices[:RANKS]
        sizes = widened(sample[sample.isfinite().all(1)]).abs().numpy()
        median = float(np.median(sizes)) if sizes.size else 0.0
        values = self.values[order]
        times = values.abs() / (median or torch.nan)
        return LargestValues(
            order.numpy(),
            values.float().numpy(),
            times.float().numpy(),
            self.rows[order].numpy(),
            median,
        )


def _massive(source: Readable, site: Site, largest: LargestValues) -> Ints:
    """Return the rows and channels of all massive activations, `[2, value]`.

    The median is known only when the site has been read, so a site whose largest value
    is massive is read again. The final norm scales channels one by one, so `final` has
    none.
    """
    places = [torch.zeros(0, 2, dtype=torch.long)]
    if site.layer is not None and len(largest.times) and largest.times[0] >= MASSIVE:
        for start, chunk, _ in in_step(source, site, None):
            states = widened(chunk)
            finite = states.isfinite().all(1, keepdim=True)
            massive = (states.abs() >= MASSIVE * largest.median) & finite
            places.append(massive.nonzero().cpu() + torch.tensor([start, 0]))
    return torch.cat(places).T.numpy()

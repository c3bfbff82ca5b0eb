"""Neurons of every layer: how strongly they act, and on how few tokens.

The sums that the measures are made of are kept for each of a few batches of texts, and
every measure is computed again without each batch: memory does not grow with the number
of texts, and intervals come from how much the batches differ. First tokens are left
out, since many models rest their attention there and their values dwarf all others; so
are copies of a text.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.analyses.profile.statistics import (
    NONE,
    in_step,
    mark_first_tokens,
)
from hiddenscope.analyses.profile.story import (
    NEURON_MEASURES,
    NeuronGap,
    NeuronProfile,
    NeuronVerdict,
)
from hiddenscope.linear.trend import degree_of, departure
from hiddenscope.measures import widened
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Readable
from hiddenscope.states.arrays import Floats, Ints
from hiddenscope.texts.groups import copy_key, merged_groups

BATCHES = 20
LEVEL = 0.95
# Types are compared by their means: too few tokens of a type would be all noise.
FEWEST_OF_TYPE = 20
MOST_TYPES = 64
# An entropy over fewer types says little.
FEWEST_TYPES = 5
# A neuron is active where it reaches this share of its own root mean square.
ACTIVE = 0.5
PEAK = 0.99
# Values that vary by less, relative to their mean square, vary by rounding.
CONSTANT = 1e-12
TRENDS: Mapping[int, Literal["line", "parabola"]] = {1: "line", 2: "parabola"}


@dataclass(frozen=True, eq=False)
class TokenDesign:
    """The batch and the type of every row; -1 for rows that do not count.

    `kind` is the number of a frequent token type, of which there are `kinds`.
    """

    batch: Ints
    kind: Ints
    kinds: int
    texts: int
    groups: int

    @property
    def sizes(self) -> Floats:
        """Return the number of tokens of each batch."""
        return np.bincount(self.batch[self.batch != NONE]).astype(float)


def is_neurons(site: Site) -> bool:
    """Tell whether a site holds the neurons of an MLP."""
    return site.kind == "mlp.neurons"


def write_sites(site: Site) -> tuple[Site, Site]:
    """Return what the neurons of a site add to the stream, and to what."""
    return Site(site.layer, "mlp", site.stack), Site(site.layer, "mid", site.stack)


def design_tokens(
    source: Readable, texts: Sequence[Any], groups: Sequence[Any] | None
) -> TokenDesign:
    """Deal groups of texts to batches, and find the frequent types of tokens.

    `texts` are strings or lists of ids. The order of texts means nothing.
    """
    tokens = source.tokens
    counted = ~mark_first_tokens(source)
    keys = [copy_key(text) for text in texts]
    names = merged_groups(keys, groups)
    originals = set()
    is_first = np.zeros(tokens.count, dtype=bool)
    has_tokens = np.bincount(tokens.text[counted], minlength=tokens.count) > 0
    for text in np.flatnonzero(has_tokens).tolist():
        is_first[text] = keys[text] not in originals
        originals.add(keys[text])
    counted = counted & is_first[tokens.text]
    used = sorted({names[text] for text in np.flatnonzero(is_first)})
    places = {name: place % BATCHES for place, name in enumerate(used)}
    batch_of = np.array([places.get(name, NONE) for name in names], dtype=np.int64)
    ids, places_of, counts = np.unique(
        tokens.ids[counted], return_inverse=True, return_counts=True
    )
    # The most frequent first, by id where two are as frequent.
    order = np.argsort(-counts, kind="stable")[:MOST_TYPES]
    frequent = order[counts[order] >= FEWEST_OF_TYPE]
    numbers = np.full(len(ids), NONE)
    numbers[frequent] = np.arange(len(frequent))
    kind = np.full(len(tokens), NONE)
    kind[counted] = numbers[places_of]
    batch = np.where(counted, batch_of[tokens.text], NONE)
    return TokenDesign(batch, kind, len(frequent), int(is_first.sum()), len(used))


def measure_neurons(source: Readable, site: Site, design: TokenDesign) -> Floats:
    """Measure the neurons of a site: over all tokens, then without each batch.

    The array is `[1 + batch, measure]`, NaN for what cannot be measured. The site is
    read twice, because the share of active tokens needs the root mean squares.
    """
    sums, peaks = _sums(source, site, design)
    sums["peak"] = _by_batch(peaks, design)
    sums["write"] = _by_batch(_written(source, site, len(peaks)), design)
    total = {name: values.sum(0) for name, values in sums.items()}
    parts = [total]
    for batch in range(len(design.sizes)):
        parts.append({name: total[name] - sums[name][batch] for name in sums})
    # What a token must reach, `[1 + batch, neuron]`, and how many tokens reach it: all
    # of them, and those outside each batch.
    limits = [ACTIVE * (part["square"] / part["count"]).sqrt() for part in parts]
    active = torch.zeros_like(torch.stack(limits))
    for here, counted, states in _rows(source, site, design):
        sizes = states.abs()
        batch_of = torch.from_numpy(design.batch[here])[counted]
        for number, limit in enumerate(limits):
            # A product adds up faster than a sum of truth values.
            outside = (batch_of != number - 1).float()
            active[number] += outside @ (sizes >= limit).float()
    # Sums without a batch are off by rounding: what is below this share of the mean
    # square over all tokens is 0.
    nothing = CONSTANT * total["square"] / total["count"]
    rows = []
    for part, active_count in zip(parts, active, strict=True):
        count = part["count"]
        size, square = part["size"] / count, part["square"] / count
        mean, second, third, fourth = (
            part[f"power{power}"] / count for power in (1, 2, 3, 4)
        )
        variance = second - mean**2
        scatter = fourth - 4 * mean * third + 6 * mean**2 * second - 3 * mean**4
        # A neuron that never changes has no kurtosis, one that is always 0 nothing at
        # all.
        changes = variance > nothing
        alive = square > nothing
        peak, write = (
            float(part[name][0] / part[name][1]) for name in ("peak", "write")
        )
        rows.append(
            [
                float(size.mean()),
                peak,
                write,
                _median(scatter / variance**2, changes),
                _median((1 - size**2 / square) / (1 - 1 / count), alive),
                _median(active_count / count, alive),
                _median(_entropy(part["kinds"], part["kind_counts"]), alive),
            ]
        )
    return np.array(rows)


def _rows(
    source: Readable, site: Site, design: TokenDesign
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks: their rows, which of them count, and those in float64."""
    for start, chunk, _ in in_step(source, site, None):
        states = widened(chunk).cpu()
        here = slice(start, start + len(chunk))
        counted = torch.from_numpy(design.batch[here] != NONE)
        counted &= states.isfinite().all(1)
        yield here, counted, states[counted]


def _sums(
    source: Readable, site: Site, design: TokenDesign
) -> tuple[dict[str, Tensor], Floats]:
    """Return sums `[batch, ...]`, and the 99th percentile of each row's sizes."""
    batches, kinds = len(design.sizes), design.kinds
    peaks = np.full(len(design.batch), np.nan)
    sums: dict[str, Tensor] = {}
    origin = None
    for here, counted, states in _rows(source, site, design):
        sizes = states.abs()
        if not sums:
            width = states.shape[1]
            zeros = states.new_zeros(batches, width)
            names = ("size", "square", "power1", "power2", "power3", "power4")
            sums = {name: zeros.clone() for name in names}
            sums["count"] = zeros[:, :1].clone()
            sums["kinds"] = zeros.new_zeros(batches * kinds, width)
            sums["kind_counts"] = zeros.new_zeros(batches * kinds, 1)
        if not len(states):
            continue
        if origin is None:
            # Powers of what is near zero do not cancel.
            origin = states.mean(0)
        away = states - origin
        batch = torch.from_numpy(design.batch[here])[counted]
        kind = torch.from_numpy(design.kind[here])[counted]
        peaks[here][counted.numpy()] = np.quantile(sizes.numpy(), PEAK, axis=1)
        ones = torch.ones_like(sizes[:, :1])
        values = {"count": ones, "size": sizes, "square": sizes.square()}
        for name, numbers in values.items():
            sums[name].index_add_(0, batch, numbers)
        power = torch.ones_like(away)
        for exponent in (1, 2, 3, 4):
            power *= away
            sums[f"power{exponent}"].index_add_(0, batch, power)
        known = kind != NONE
        place = (batch * kinds + kind)[known]
        sums["kinds"].index_add_(0, place, sizes[known])
        sums["kind_counts"].index_add_(0, place, ones[known])
    for name in ("kinds", "kind_counts"):
        sums[name] = sums[name].view(batches, kinds, sums[name].shape[1])
    return sums, peaks


def _by_batch(column: Floats, design: TokenDesign) -> Tensor:
    """Return the sum of a number of each row and its count, `[batch, 2]`."""
    known = np.isfinite(column) & (design.batch != NONE)
    batch, count = design.batch[known], len(design.sizes)
    both = [
        np.bincount(batch, column[known], minlength=count),
        np.bincount(batch, minlength=count),
    ]
    return torch.from_numpy(np.stack(both, 1).astype(float))


def _written(source: Readable, site: Site, count: int) -> Floats:
    """Return the norm of what the MLP adds over that of what it is added to."""
    added, stream = write_sites(site)
    shares = np.full(count, np.nan)
    if added not in source.sites or stream not in source.sites:
        return shares
    for start, chunk, under in in_step(source, added, stream):
        assert under is not None, "two sites were asked for"
        written = torch.linalg.vector_norm(widened(chunk), dim=1)
        share = written / torch.linalg.vector_norm(widened(under), dim=1)
        shares[start : start + len(chunk)] = share.cpu().numpy()
    return shares


def _entropy(by_kind: Tensor, counts: Tensor) -> Tensor:
    """Return the entropy over types, 1 where all have the same mean."""
    present = counts[:, 0] > 0
    if int(present.sum()) < FEWEST_TYPES:
        return torch.full_like(by_kind.sum(0), torch.nan)
    means = by_kind[present] / counts[present]
    shares = means / means.sum(0)
    entropy: Tensor = torch.special.entr(shares).sum(0) / float(np.log(len(means)))
    return entropy


def _median(values: Tensor, known: Tensor) -> float:
    """Return the median of the known values; of an even number, the mean of two."""
    numbers = values[known].numpy()
    return float(np.median(numbers)) if len(numbers) else float("nan")


class NeuronStatistics(NamedTuple):
    """What was measured of the neurons of a stack.

    `values` are `[site, 1 + batch, measure]`, as `measure_neurons` returns them.
    """

    sites: tuple[Site, ...]
    design: TokenDesign
    values: Floats

    @property
    def scaled(self) -> Floats:
        """Return the values on the scale of their differences."""
        logs = [measure.factor for measure in NEURON_MEASURES.values()]
        scaled = self.values.copy()
        # What is 0 has no logarithm, and no interval.
        scaled[..., logs] = np.log(np.where(scaled > 0, scaled, np.nan)[..., logs])
        return scaled

    @property
    def freedom(self) -> float:
        """Return the degrees of freedom; batches of unequal size count for fewer."""
        sizes = self.design.sizes
        return max(1.0, float(sizes.sum() ** 2 / (sizes**2).sum()) - 1)

    def errors(self, values: Floats) -> Floats:
        """Return the jackknife errors of `[1 + batch, ...]`; NaN for a single batch."""
        without = values[1:]
        if len(without) < 2:
            return np.full(values.shape[1:], np.nan)
        errors: Floats = np.sqrt((len(without) - 1) * without.var(0))
        return errors

    @property
    def intervals(self) -> tuple[Floats, Floats, Floats]:
        """Return every measure of every site, and the ends of its interval over texts.

        All are `[site, measure]`.
        """
        scaled = np.moveaxis(self.scaled, 1, 0)
        half = _quantile(self.freedom) * self.errors(scaled)
        ends = []
        for number, measure in enumerate(NEURON_MEASURES.values()):
            both = np.stack([scaled[0] - half, scaled[0] + half])[..., number]
            ends.append(np.exp(both) if measure.factor else np.clip(both, 0, 1))
        low, high = np.stack(ends, -1)
        return self.values[:, 0], low, high


def _quantile(freedom: float) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + LEVEL) / 2, freedom))


def compare_last(statistics: NeuronStatistics) -> NeuronProfile:
    """Compare the last of the sites with the one before, and with their trend."""
    sites, design = statistics.sites, statistics.design
    before = []
    trend = []
    degree = degree_of(len(sites) - 1)
    if len(sites) > 1 and design.groups > 1:
        steps = statistics.scaled[-1] - statistics.scaled[-2]
        columns = zip(NEURON_MEASURES, steps[0], statistics.errors(steps), strict=True)
        gaps = [_Gap(*column, statistics.freedom) for column in columns]
        before = list(_corrected(gaps))
        if degree is not None:
            trend = list(_corrected(_gaps_from_trend(statistics, degree)))
    return NeuronProfile(
        sites=summarise(sites),
        last=str(sites[-1]),
        previous=str(sites[-2]) if len(sites) > 1 else None,
        tokens=int(design.sizes.sum()),
        texts=design.texts,
        groups=design.groups,
        types=design.kinds,
        trend=TRENDS[degree] if trend and degree else None,
        against_previous=before,
        against_trend=trend,
    )


class _Gap(NamedTuple):
    """A difference on the scale of its measure, with its error."""

    measure: str
    value: float
    error: float
    freedom: float

    @property
    def p(self) -> float:
        from scipy.stats import t

        if not self.error > 0:
            return float("nan")
        return float(2 * t.sf(abs(self.value) / self.error, self.freedom))


def _gaps_from_trend(statistics: NeuronStatistics, degree: int) -> Iterator[_Gap]:
    """Yield how far the last site is from where the others lead.

    Both errors count: that of the prediction, and that over texts.
    """
    places = np.array([site.layer for site in statistics.sites], dtype=float)
    for number, name in enumerate(NEURON_MEASURES):
        numbers = statistics.scaled[..., number]
        if not np.isfinite(numbers).all():
            continue
        last = departure(places, numbers[:, 0], degree)
        gaps = last.weights @ numbers
        variances = np.array([last.error, float(statistics.errors(gaps))]) ** 2
        freedoms = np.array([last.freedom, statistics.freedom])
        # Welch and Satterthwaite: the degrees of freedom of a sum of variances.
        freedom = variances.sum() ** 2 / (variances**2 / freedoms).sum()
        error = np.sqrt(variances.sum())
        yield _Gap(name, gaps[0], error, freedom)


def _corrected(gaps: Iterable[_Gap]) -> Iterator[NeuronGap]:
    """Correct p over the measures (Holm 1979), and say what was found."""
    known = [gap for gap in gaps if np.isfinite(gap.p)]
    corrected = {}
    highest = 0.0
    for place, gap in enumerate(sorted(known, key=lambda gap: gap.p)):
        highest = max(highest, min(1.0, (len(known) - place) * gap.p))
        corrected[gap.measure] = highest
    for gap in known:
        measure = NEURON_MEASURES[gap.measure]
        half = _quantile(gap.freedom) * gap.error
        ends = np.array([gap.value, gap.value - half, gap.value + half])
        value, low, high = (np.exp(ends) if measure.factor else ends).tolist()
        p = corrected[gap.measure]
        verdict: NeuronVerdict = "undecided"
        if p < 1 - LEVEL:
            verdict = "more" if (gap.value > 0) == measure.rises else "less"
        yield NeuronGap(
            measure=gap.measure,
            aspect=measure.aspect,
            value=value,
            low=low,
            high=high,
            p=p,
            verdict=verdict,
        )

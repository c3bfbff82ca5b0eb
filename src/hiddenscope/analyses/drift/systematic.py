"""Test for systematic differences below the rounding error of any single token.

Sound programs round differently: what separates them at one token says nothing about
the next. A fault (a weight scaled by 1.02, a bias that is a little off) moves every
token by a fixed function of its state. So the difference is averaged over many tokens
along three patterns: one factor for the whole output (`scale`), a constant in every
channel (`bias`), and a linear map of the leading components of the output (`linear`).
Rounding averages out and the fault stays.

Sound programs leave a small systematic part, too: a rounding error of the first token
is attended to by every later one, and a weight that is folded into another is rounded
once more. A pattern therefore counts only beyond a bar: its sampling error, what
rounding leaves of it in the reference itself (measured against float64), and a floor in
units of rounding that was calibrated on sound pairs (docs/faults.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Distinct rows from which channel weights and leading components are computed. Later
# rows only add to sums.
CALIBRATION_ROWS = 128
# With fewer distinct rows there is no verdict.
FEWEST_ROWS = 24
# Wider outputs (logits) are tested on this many channels, spread evenly.
MOST_CHANNELS = 2048
COMPONENTS = 4
# Rows with less energy than this share of the median are weighted like such a row.
SMALLEST_ROW = 1e-6
# Neighbouring tokens share rounding errors through attention, so runs of rows go to one
# fold.
FOLDS = 8
RUN = 4
# Standard errors that a pattern must exceed. A pair of models has hundreds of parts
# with three patterns each.
Z_SCALE, Z_SQUARED = 6.0, 8.0
# More than any sound program leaves of each pattern, in units of rounding.
# docs/faults.md lists the worst of them.
FLOORS = {"scale": 0.25, "bias": 1.0, "linear": 1.25}
# How far the candidate may exceed what rounding leaves of a pattern in the reference.
ROUNDING_MARGIN = 3.0
# How much of a systematic part in all directions may lie along the output by chance.
CHANCE_SCALE = 0.75
# Sums of float32 are accumulated in float32, so another order of a long sum costs
# several units of rounding, and the exponentials of a GPU differ from those of a CPU by
# about two, the same at every token: on CUDA sound pairs came up to 2.6 times the bar
# with a factor of 16. Narrower dtypes are accumulated in float32 and rounded once.
ACCUMULATION = 128.0
_TINY = 1e-200


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype with the fewest digits."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Pattern:
    """A systematic pattern: its size as a share of the output, and the bar for it.

    Sound programs show a pattern up to its bar.
    """

    name: str
    size: float
    bar: float

    @property
    def beyond(self) -> float:
        """Return how many times the size exceeds the bar."""
        return abs(self.size) / self.bar


@dataclass(frozen=True)
class Finding:
    """The patterns in `rows` distinct rows; none if the rows were too few."""

    rows: int
    patterns: tuple[Pattern, ...] = ()

    @property
    def strongest(self) -> Pattern:
        """Return the pattern that exceeds its bar most."""
        nothing = Pattern("none", 0.0, math.inf)
        return max(self.patterns, key=lambda pattern: pattern.beyond, default=nothing)

    @property
    def size(self) -> float:
        """Return the size of the strongest pattern; a scale has a sign."""
        return self.strongest.size

    @property
    def beyond(self) -> float:
        """Return how many times the strongest pattern exceeds its bar."""
        return self.strongest.beyond

    @property
    def smallest(self) -> float:
        """Return the smallest systematic difference that these rows could show."""
        return min((pattern.bar for pattern in self.patterns), default=math.inf)


class SystematicTest:
    """A test of one part of a model, on rows that arrive batch by batch.

    >>> generator = torch.Generator().manual_seed(0)
    >>> exact = torch.randn(300, 64, generator=generator, dtype=torch.float64)
    >>> test = SystematicTest(64)
    >>> test.add(exact.bfloat16(), (1.005 * exact).bfloat16(), exact)
    >>> finding = test.result()
    >>> finding.beyond > 1, finding.strongest.name, round(finding.size, 3)
    (True, 'scale', 0.005)
    """

    def __init__(self, width: int, dtype: torch.dtype | None = None) -> None:
        self._channels = slice(None, None, math.ceil(width / MOST_CHANNELS))
        self._dtype = dtype
        self._row_keys: set[str] = set()
        # Each [3, row, width]: of the reference, the candidate, and in float64.
        self._waiting: list[Tensor] = []
        self._sums: _Sums | None = None

    def add(self, reference: Tensor, candidate: Tensor, exact: Tensor) -> None:
        """Add rows [row, width] of both programs, and of the reference in float64.

        They may be on any device and in any dtype. Unless the test has a dtype, the
        coarser dtype of the first batch counts as the one both were computed in.
        """
        if self._dtype is None:
            self._dtype = coarsest([reference.dtype, candidate.dtype])
        # Channels are selected before rows leave their device: logits are wide.
        selected = []
        for values in (reference, candidate, exact):
            channels = values.detach()[:, self._channels]
            selected.append(channels.to("cpu", torch.float64))
        rows = torch.stack(selected)
        # Repeated rows are dropped: their equal rounding errors would look systematic.
        finite = rows.sum(0).isfinite().all(1).tolist()
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(rows.shape[2], generator=generator, dtype=torch.float64)
        numbers = []
        for number, projection in enumerate((rows[2] @ direction).tolist()):
            # Batches of another shape differ in the last digits of float64.
            key = f"{projection:.10e}"
            if key not in self._row_keys and finite[number]:
                self._row_keys.add(key)
                numbers.append(number)
        self._waiting.append(rows[:, numbers])
        if self._sums is not None or len(self._row_keys) >= CALIBRATION_ROWS:
            self._flush()

    def result(self) -> Finding:
        """Return the finding of the rows so far."""
        if self._sums is None and len(self._row_keys) < FEWEST_ROWS:
            return Finding(len(self._row_keys))
        return self._flush().finding()

    def _flush(self) -> _Sums:
        """Add waiting rows to the sums; the first rows calibrate these."""
        if self._waiting:
            rows = torch.cat(self._waiting, 1)
            self._waiting = []
            if self._sums is None:
                assert self._dtype is not None
                self._sums = _Sums(rows[:, :CALIBRATION_ROWS], self._dtype)
            self._sums.add(rows)
        assert self._sums is not None
        return self._sums


class _Sums:
    """Sums over rows from which every pattern is estimated.

    They are kept for the difference, for the reference's rounding and for the output,
    in this order.
    """

    def __init__(self, calibration: Tensor, dtype: torch.dtype) -> None:
        self.unit = torch.finfo(dtype).eps / 2
        self.accumulation = ACCUMULATION if torch.finfo(dtype).bits >= 32 else 1.0
        # The rounding error of every channel: otherwise a channel of massive
        # activations would decide.
        reference, _, exact = calibration.unbind()
        channel_size = exact.abs().mean(0).clamp_min(_TINY)
        # A token of massive activations would decide as well, so rows are scaled first.
        row_size = (exact / channel_size).square().mean(1, keepdim=True)
        row_size = row_size.clamp_min(SMALLEST_ROW * float(row_size.median()))
        noise = self._expected_noise(reference - exact, exact)
        squared = (noise / row_size.clamp_min(_TINY)).mean(0)
        # A channel of nearly no noise would count more than all others.
        squared = squared.clamp_min(float(squared.median()) / 4)
        self.channel_noise = squared.clamp_min(_TINY).sqrt()
        (_, _, output), constant = self._whitened(calibration)
        self.components = _leading_directions(output)
        self.sizes = {}
        for name, feature in self._features(output, constant).items():
            self.sizes[name] = feature.square().mean(0).clamp_min(_TINY).sqrt()
        self.rows = 0
        self.rounding_energy = 0.0
        # For each row its products with the output, and for each channel.
        self.along: list[Tensor] = []
        self.channels = torch.zeros(3, output.shape[1], dtype=torch.float64)
        # For each feature the products with it, fold by fold.
        self.folds: dict[str, Tensor] = {}

    def _expected_noise(self, rounding: Tensor, output: Tensor) -> Tensor:
        """Return the squared rounding error, plus that of one rounding of the output.

        The measured error may be zero.
        """
        return rounding.square() + output.square() * self.unit**2 / 3

    def _whitened(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return difference, rounding and output [3, row, width] in units of rounding.

        That is the rounding expected in each row and channel. A constant in these units
        comes with them.
        """
        reference, candidate, exact = rows.unbind()
        values = torch.stack([candidate - reference, reference - exact, exact])
        values = values / self.channel_noise
        row_noise = self._expected_noise(values[1], values[2]).mean(1).sqrt()
        # A row of zeros has no relative error to average.
        present = row_noise > 0
        row_noise = row_noise[present].unsqueeze(1)
        return values[:, present] / row_noise, 1 / row_noise

    def _features(self, output: Tensor, constant: Tensor) -> dict[str, Tensor]:
        """Return what each pattern is a multiple of, [row, feature]."""
        return {"bias": constant, "linear": output @ self.components}

    def add(self, rows: Tensor) -> None:
        """Add rows [3, row, width] to the sums."""
        values, constant = self._whitened(rows)
        output = values[2]
        count = len(output)
        numbers = (torch.arange(self.rows, self.rows + count) // RUN) % FOLDS
        folds = torch.nn.functional.one_hot(numbers, FOLDS).double()
        for name, feature in self._features(output, constant).items():
            feature = feature / self.sizes[name]
            # One product gives the sums of every fold and feature.
            weights = (folds.unsqueeze(2) * feature.unsqueeze(1)).flatten(1)
            sums = (weights.T @ values).reshape(3, FOLDS, -1)
            self.folds[name] = self.folds.get(name, 0) + sums
        products = values * output
        self.along.append(products.sum(2))
        self.channels += products.sum(1)
        self.rows += count
        self.rounding_energy += float(values[1].square().sum())

    def finding(self) -> Finding:
        """Estimate every pattern and its bar."""
        if self.rows < FEWEST_ROWS:
            return Finding(self.rows)
        along = torch.cat(self.along, 1)
        size = along[2]
        total = size.sum()
        energy = float(total)
        rounding_noise = math.sqrt(self.rounding_energy / energy)
        # A long computation rounds many times, and leaves more.
        unit = self.unit * self.accumulation

        def share(squared_sum: float) -> float:
            """Convert the squared sum of a pattern into its share of the output."""
            # Products of a fold with itself are left out of the sum.
            pattern_energy = max(squared_sum, 0.0) * FOLDS / (FOLDS - 1) / self.rows
            return math.sqrt(pattern_energy / energy)

        scales = along[:2].sum(1) / total
        # Over rows: channels are not independent, since a norm that rounds its factor
        # moves all of them. And over channels: a norm's weight that is rounded once
        # more gives each channel its own factor, whose mean is no fault.
        rests = along[:2] - scales.unsqueeze(1) * size
        errors = rests.square().sum(1).sqrt() / total
        channel_rest = self.channels[0] - scales[0] * self.channels[2]
        channel_error = channel_rest.square().sum().sqrt() / self.channels[2].sum()
        # The linear pattern without the scale shows how strong the others are.
        linear = self.folds["linear"]
        rest = share(_between_folds(linear[0] - scales[0] * linear[2]))
        # A scale is averaged over all tokens and channels, more than other patterns. A
        # sum that is rounded once leaves half a unit, and hardly any of that here.
        bar = max(
            FLOORS["scale"] * max(unit / 2, rounding_noise),
            Z_SCALE * max(float(errors.max()), float(channel_error)),
            ROUNDING_MARGIN * abs(float(scales[1])),
            CHANCE_SCALE * rest,
        )
        patterns = [Pattern("scale", float(scales[0]), bar)]
        for name, folds in self.folds.items():
            centred = folds[:2] - folds[:2].mean(1, keepdim=True)
            products = centred @ centred.mT
            products.diagonal(dim1=1, dim2=2).zero_()
            squared_error = (2 * products.square().sum((1, 2))).sqrt().max()
            bar = max(
                FLOORS[name] * max(unit, rounding_noise),
                share(Z_SQUARED * float(squared_error)),
                ROUNDING_MARGIN * share(_between_folds(folds[1])),
            )
            patterns.append(Pattern(name, share(_between_folds(folds[0])), bar))
        return Finding(self.rows, tuple(patterns))


def _leading_directions(rows: Tensor) -> Tensor:
    """Return the directions [width, component] in which rows are largest."""
    # There are few rows: eigenvectors of their products take a tenth of the time of an
    # SVD.
    weights = torch.linalg.eigh(rows @ rows.T).eigenvectors[:, -COMPONENTS:]
    combined: Tensor = rows.T @ weights
    lengths: Tensor = torch.linalg.vector_norm(combined, dim=0)
    return combined / lengths.clamp_min(_TINY)


def _between_folds(sums: Tensor) -> float:
    """Sum the products of different folds, which share no rounding error."""
    products = sums @ sums.T
    return float(products.sum() - products.diagonal().sum())

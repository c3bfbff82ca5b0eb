"""Test for systematic differences below the rounding error of any single token.

Sound programs round differently: what separates them at one token says nothing about
the next. A fault (a weight scaled by 1.02, a bias that is a little off) moves every
token by a fixed function of its state. So the difference is averaged over many tokens
along four patterns: one factor for the whole output (`scale`), a constant in every
channel (`bias`), a factor in every channel (`gain`), and a linear map of the leading
components of the output (`linear`). Rounding averages out and the fault stays.

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
# with four patterns each.
Z_SCALE = 6.0
Z_SQUARED = 8.0
# More than any sound program leaves of each pattern, in units of rounding.
# docs/faults.md lists the worst of them.
FLOORS = {"scale": 0.25, "bias": 1.0, "gain": 1.0, "linear": 1.25}
# How far the candidate may exceed what rounding leaves of a pattern in the reference.
ROUNDING_MARGIN = 3.0
# How much of a systematic part in all directions may lie along the output by chance.
CHANCE_SCALE = 0.75
# Sums of float32 are accumulated in float32, so another order of a long sum costs
# several units of rounding, and the exponentials of a GPU differ from those of a CPU by
# about two, the same at every token: on CUDA sound pairs came up to 2.6 times the bar
# with a factor of 16. Narrower dtypes are accumulated in float32 and rounded once.
ACCUMULATION = 128.0


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
        step = math.ceil(width / MOST_CHANNELS)
        self._channels = slice(None, None, step)
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
        for rows in (reference, candidate, exact):
            channels = rows.detach()[:, self._channels]
            selected.append(channels.to("cpu", torch.float64))
        self._waiting.append(self._distinct(torch.stack(selected)))
        if self._sums is not None or self._waiting_rows >= CALIBRATION_ROWS:
            self._flush()

    def result(self) -> Finding:
        """Return the finding of the rows so far."""
        if self._sums is None and self._waiting_rows < FEWEST_ROWS:
            return Finding(self._waiting_rows)
        self._flush()
        assert self._sums is not None
        return self._sums.finding()

    @property
    def _waiting_rows(self) -> int:
        return sum(rows.shape[1] for rows in self._waiting)

    def _distinct(self, rows: Tensor) -> Tensor:
        """Drop repeated rows: their equal rounding errors would look systematic."""
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
        return rows[:, numbers]

    def _flush(self) -> None:
        """Add waiting rows to the sums; the first rows calibrate these."""
        if not self._waiting:
            return
        rows = torch.cat(self._waiting, 1)
        self._waiting = []
        if self._sums is None:
            assert self._dtype is not None
            self._sums = _Sums(rows[:, :CALIBRATION_ROWS], self._dtype)
        self._sums.add(rows)


class _Whitened:
    """Rows in units of the rounding expected in each row and channel."""

    def __init__(self, rows: Tensor, channel_noise: Tensor, unit: float) -> None:
        reference, candidate, exact = rows.unbind()
        output = exact / channel_noise
        rounding = (reference - exact) / channel_noise
        difference = (candidate - reference) / channel_noise
        row_noise = _expected_noise(rounding, output, unit).mean(1).sqrt()
        # A row of zeros has no relative error to average.
        present = row_noise > 0
        self.row_noise = row_noise[present].unsqueeze(1)
        self.output = output[present] / self.row_noise
        self.rounding = rounding[present] / self.row_noise
        self.difference = difference[present] / self.row_noise
        self.constant = 1 / self.row_noise


def _expected_noise(rounding: Tensor, output: Tensor, unit: float) -> Tensor:
    """Return the squared rounding error, plus that of one rounding of the output.

    The measured error may be zero.
    """
    return rounding.square() + output.square() * unit**2 / 3


def _channel_noise(rows: Tensor, unit: float) -> Tensor:
    """Measure the rounding error of every channel.

    Otherwise a channel of massive activations would decide.
    """
    reference, _, exact = rows.unbind()
    channel_size = exact.abs().mean(0).clamp_min(_TINY)
    # A token of massive activations would decide as well, so rows are scaled first.
    row_size = (exact / channel_size).square().mean(1, keepdim=True)
    row_size = row_size.clamp_min(SMALLEST_ROW * float(row_size.median()))
    row_size = row_size.clamp_min(_TINY)
    noise = _expected_noise(reference - exact, exact, unit) / row_size
    squared = noise.mean(0)
    # A channel of nearly no noise would count more than all others.
    squared = squared.clamp_min(float(squared.median()) / 4)
    return squared.clamp_min(_TINY).sqrt()


_TINY = 1e-200


def _leading_directions(rows: Tensor) -> Tensor:
    """Return the directions [width, component] in which rows are largest."""
    count, width = rows.shape
    # Eigenvectors of the smaller Gram matrix take a tenth of the time of an SVD.
    if width <= count:
        vectors = torch.linalg.eigh(rows.T @ rows).eigenvectors
        directions: Tensor = vectors[:, -COMPONENTS:]
        return directions
    weights = torch.linalg.eigh(rows @ rows.T).eigenvectors[:, -COMPONENTS:]
    combined: Tensor = rows.T @ weights
    lengths: Tensor = torch.linalg.vector_norm(combined, dim=0)
    return combined / lengths.clamp_min(_TINY)


class _Sums:
    """Sums over rows from which every pattern is estimated.

    They are kept for the difference and for the reference's rounding.
    """

    def __init__(self, calibration: Tensor, dtype: torch.dtype) -> None:
        self.unit = torch.finfo(dtype).eps / 2
        self.accumulation = ACCUMULATION if torch.finfo(dtype).bits >= 32 else 1.0
        self.channel_noise = _channel_noise(calibration, self.unit)
        whitened = _Whitened(calibration, self.channel_noise, self.unit)
        self.components = _leading_directions(whitened.output)
        self.component_size = _root_mean_square(whitened.output @ self.components)
        self.constant_size = _root_mean_square(whitened.constant)
        self.channel_size = _root_mean_square(whitened.output)
        self.rows = 0
        self.output_energy = 0.0
        self.rounding_energy = 0.0
        self.difference = _Projections()
        self.rounding = _Projections()
        self.output = _Projections()

    def add(self, rows: Tensor) -> None:
        """Add rows [3, row, width] to the sums."""
        whitened = _Whitened(rows, self.channel_noise, self.unit)
        features = {
            "bias": whitened.constant / self.constant_size,
            "linear": whitened.output @ self.components / self.component_size,
        }
        gain = whitened.output / self.channel_size
        count = len(whitened.output)
        numbers = (torch.arange(self.rows, self.rows + count) // RUN) % FOLDS
        folds = torch.nn.functional.one_hot(numbers, FOLDS).double()
        self.difference.add(whitened.difference, whitened.output, features, gain, folds)
        self.rounding.add(whitened.rounding, whitened.output, features, gain, folds)
        self.output.add(whitened.output, whitened.output, features, gain, folds)
        self.rows += count
        self.output_energy += float(whitened.output.square().sum())
        self.rounding_energy += float(whitened.rounding.square().sum())

    def finding(self) -> Finding:
        """Estimate every pattern and its bar."""
        if self.rows < FEWEST_ROWS:
            return Finding(self.rows)
        rounding_noise = math.sqrt(self.rounding_energy / self.output_energy)
        # A long computation rounds many times, and leaves more.
        unit = max(self.unit * self.accumulation, rounding_noise)
        # A scale is averaged over all tokens and channels, more than other patterns. A
        # sum that is rounded once leaves half a unit, and hardly any of that here.
        patterns = [self._scale(max(self.unit * self.accumulation / 2, rounding_noise))]
        for name in ("bias", "gain", "linear"):
            patterns.append(self._squared(name, unit))
        return Finding(self.rows, tuple(patterns))

    def _scale(self, unit: float) -> Pattern:
        scale, error = self.difference.scale()
        rounding_scale, rounding_error = self.rounding.scale()
        # The linear pattern without the scale shows how strong the others are.
        rest = self._size(self.difference.without(self.output, scale, "linear"))
        bar = max(
            FLOORS["scale"] * unit,
            Z_SCALE * max(error, rounding_error, self._error_over_channels(scale)),
            ROUNDING_MARGIN * abs(rounding_scale),
            CHANCE_SCALE * rest,
        )
        return Pattern("scale", scale, bar)

    def _error_over_channels(self, scale: float) -> float:
        """Estimate the standard error of the scale over channels.

        A norm's weight that is rounded once more gives each channel its own factor,
        whose mean is no fault.
        """
        along = self.difference.folds["gain"].sum(0) * self.channel_size
        size = self.output.folds["gain"].sum(0) * self.channel_size
        return float((along - scale * size).square().sum().sqrt() / size.sum())

    def _squared(self, name: str, unit: float) -> Pattern:
        squared, error = self.difference.squared(name)
        rounding, rounding_error = self.rounding.squared(name)
        bar = max(
            FLOORS[name] * unit,
            self._size(Z_SQUARED * max(error, rounding_error)),
            ROUNDING_MARGIN * self._size(rounding),
        )
        return Pattern(name, self._size(squared), bar)

    def _size(self, squared_sum: float) -> float:
        """Convert the squared sum of a pattern into its share of the output."""
        # Products of a fold with itself are left out of the sum.
        energy = max(squared_sum, 0.0) * FOLDS / (FOLDS - 1) / self.rows
        return math.sqrt(energy / self.output_energy)


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean(0).clamp_min(_TINY).sqrt()


class _Projections:
    """Sums of rows times what each pattern predicts, fold by fold."""

    def __init__(self) -> None:
        self.along: list[Tensor] = []
        self.size: list[Tensor] = []
        self.folds: dict[str, Tensor] = {}

    def add(
        self,
        rows: Tensor,
        output: Tensor,
        features: dict[str, Tensor],
        gain: Tensor,
        folds: Tensor,
    ) -> None:
        """Add rows by fold; `folds` [row, fold] is one-hot."""
        self.along.append((rows * output).sum(1))
        self.size.append(output.square().sum(1))
        for name, feature in features.items():
            # One product gives the sums of every fold and feature.
            weights = folds.unsqueeze(2) * feature.unsqueeze(1)
            self._accumulate(name, weights.flatten(1).T @ rows)
        self._accumulate("gain", folds.T @ (gain * rows))

    def _accumulate(self, name: str, values: Tensor) -> None:
        sums = values.reshape(FOLDS, -1)
        self.folds[name] = self.folds[name] + sums if name in self.folds else sums

    def scale(self) -> tuple[float, float]:
        """Regress on the output; return the factor and its standard error over rows.

        Channels are not independent: a norm that rounds its factor moves all of them.
        """
        along, size = torch.cat(self.along), torch.cat(self.size)
        total = size.sum()
        factor = along.sum() / total
        error = (along - factor * size).square().sum().sqrt() / total
        return float(factor), float(error)

    def squared(self, name: str) -> tuple[float, float]:
        """Estimate the squared systematic sum and its standard error.

        Products of different folds have no rounding error in common.
        """
        sums = self.folds[name]
        centred = sums - sums.mean(0)
        products = centred @ centred.T
        products.fill_diagonal_(0)
        error = (2 * products.square().sum()).sqrt()
        return _between_folds(sums), float(error)

    def without(self, other: _Projections, factor: float, name: str) -> float:
        """Estimate the squared sum after a multiple of other rows is subtracted."""
        rest = self.folds[name] - factor * other.folds[name]
        return _between_folds(rest)


def _between_folds(sums: Tensor) -> float:
    """Sum the products of different folds."""
    products = sums @ sums.T
    return float(products.sum() - products.diagonal().sum())

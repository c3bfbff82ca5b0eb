"""Test whether two programs differ systematically, by less than the rounding error of a
single token.

Sound programs round differently: what separates them at one token says nothing about
the next. A fault (a weight scaled by 1.02, a bias that is a little off) moves every
token by a fixed function of its state. So the difference is averaged over many tokens
along four patterns: one factor for the whole output (`scale`), a constant in every
channel (`bias`), a factor in every channel (`gain`), and a linear map of the leading
components of the output (`linear`). Rounding averages out and the fault stays. Sound
programs leave a small systematic part all the same: a rounding error of the first token
is attended to by every later one, and a weight that is folded into another is rounded
once more. A pattern therefore counts only beyond a bar: its sampling error, what
rounding leaves of it in the reference itself (measured against float64), and a floor in
units of rounding that was calibrated on sound pairs (docs/faults.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Distinct rows that choose the weights of channels and the leading components. Later
# rows only add to sums.
CALIBRATION_ROWS = 128
# With fewer distinct rows nothing is said.
FEWEST_ROWS = 24
# Wider outputs (logits) are tested on this many channels, spread evenly.
MOST_CHANNELS = 2048
COMPONENTS = 4
# Rows of less energy than this share of the median count no more than such a row.
SMALLEST_ROW = 1e-6
# Neighbouring tokens share rounding errors through attention, so runs of rows go to one
# fold.
FOLDS = 8
RUN = 4
# Standard errors that a pattern must exceed. A pair of models has hundreds of parts
# with four patterns each.
Z_SCALE = 6.0
Z_SQUARED = 8.0
# More than sound programs leave of each pattern, in units of rounding. docs/faults.md
# has the worst of them.
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


@dataclass(frozen=True)
class Pattern:
    """One systematic pattern: its size as a share of the output, and the size up to
    which sound programs show it.
    """

    name: str
    size: float
    bar: float

    @property
    def beyond(self) -> float:
        """How many times the size exceeds the bar."""
        return abs(self.size) / self.bar


@dataclass(frozen=True)
class Finding:
    """What a test found in `rows` distinct rows. There are no patterns where the rows
    were too few.
    """

    rows: int
    patterns: tuple[Pattern, ...] = ()

    @property
    def strongest(self) -> Pattern:
        """The pattern that stands out most."""
        return max(
            self.patterns,
            key=lambda pattern: pattern.beyond,
            default=Pattern("none", 0.0, math.inf),
        )

    @property
    def size(self) -> float:
        """The size of the strongest pattern as a share of the output; a scale has a
        sign.
        """
        return self.strongest.size

    @property
    def beyond(self) -> float:
        """How many times the strongest pattern exceeds what sound programs show; over 1
        is a fault.
        """
        return self.strongest.beyond

    @property
    def smallest(self) -> float:
        """The smallest systematic difference that these rows could have shown, as a
        share of the output.
        """
        return min((pattern.bar for pattern in self.patterns), default=math.inf)


class SystematicTest:
    """A test of one part of a model, which takes its rows batch by batch and keeps
    sums.

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
        self._seen: set[str] = set()
        self._waiting: list[_Rows] = []
        self._sums: _Sums | None = None

    def add(self, reference: Tensor, candidate: Tensor, exact: Tensor) -> None:
        """Add rows [row, width] of both programs on equal input, and of the reference
        in float64.

        They may be on any device and in any dtype. The coarser dtype of the first batch
        counts as the dtype that both were computed in, unless another was given to the
        test.
        """
        if self._dtype is None:
            self._dtype = max(
                reference.dtype,
                candidate.dtype,
                key=lambda dtype: torch.finfo(dtype).eps,
            )
        tensors = (self._prepare(tensor) for tensor in (reference, candidate, exact))
        rows = self._distinct(_Rows(*tensors))
        self._waiting.append(rows)
        if self._sums is not None or self._waiting_rows >= CALIBRATION_ROWS:
            self._flush()

    def result(self) -> Finding:
        """Return what the rows so far show."""
        if self._sums is None and self._waiting_rows < FEWEST_ROWS:
            return Finding(self._waiting_rows)
        self._flush()
        assert self._sums is not None
        return self._sums.finding()

    @property
    def _waiting_rows(self) -> int:
        return sum(rows.count for rows in self._waiting)

    def _prepare(self, tensor: Tensor) -> Tensor:
        """Choose channels before rows leave their device: logits are wide."""
        return tensor.detach()[:, self._channels].to("cpu", torch.float64)

    def _distinct(self, rows: _Rows) -> _Rows:
        """Drop rows that were seen before: equal input has equal rounding errors, which
        would look systematic.
        """
        finite = rows.finite()
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(
            rows.exact.shape[1], generator=generator, dtype=torch.float64
        )
        numbers = []
        for number, projection in enumerate((rows.exact @ direction).tolist()):
            # Batches of another shape change the last digits of float64.
            key = f"{projection:.10e}"
            if key not in self._seen and finite[number]:
                self._seen.add(key)
                numbers.append(number)
        return rows.take(numbers)

    def _flush(self) -> None:
        """Move waiting rows to the sums. Whatever the batches, the first rows
        calibrate.
        """
        if not self._waiting:
            return
        rows = _Rows.join(self._waiting)
        self._waiting = []
        if self._sums is None:
            assert self._dtype is not None
            self._sums = _Sums(rows.first(CALIBRATION_ROWS), self._dtype)
        self._sums.add(rows)


@dataclass(frozen=True)
class _Rows:
    """Rows of both programs and of the reference in float64."""

    reference: Tensor
    candidate: Tensor
    exact: Tensor

    @property
    def count(self) -> int:
        return len(self.exact)

    def finite(self) -> list[bool]:
        total = self.reference + self.candidate + self.exact
        return total.isfinite().all(1).tolist()

    def take(self, numbers: list[int]) -> _Rows:
        return _Rows(
            self.reference[numbers], self.candidate[numbers], self.exact[numbers]
        )

    def first(self, count: int) -> _Rows:
        return self.take(list(range(min(count, self.count))))

    @classmethod
    def join(cls, blocks: list[_Rows]) -> _Rows:
        reference = torch.cat([block.reference for block in blocks])
        candidate = torch.cat([block.candidate for block in blocks])
        exact = torch.cat([block.exact for block in blocks])
        return cls(reference, candidate, exact)


class _Whitened:
    """Rows in units of the rounding that is expected in each row and channel."""

    def __init__(self, rows: _Rows, channel_noise: Tensor, unit: float) -> None:
        output = rows.exact / channel_noise
        rounding = (rows.reference - rows.exact) / channel_noise
        difference = (rows.candidate - rows.reference) / channel_noise
        row_noise = _expected_noise(rounding, output, unit).mean(1).sqrt()
        # A row of zeros has no rounding error, and no place in an average of relative
        # errors.
        present = row_noise > 0
        self.row_noise = row_noise[present].unsqueeze(1)
        self.output = output[present] / self.row_noise
        self.rounding = rounding[present] / self.row_noise
        self.difference = difference[present] / self.row_noise
        self.constant = 1 / self.row_noise


def _expected_noise(rounding: Tensor, output: Tensor, unit: float) -> Tensor:
    """Square the measured rounding error, and add that of one rounding of the output:
    the measured one may be zero.
    """
    return rounding.square() + output.square() * unit**2 / 3


def _channel_noise(rows: _Rows, unit: float) -> Tensor:
    """Measure the rounding error of every channel, so that one of massive activations
    does not decide.
    """
    channel_size = rows.exact.abs().mean(0).clamp_min(_TINY)
    # A token of massive activations would decide as well, so rows are brought to one
    # size first.
    row_size = (rows.exact / channel_size).square().mean(1, keepdim=True)
    row_size = row_size.clamp_min(SMALLEST_ROW * float(row_size.median())).clamp_min(
        _TINY
    )
    noise = _expected_noise(rows.reference - rows.exact, rows.exact, unit) / row_size
    squared = noise.mean(0)
    # A channel that is next to nothing would count more than all others.
    squared = squared.clamp_min(float(squared.median()) / 4)
    return squared.clamp_min(_TINY).sqrt()


_TINY = 1e-200


def _leading_directions(rows: Tensor) -> Tensor:
    """Find the directions [width, component] in which rows are largest.

    The eigenvectors of the smaller product of the rows with themselves take a tenth of
    the time of singular vectors.
    """
    count, width = rows.shape
    if width <= count:
        directions: Tensor = torch.linalg.eigh(rows.T @ rows).eigenvectors[
            :, -COMPONENTS:
        ]
        return directions
    weights: Tensor = torch.linalg.eigh(rows @ rows.T).eigenvectors[:, -COMPONENTS:]
    combined: Tensor = rows.T @ weights
    lengths: Tensor = torch.linalg.vector_norm(combined, dim=0)
    return combined / lengths.clamp_min(_TINY)


class _Sums:
    """Sums over rows from which every pattern is estimated, for the difference and for
    the reference's rounding.
    """

    def __init__(self, calibration: _Rows, dtype: torch.dtype) -> None:
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

    def add(self, rows: _Rows) -> None:
        """Add rows to the sums."""
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
        """Estimate every pattern and hold it against its bar."""
        if self.rows < FEWEST_ROWS:
            return Finding(self.rows)
        rounding_noise = math.sqrt(self.rounding_energy / self.output_energy)
        # A long computation rounds many times, and what it leaves grows with that.
        unit = max(self.unit * self.accumulation, rounding_noise)
        # A scale of all tokens and channels is averaged more than the other patterns. A
        # sum that is rounded once leaves half a unit, and of that next to nothing.
        patterns = [self._scale(max(self.unit * self.accumulation / 2, rounding_noise))]
        for name in ("bias", "gain", "linear"):
            patterns.append(self._squared(name, unit))
        return Finding(self.rows, tuple(patterns))

    def _scale(self, unit: float) -> Pattern:
        scale, error = self.difference.scale()
        rounding_scale, rounding_error = self.rounding.scale()
        # Without the scale itself, what is left of the linear pattern tells how strong
        # the others are.
        rest = self._size(self.difference.without(self.output, scale, "linear"))
        bar = max(
            FLOORS["scale"] * unit,
            Z_SCALE * max(error, rounding_error, self._error_over_channels(scale)),
            ROUNDING_MARGIN * abs(rounding_scale),
            CHANCE_SCALE * rest,
        )
        return Pattern("scale", scale, bar)

    def _error_over_channels(self, scale: float) -> float:
        """Estimate the standard error of the scale with every channel as one
        observation.

        A weight of a norm that is rounded once more gives each channel a factor of its
        own, whose mean is no fault.
        """
        along = self.difference.folds["gain"].sum(0) * self.channel_size
        size = self.output.folds["gain"].sum(0) * self.channel_size
        return float((along - scale * size).square().sum().sqrt() / size.sum())

    def _squared(self, name: str, unit: float) -> Pattern:
        estimate = self.difference.squared(name)
        rounding = self.rounding.squared(name)
        sampling = Z_SQUARED * max(estimate.error, rounding.error)
        bar = max(
            FLOORS[name] * unit,
            self._size(sampling),
            ROUNDING_MARGIN * self._size(rounding.value),
        )
        return Pattern(name, self._size(estimate.value), bar)

    def _size(self, squared_sum: float) -> float:
        """Turn the squared sum of a pattern over rows into its share of the output."""
        # Products of a fold with itself are left out of the sum.
        energy = max(squared_sum, 0.0) * FOLDS / (FOLDS - 1) / self.rows
        return math.sqrt(energy / self.output_energy)


def _root_mean_square(values: Tensor) -> Tensor:
    return values.square().mean(0).clamp_min(_TINY).sqrt()


@dataclass(frozen=True)
class _Estimate:
    """The estimate of a squared sum, and its standard error."""

    value: float
    error: float


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
        """Add rows, by fold; `folds` [row, fold] has a one where a row belongs."""
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
        """Regress on the output: the factor, and its standard error with every row as
        one observation.

        The channels of a row are not independent: a norm that rounds its factor moves
        all of them.
        """
        along, size = torch.cat(self.along), torch.cat(self.size)
        total = size.sum()
        factor = along.sum() / total
        error = (along - factor * size).square().sum().sqrt() / total
        return float(factor), float(error)

    def squared(self, name: str) -> _Estimate:
        """Estimate the squared systematic sum: products of different folds have no
        rounding error in common.
        """
        sums = self.folds[name]
        value = _between_folds(sums, sums)
        centred = sums - sums.mean(0)
        products = centred @ centred.T
        products.fill_diagonal_(0)
        error = (2 * products.square().sum()).sqrt()
        return _Estimate(value, float(error))

    def without(self, other: _Projections, factor: float, name: str) -> float:
        """Estimate the squared systematic sum after a multiple of other rows is
        subtracted.
        """
        rest = self.folds[name] - factor * other.folds[name]
        return _between_folds(rest, rest)


def _between_folds(sums: Tensor, others: Tensor) -> float:
    """Sum the products of different folds."""
    products = sums @ others.T
    return float(products.sum() - products.diagonal().sum())

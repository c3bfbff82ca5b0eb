"""Writes: what a part of a projection's input adds to the residual stream.

Projections and norms are run by their `forward`: they are run inside a pass, where a
call of the module itself would set off the hooks that watch it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.discovery.inside import Projection
from hiddenscope.modules import hooks
from hiddenscope.modules.quantised import quantised_weights

# Columns of a weight that are converted to float64 at a time.
COLUMN_BLOCK = 2048


class Write:
    """What some columns of a projection's input write: a head, or a neuron.

    The bias belongs to none of them. A norm after the projection is taken with the
    scale that it has for the whole, so that the writes still sum up.
    """

    def __init__(
        self, module: nn.Module, projection: Projection, columns: slice
    ) -> None:
        self.part = module.get_submodule(projection.tap.path)
        self.norm: nn.Module | None = None
        if projection.norm:
            self.norm = module.get_submodule(projection.norm)
        self.columns = columns
        self.width = projection.width
        self.weight = _weight(self.part)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return what the columns of inputs [..., width] write [..., hidden size]."""
        written = self.linear(inputs[..., self.columns])
        if self.norm is None:
            return written
        return written * frozen_scale(self.norm, self.part.forward(inputs)).to(written)

    def linear(self, piece: Tensor) -> Tensor:
        """Return what inputs [..., columns] of these columns write before any norm."""
        columns = self.columns
        if self.weight is not None:
            weight = self.weight[:, columns].to(piece)
            return functional.linear(piece, weight)
        # A quantised or adapted projection: only its own code knows its weight.
        masked = piece.new_zeros(*piece.shape[:-1], self.width)
        nothing = torch.zeros_like(masked)
        masked[..., columns] = piece
        biased: Tensor = self.part.forward(masked)
        bias: Tensor = self.part.forward(nothing)
        return biased - bias

    def gain(self, written: Tensor) -> Tensor:
        """Return the gain of the norm for each channel of what is written.

        It is the factor that a norm has besides the scale of each token, and 1 where
        there is no norm.
        """
        if self.norm is None:
            return written.new_ones(written.shape[-1])
        ones = written.new_ones(1, written.shape[-1])
        gain: Tensor = self.norm.forward(ones)[0]
        return gain


def bias_of(module: nn.Module, projection: Projection, inputs: Tensor) -> Tensor:
    """Return what a projection adds for inputs [..., width] that are all zero."""
    part = module.get_submodule(projection.tap.path)
    bias = part.forward(torch.zeros_like(inputs))
    if not isinstance(bias, Tensor):
        raise TypeError(f"{projection.tap.path} returns no tensor")
    if not projection.norm:
        return bias
    norm = module.get_submodule(projection.norm)
    return bias * frozen_scale(norm, part.forward(inputs)).to(bias)


def effects_along(
    module: nn.Module, projection: Projection, inputs: Tensor, directions: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what each column of a projection's input, and its bias, add in directions.

    For inputs [row, width] and a direction [row, hidden size] for each, the effects of
    the columns are [row, width] and those of the bias [row], in float64. A norm after
    the projection is taken with its frozen scale.
    """
    part = module.get_submodule(projection.tap.path)
    batch = inputs[None]
    along = directions
    if projection.norm:
        norm = module.get_submodule(projection.norm)
        along = directions * frozen_scale(norm, part.forward(batch))[0]
    bias = part.forward(torch.zeros_like(batch))[0].double()
    blocks = []
    for start in range(0, projection.width, COLUMN_BLOCK):
        columns = slice(start, min(projection.width, start + COLUMN_BLOCK))
        blocks.append(_effects_of_columns(part, inputs, along, columns))
    return torch.cat(blocks, 1), (bias * along).sum(-1)


def _effects_of_columns(
    part: nn.Module, inputs: Tensor, along: Tensor, columns: slice
) -> Tensor:
    weight = _weight(part)
    if weight is not None:
        block = weight[:, columns].to(along)
        return inputs[:, columns].double() * (along @ block)
    # A quantised or adapted projection: each column goes through its code by itself.
    rows = []
    for row, direction in zip(inputs, along, strict=True):
        masked = torch.zeros(columns.stop - columns.start, len(row)).to(inputs)
        masked[:, columns] = torch.diag(row[columns])
        zero = torch.zeros_like(masked[:1])
        written = part.forward(masked[None])[0].double()
        bias = part.forward(zero[None])[0].double()
        rows.append((written - bias) @ direction)
    return torch.stack(rows)


def frozen_scale(norm: nn.Module, inputs: Tensor) -> Tensor:
    """Return the factor [..., hidden size] by which a norm multiplies each number.

    Such a norm has a gain for each channel and a scale for each token, and nothing
    else.
    """
    gain = norm.forward(torch.ones_like(inputs)).double()
    directed = inputs.double() * gain
    output = norm.forward(inputs).double()
    size = (directed * directed).sum(-1, keepdim=True)
    scale = (output * directed).sum(-1, keepdim=True) / size.clamp_min(1e-300)
    factor: Tensor = gain * scale
    return factor


def _weight(part: nn.Module) -> Tensor | None:
    """Return the weight [output, input] of a plain projection; None of any other."""
    if hooks.foreign_hooks(part) or hooks.is_offloaded(part):
        return None
    for quantised in quantised_weights(part):
        # A product that rounds its input is not linear.
        return None if quantised.rounds_input else quantised.unpack()
    weight: Any = getattr(part, "weight", None)
    if type(part) is nn.Linear:
        return weight if isinstance(weight, Tensor) else None
    # GPT-2's projections hold their weight the other way round.
    if type(part).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.T
    return None

"""The final norm with its scale frozen, found by its behaviour.

What stands between the last layer and the head is taken for a norm: for a token's state
h it gives scale x gain x h + bias, or the same of h without its mean. Gain and bias are
numbers of each channel, and the scale is one of the token. The gain comes from a state
of plus and minus ones, the bias from a state of zeros, and the scale is fitted. Whether
that is all the module does is then checked on the states themselves and on one more.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hiddenscope.errors import PassError
from hiddenscope.modules.trials import tolerance
from hiddenscope.passes.unembed import Unembedding


class FrozenNorm(NamedTuple):
    """A final norm whose scale is that of the tokens at hand.

    `factor` [token, width] is scale x gain. `output` [token, width] is what the model
    itself makes of the states, and `worst` how far the norm is off, as a share of it.
    """

    factor: Tensor
    bias: Tensor
    centred: bool
    output: Tensor
    worst: float

    def directions(self, words: Tensor) -> Tensor:
        """Return the directions of the residual stream that words [token, width] read.

        The product of a state with its direction is what it adds to the logit.
        """
        directions = words * self.factor
        if self.centred:
            directions = directions - directions.mean(-1, keepdim=True)
        return directions


def freeze_norm(unembedding: Unembedding, states: Tensor) -> FrozenNorm:
    """Return the final norm at the states [token, width] of the last layer.

    A PassError says that what comes there is no such norm.
    """
    width = states.shape[-1]
    size = states.double().square().mean().sqrt()
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (1, width), generator=generator) * 2 - 1
    probe = (signs.to(states.device) * size).to(states.dtype)
    # A state with a mean, so that a norm that subtracts it is told from others.
    shifted = (states[:1].double().roll(1, -1) + size).to(states.dtype)
    zero = torch.zeros_like(probe)
    rows = torch.cat([states, shifted, probe, zero])
    outputs = unembedding.head_inputs(rows, unembedding.last).rows.double()
    reason = f"it makes {outputs.shape[-1]} numbers of {width}"
    if outputs.shape[-1] == width:
        rows = rows.to(outputs.device)
        fits = [_fit(rows, outputs, centred=centred) for centred in (False, True)]
        norm = min(fits, key=lambda fit: fit.worst)
        # A NaN is no fit.
        if norm.worst <= tolerance(states.dtype, 0):
            return norm
        reason = (
            "it is not a gain, a scale and a bias: its output is off by"
            f" {norm.worst:.1g} of its size"
        )
    raise PassError(
        f"Cannot split the logits of {unembedding.model.anatomy.name} into parts",
        f"what comes between its last layer and its head is no plain norm: {reason}",
        "Use hs.lens or hs.patch, which need none.",
    )


def _fit(rows: Tensor, outputs: Tensor, *, centred: bool) -> FrozenNorm:
    """Fit a norm to the tokens' states, of which the last three rows are probes."""
    inputs = rows.double()
    if centred:
        inputs = inputs - inputs.mean(-1, keepdim=True)
    bias = outputs[-1]
    gain = (outputs[-2] - bias) / inputs[-2]
    directed = inputs[:-2] * gain
    scaled = outputs[:-2] - bias
    tiny = torch.finfo(torch.float64).tiny
    squares = directed.square().sum(-1, keepdim=True).clamp_min(tiny)
    scale = (directed * scaled).sum(-1, keepdim=True) / squares
    misfit = (scaled - scale * directed).norm(dim=-1)
    sizes = outputs[:-2].norm(dim=-1).clamp_min(tiny)
    worst = (misfit / sizes).max().item()
    return FrozenNorm((scale * gain)[:-1], bias, centred, outputs[:-3], worst)

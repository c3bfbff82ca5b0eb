"""Train small dictionaries of every activation on given states, honestly.

The losses are those of the libraries: squared error alone for TopK and BatchTopK, which
keeps a running threshold; with an L1 penalty for ReLU and gated dictionaries; with an
L0 penalty and straight-through gradients for JumpReLU.
"""

from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.encoding import Encoding, Gate

Kind: TypeAlias = Literal["relu", "topk", "batchtopk", "jumprelu", "gated"]
KINDS: tuple[Kind, ...] = ("relu", "topk", "batchtopk", "jumprelu", "gated")
BANDWIDTH = 0.05


class Step(torch.autograd.Function):
    """1 above a threshold, else 0, with a gradient for the threshold alone."""

    @staticmethod
    def forward(context: Any, products: Tensor, threshold: Tensor) -> Tensor:
        """Tell which products are above."""
        context.save_for_backward(products, threshold)
        return (products > threshold).to(products)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Pass on what comes from products within the bandwidth."""
        products, threshold = context.saved_tensors
        near = (products - threshold).abs() < BANDWIDTH / 2
        return None, -(near * gradient).sum(0) / BANDWIDTH


def train(
    states: Tensor,
    kind: Kind,
    count: int,
    *,
    k: int = 8,
    steps: int = 150,
    outputs: Tensor | None = None,
    biased: bool = True,
    seed: int = 0,
) -> Dictionary:
    """Train a dictionary at layer.2, or a transcoder from its `mid` to its `mlp`.

    The bias is subtracted from the input of an autoencoder; not `biased`, the decoder
    has none. Directions have norm 1, but those of transcoders.
    """
    generator = torch.Generator().manual_seed(seed)
    goal = states if outputs is None else outputs
    units = []
    for rows in (states.float(), goal.float()):
        units.append((rows - rows.mean(0)).square().sum(1).mean().sqrt())
    inputs, targets = states.float() / units[0], goal.float() / units[1]
    directions = torch.randn(count, targets.shape[1], generator=generator)
    directions = torch.nn.functional.normalize(directions, dim=1)
    encoder = directions.T.clone()
    bias, mean = torch.zeros(count), targets.mean(0) * biased
    gate_bias, log_gain = torch.zeros(count), torch.zeros(count)
    log_threshold = torch.full((count,), -3.0)
    parameters = [directions, encoder, bias, mean, gate_bias, log_gain, log_threshold]
    for parameter in parameters:
        parameter.requires_grad_()
    optimiser = torch.optim.Adam(parameters, lr=3e-3, betas=(0.9, 0.99))
    running = 0.0
    for step in range(steps):
        batch = torch.randint(len(inputs), (256,), generator=generator)
        centred = inputs[batch] - (mean if outputs is None else 0)
        products = centred @ encoder + bias
        positive = products.relu()
        penalty = torch.zeros(())
        if kind == "topk":
            places = products.topk(k).indices
            active = torch.zeros_like(products).scatter(1, places, 1.0)
            positive = positive * active
        elif kind == "batchtopk":
            bar = positive.flatten().topk(k * len(batch)).values[-1].detach()
            positive = positive * (positive >= bar)
            running = float(bar) if not step else 0.95 * running + 0.05 * float(bar)
        elif kind == "jumprelu":
            active = Step.apply(positive, log_threshold.exp())
            positive = positive * active
            penalty = 6e-3 * active.sum(1).mean()
        elif kind == "gated":
            bare = centred @ encoder
            gates = bare + gate_bias
            positive = (bare * log_gain.exp() + bias).relu() * (gates > 0)
            by_gates = gates.relu() @ directions.detach() + mean.detach()
            penalty = 0.02 * gates.relu().sum(1).mean()
            penalty = penalty + (by_gates - targets[batch]).square().sum(1).mean()
        else:
            penalty = 0.05 * positive.sum(1).mean()
        errors = positive @ directions + mean - targets[batch]
        warm = min(1.0, 3 * step / steps)
        loss = errors.square().sum(1).mean() + warm * penalty
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        optimiser.param_groups[0]["lr"] = 3e-3 * min(1.0, 3 * (1 - step / steps))
        with torch.no_grad():
            mean *= biased
            directions /= directions.norm(dim=1, keepdim=True)
    gates_of: dict[Kind, Gate] = {"batchtopk": "threshold", "jumprelu": "threshold"}
    unit = units[0]
    threshold = torch.full((count,), running)
    if kind == "jumprelu":
        threshold = log_threshold.detach().exp()
    gate = gates_of.get(kind, kind)  # type: ignore[arg-type]
    encoding = Encoding(
        gate,
        threshold=threshold * unit if gate == "threshold" else None,
        k=k if gate == "topk" else None,
        gate_bias=gate_bias.detach() * unit if gate == "gated" else None,
        gain=log_gain.detach().exp() if gate == "gated" else None,
        centred=outputs is None,
    )
    return Dictionary(
        directions.detach() * (units[1] / unit),
        encoder.detach(),
        bias.detach() * unit,
        mean.detach() * units[1],
        "layer.2" if outputs is None else "layer.2.mid",
        "layer.2" if outputs is None else "layer.2.mlp",
        encoding,
    )

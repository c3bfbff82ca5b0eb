"""Faults without a name: one random module anywhere in the model, changed at random.

They resemble no known mistake, so that whatever finds them has measured where they are.
"""

from typing import Any

import torch
from torch import Tensor

from labs.faults.planted.fault import (
    Damage,
    Fault,
    Rng,
    first,
    noise_like,
    replace_forward,
    with_first,
)
from labs.faults.planted.modelwide import ONE_MODULE
from labs.faults.planted.parts import ModelParts


def _with_weights(parts: ModelParts) -> list[str]:
    """Return all modules that hold weights; of those that share one, the first."""
    known: set[int] = set()
    paths = []
    for path, part in parts.modules.items():
        weights = [
            weight
            for weight in part.parameters(recurse=False)
            if weight.is_floating_point()
        ]
        if (
            weights
            and not any(id(weight) in known for weight in weights)
            and _reached(parts, path)
        ):
            paths.append(path)
        known |= {id(weight) for weight in weights}
    return paths


def _reached(parts: ModelParts, path: str) -> bool:
    """Check whether a module is called: others may read the weight of a tied table."""
    return path not in ("shared", "model.shared") and "pooler" not in path


def _also(parts: ModelParts, path: str) -> dict[str, Any]:
    """Return other paths of the same weights, in which the fault is as well."""
    ids = {id(weight) for weight in parts.modules[path].parameters(recurse=False)}
    others = [
        name
        for name, part in parts.modules.items()
        if name != path
        and ids & {id(weight) for weight in part.parameters(recurse=False)}
    ]
    return {"also": tuple(others), "why": ONE_MODULE} if others else {}


def perturb(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Add noise of a thousandth to a tenth of its size to one weight."""
    name, weight = rng.choice(list(parts.modules[path].named_parameters(recurse=False)))
    size = 10 ** rng.uniform(-3, -1)
    weight.add_(noise_like(weight, rng) * weight.pow(2).mean().sqrt() * size)
    return Damage(f"{name} with noise of {size:.1e}", **_also(parts, path))


def shuffle_weight(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Two rows of one weight exchanged."""
    name, weight = rng.choice(list(parts.modules[path].named_parameters(recurse=False)))
    row, other_row = rng.sample(range(len(weight)), 2)
    weight[[row, other_row]] = weight[[other_row, row]].clone()
    return Damage(
        f"rows {row} and {other_row} of {name} exchanged", **_also(parts, path)
    )


def permute_output(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Permute the output channels of a module."""
    seed = rng.getrandbits(48)

    def change(output: Tensor) -> Tensor:
        order = torch.randperm(
            output.shape[-1], generator=torch.Generator().manual_seed(seed)
        )
        return output[..., order.to(output.device)]

    _after(parts, path, change)
    return Damage("output channels in another order")


def scale_output(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Scale the output of a module by a number near one."""
    factor = 1 + rng.choice((-1, 1)) * 10 ** rng.uniform(-3, -1)
    _after(parts, path, lambda output: output * factor)
    return Damage(f"output times {factor:.4f}")


def shift_output(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Shift one channel of a module's output."""
    channel, size = rng.random(), 10 ** rng.uniform(-2, 0)

    def change(output: Tensor) -> Tensor:
        added = torch.zeros(output.shape[-1], dtype=output.dtype, device=output.device)
        added[int(channel * len(added))] = size * float(
            output.float().pow(2).mean().sqrt()
        )
        return output + added

    _after(parts, path, change)
    return Damage(f"one channel off by {size:.2g} of the output's size")


def clip_output(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Clip the output of a module at twice its size."""

    def change(output: Tensor) -> Tensor:
        bound = 2 * float(output.float().pow(2).mean(-1).max().sqrt())
        return output.clamp(-bound, bound)

    _after(parts, path, change)
    return Damage("output clipped at twice its size")


def _after(parts: ModelParts, path: str, change: Any) -> None:
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return with_first(output, change(first(output)))

    replace_forward(parts.modules[path], forward)


def _leaves(parts: ModelParts) -> list[str]:
    """Modules that hold weights and give one tensor."""
    single = (1, 2)
    return [
        path
        for path in _with_weights(parts)
        if all(
            weight.ndim in single
            for weight in parts.modules[path].parameters(recurse=False)
        )
        and "router" not in type(parts.modules[path]).__name__.lower()
    ]


UNNAMED = (
    Fault("noise", "one weight with noise", _with_weights, perturb),
    Fault("rows", "two rows of a weight exchanged", _with_weights, shuffle_weight),
    Fault(
        "order", "a module's output channels in another order", _leaves, permute_output
    ),
    Fault("factor", "a module's output times a number near one", _leaves, scale_output),
    Fault("channel", "one output channel of a module off", _leaves, shift_output),
    Fault("clip", "a module's output clipped", _leaves, clip_output),
)

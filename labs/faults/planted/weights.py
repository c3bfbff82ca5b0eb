"""Faults in weights: a checkpoint that was converted, loaded, cut or rounded wrongly."""

from typing import Any

import torch
from torch import Tensor, nn

from labs.faults.planted.fault import Damage, Fault, Places, Rng, generator, noise_like
from labs.faults.planted.parts import (
    ModelParts,
    is_attention,
    is_layer_norm,
    is_linear,
    is_norm,
    joined,
    weight_out_first,
)

BOTH = "two weights were exchanged: both modules are wrong, and so is what holds them"
WHOLE = (
    "every weight of the block is wrong, so its first module is wrong on equal"
    " input too"
)


def _linears(parts: ModelParts) -> list[str]:
    return parts.everywhere(
        lambda part: is_linear(part) and len(weight_out_first(part)) > 1
    )


def _matrices(parts: ModelParts) -> list[str]:
    """Return modules in blocks that hold a matrix: linears, routers, experts."""
    return parts.everywhere(
        lambda part: any(weight.ndim >= 2 for weight in part.parameters(recurse=False))
    )


def _matrix(part: nn.Module, rng: Rng) -> tuple[str, Tensor]:
    names = [
        (name, weight.data)
        for name, weight in part.named_parameters(recurse=False)
        if weight.ndim >= 2
    ]
    return rng.choice(names)


def _square(part: nn.Module) -> bool:
    return is_linear(part) and len(set(weight_out_first(part).shape)) == 1


def transpose(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Transpose a square weight."""
    weight: Tensor = parts.modules[path].weight
    weight.copy_(weight.T.clone())
    return Damage(f"{tuple(weight.shape)} transposed")


def permute_rows(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Permute the output channels of a linear."""
    weight = weight_out_first(parts.modules[path])
    order = torch.randperm(len(weight), generator=generator(rng))
    weight.copy_(weight[order].clone())
    return Damage(f"{len(weight)} output channels in another order")


def _with_output(parts: ModelParts) -> list[str]:
    attentions = parts.everywhere(is_attention)
    return [
        path
        for path in attentions
        if (parts.projection(path, "o") or "") in parts.modules
    ]


def _outputs(parts: ModelParts) -> list[str]:
    return [
        path
        for attention in _with_output(parts)
        if (path := parts.projection(attention, "o"))
    ]


def permute_heads(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Permute the heads that an output projection reads."""
    weight = weight_out_first(parts.modules[path])
    heads = parts.heads
    order = list(range(heads))
    while order == sorted(order):
        rng.shuffle(order)
    columns = weight.reshape(len(weight), heads, -1)
    weight.copy_(columns[:, order].reshape(weight.shape).clone())
    return Damage(f"reads the heads as {order}")


def _rotated(parts: ModelParts) -> list[str]:
    """Query projections whose output is rotated by halves."""
    attentions = parts.everywhere(is_attention) if parts.rotary else []
    return [
        path for attention in attentions if (path := parts.projection(attention, "q"))
    ]


def interleave_pairs(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Store queries and keys in rotary pairs where the code rotates halves.

    This conversion step is easily left out.
    """
    attention = path.rpartition(".")[0]
    key = parts.projection(attention, "k")
    assert key is not None
    for name in (path, key):
        weight = weight_out_first(parts.modules[name])
        heads = weight.reshape(-1, parts.head_width, weight.shape[-1])
        pairs = heads.reshape(len(heads), 2, -1, weight.shape[-1]).transpose(1, 2)
        weight.copy_(pairs.reshape(weight.shape).clone())
    return Damage("rotary pairs side by side in q and k", (key, attention), BOTH)


def drop_bias(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Remove the bias of a linear."""
    part: Any = parts.modules[path]
    if isinstance(part, nn.Linear):
        part.register_parameter("bias", None)
    else:  # Conv1D has no form without a bias
        part.bias.zero_()
    return Damage("no bias")


def drop_norm_bias(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Leave the bias of a LayerNorm unloaded."""
    parts.modules[path].bias.zero_()
    return Damage("bias at zero")


def drop_norm_weight(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Leave the weight of a norm as initialised."""
    weight: Tensor = parts.modules[path].weight
    # Gemma keeps the weight less one.
    # Gemma adds 1 to the weight of a norm.
    adds_one = "gemma" in type(parts.modules[path]).__name__.lower()
    weight.fill_(0.0 if adds_one else 1.0)
    return Damage("weight as initialised")


def other_seed(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Take a weight of another training run: the same statistics, another draw."""
    name, weight = _matrix(parts.modules[path], rng)
    weight.copy_(noise_like(weight, rng) * weight.std() + weight.mean())
    return Damage(f"{name} from another seed")


def earlier_checkpoint(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Take a weight of an earlier step: a little off everywhere."""
    name, weight = _matrix(parts.modules[path], rng)
    size = rng.choice((0.003, 0.01, 0.03))
    weight.add_(noise_like(weight, rng) * weight.std() * size)
    return Damage(f"{name} off by {size:g} of its standard deviation")


def missing_shard(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Leave the last quarter of a weight unread."""
    name, weight = _matrix(parts.modules[path], rng)
    weight[-(len(weight) // 4 or 1) :] = 0
    return Damage(f"the last quarter of {name} at zero")


def to_int8(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Round a weight to int8, with one scale for each row or for all."""
    name, weight = _matrix(parts.modules[path], rng)
    per_row = rng.random() < 0.5
    scale = (
        weight.abs().amax(-1, keepdim=True) if per_row else weight.abs().max()
    ).clamp_min(1e-12) / 127
    weight.copy_((weight / scale).round() * scale)
    return Damage(f"{name} as int8, one scale for {'each row' if per_row else 'all'}")


def to_bf16(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Round one weight to bfloat16 in a float32 model."""
    name, weight = _matrix(parts.modules[path], rng)
    weight.copy_(weight.bfloat16())
    return Damage(f"{name} rounded to bfloat16")


def _not_last(parts: ModelParts) -> list[str]:
    last = {block.stack: block.number for block in parts.blocks}
    return [block.path for block in parts.blocks if block.number < last[block.stack]]


def swap_layers(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Exchange the weights of two neighbouring blocks."""
    start, _, number = path.rpartition(".")
    next_path = f"{start}.{int(number) + 1}"
    weights, other_weights = (
        dict(parts.modules[name].named_parameters()) for name in (path, next_path)
    )
    for name in weights.keys() & other_weights.keys():
        if weights[name].shape == other_weights[name].shape:
            saved = weights[name].clone()
            weights[name].copy_(other_weights[name])
            other_weights[name].copy_(saved)
    inner = tuple(f"{path}.{name}" for name in _with_weights(parts.modules[path]))
    return Damage(f"the weights of {next_path}, and the other way round", inner, WHOLE)


def _with_weights(block: nn.Module) -> list[str]:
    return [
        name
        for name, part in block.named_modules()
        if name and list(part.parameters(recurse=False))
    ]


def _pairs(*roles: str) -> Places:
    """Return the first of two equal projections in every attention module."""

    def places(parts: ModelParts) -> list[str]:
        paths = []
        for attention in parts.everywhere(is_attention):
            path, other = (parts.projection(attention, role) for role in roles)
            if (
                path
                and other
                and parts.modules[path].weight.shape
                == parts.modules[other].weight.shape
            ):
                paths.append(path)
        return paths

    return places


def swap_queries_and_keys(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Queries and keys exchanged."""
    return _swap_with(parts, path, "k")


def swap_keys_and_values(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Keys and values exchanged."""
    return _swap_with(parts, path, "v")


def _swap_with(parts: ModelParts, path: str, letter: str) -> Damage:
    attention = path.rpartition(".")[0]
    other = parts.projection(attention, letter)
    assert other is not None
    _exchange(parts, path, other)
    return Damage(
        f"the weights of {letter}, and the other way round", (other, attention), BOTH
    )


def _gates(parts: ModelParts) -> list[str]:
    return [path for path in _linears(parts) if path.endswith("gate_proj")]


def swap_gate_and_up(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Exchange the two input projections of a gated MLP."""
    mlp = path.rpartition(".")[0]
    up = joined(mlp, "up_proj")
    _exchange(parts, path, up)
    return Damage("the weights of up_proj, and the other way round", (up, mlp), BOTH)


def _exchange(parts: ModelParts, path: str, other: str) -> None:
    ours, theirs = (
        dict(parts.modules[path].named_parameters()),
        dict(parts.modules[other].named_parameters()),
    )
    for name in ours:
        saved = ours[name].clone()
        ours[name].copy_(theirs[name])
        theirs[name].copy_(saved)


def _norm_pairs(parts: ModelParts) -> list[str]:
    return [
        pair[0] for block in parts.blocks if len(pair := _norms(parts, block.path)) == 2
    ]


def _norms(parts: ModelParts, path: str) -> list[str]:
    """Return the first two norms of a block that are as wide as the residual stream."""
    inside = [
        (f"{path}.{name}", part)
        for name, part in parts.modules[path].named_modules()
        if is_norm(part)
    ]
    widest = max((part.weight.numel() for _, part in inside), default=0)
    return [name for name, part in inside if part.weight.numel() == widest][:2]


def swap_norms(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Exchange the norms before attention and before the MLP."""
    block = parts.block_of(path)
    assert block is not None
    _, other = _norms(parts, block.path)
    _exchange(parts, path, other)
    return Damage(
        f"the weights of {other}, and the other way round", (other, block.path), BOTH
    )


def _fused(parts: ModelParts) -> list[str]:
    projections = (
        parts.projection(path, "qkv") for path in parts.everywhere(is_attention)
    )
    return [path for path in projections if path is not None]


def reorder_qkv(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Read a fused projection in another order of thirds or heads."""
    part = parts.modules[path]
    heads = parts.heads
    by_head = rng.random() < 0.5
    for weight in (weight_out_first(part), part.bias.data):
        if by_head:  # GPT-NeoX has heads first, and this turns it to thirds first
            turned = weight.reshape(heads, 3, -1, *weight.shape[1:]).transpose(0, 1)
        else:
            turned = weight.reshape(3, -1, *weight.shape[1:])[[1, 0, 2]]
        weight.copy_(turned.reshape(weight.shape).clone())
    return Damage(
        "heads where thirds should be" if by_head else "keys where queries should be"
    )


def _experts(parts: ModelParts) -> list[str]:
    return parts.everywhere(
        lambda part: any(weight.ndim == 3 for weight in part.parameters(recurse=False))
    )


def swap_experts(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Two experts exchanged, while the router stays."""
    row, other_row = rng.sample(range(len(next(parts.modules[path].parameters()))), 2)
    for weight in parts.modules[path].parameters(recurse=False):
        weight[[row, other_row]] = weight[[other_row, row]].clone()
    return Damage(f"experts {row} and {other_row} exchanged")


def swap_expert_halves(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Exchange the gate and the up half of every expert's first weight."""
    weight: Tensor = parts.modules[path].gate_up_proj.data
    weight.copy_(weight.roll(weight.shape[1] // 2, 1).clone())
    return Damage("gate and up halves exchanged")


def _all(wanted: object) -> Places:
    return lambda parts: parts.everywhere(wanted)


def _has_bias(part: nn.Module) -> bool:
    return is_linear(part) and part.bias is not None


WEIGHTS = (
    Fault(
        "weight_transposed",
        "a square weight, the other way round",
        _all(_square),
        transpose,
    ),
    Fault(
        "weight_permuted", "output channels in another order", _linears, permute_rows
    ),
    Fault(
        "heads_permuted",
        "an output projection that reads heads in another order",
        _outputs,
        permute_heads,
    ),
    Fault(
        "rope_pairs_unconverted",
        "rotary pairs side by side in q and k",
        _rotated,
        interleave_pairs,
    ),
    Fault("bias_missing", "a linear without its bias", _all(_has_bias), drop_bias),
    Fault(
        "norm_bias_missing",
        "a LayerNorm without its bias",
        _all(is_layer_norm),
        drop_norm_bias,
    ),
    Fault(
        "norm_weight_missing",
        "a norm whose weight was not loaded",
        _all(is_norm),
        drop_norm_weight,
    ),
    Fault("stale_weight", "a weight from another seed", _matrices, other_seed),
    Fault(
        "earlier_checkpoint",
        "a weight of an earlier step",
        _matrices,
        earlier_checkpoint,
    ),
    Fault("shard_missing", "a quarter of a weight at zero", _matrices, missing_shard),
    Fault("weight_int8", "a weight rounded to int8", _matrices, to_int8),
    Fault("weight_bf16", "a weight rounded to bfloat16", _matrices, to_bf16),
    Fault(
        "layers_swapped",
        "the weights of two neighbouring blocks exchanged",
        _not_last,
        swap_layers,
    ),
    Fault(
        "queries_keys_swapped",
        "queries and keys exchanged",
        _pairs("q", "k"),
        swap_queries_and_keys,
    ),
    Fault(
        "keys_values_swapped",
        "keys and values exchanged",
        _pairs("k", "v"),
        swap_keys_and_values,
    ),
    Fault(
        "gate_up_swapped",
        "the weights of gate and up exchanged",
        _gates,
        swap_gate_and_up,
    ),
    Fault(
        "norms_swapped",
        "the norms of attention and MLP exchanged",
        _norm_pairs,
        swap_norms,
    ),
    Fault("qkv_reordered", "a fused projection in another order", _fused, reorder_qkv),
    Fault("experts_swapped", "two experts exchanged", _experts, swap_experts),
    Fault(
        "expert_halves_swapped",
        "gate and up halves of the experts exchanged",
        _experts,
        swap_expert_halves,
    ),
)

"""Faults outside the blocks: embeddings, positions, masks, rotary tables, the head.

What they declare is the first site that they reach and the module that is wrong. A
mask, or positions, that are made in the forward of the module that calls the blocks are
that module's fault.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from labs.faults.planted.fault import Damage, Fault, Rng, replace_forward
from labs.faults.planted.parts import ModelParts, joined

ONE_MODULE = "one module that is known by several paths"


def rotary_table(parts: ModelParts, path: str, rng: Rng) -> tuple[str, str]:
    """Return the prefix of a rotary table's names, and its first site.

    Gemma 3 has one table for each type of layer.
    """
    part, stack = parts.modules[path], parts.stack_of(path)
    types = [
        name.removesuffix("_inv_freq")
        for name, _ in part.named_buffers()
        if name.endswith("_inv_freq")
    ]
    types = [name for name in types if "original" not in name]
    if not types:
        return "", f"{stack}layer.1"
    layer_type = rng.choice(types)
    return (
        f"{layer_type}_",
        f"{stack}layer.{parts.config.layer_types.index(layer_type) + 1}",
    )


def rope_base(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Use the base of another model for the rotary frequencies."""
    prefix, site = rotary_table(parts, path, rng)
    table: Tensor = getattr(parts.modules[path], f"{prefix}inv_freq")
    # Base ** power: 1.42 is 500,000 for 10,000.
    power = rng.choice((0.8, 0.98, 1.25, 1.42))
    table.copy_(table**power)
    return Damage(f"{prefix}base to the power of {power}", site=site)


def rope_scaling(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Positions scaled linearly, as for a longer context."""
    prefix, site = rotary_table(parts, path, rng)
    factor = rng.choice((2.0, 4.0, 8.0))
    getattr(parts.modules[path], f"{prefix}inv_freq").div_(factor)
    return Damage(f"{prefix}positions divided by {factor:g}", site=site)


def rope_attention_factor(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Rotary tables with a factor, as YaRN has."""
    prefix, site = rotary_table(parts, path, rng)
    factor = rng.choice((1.05, 1.2))
    setattr(parts.modules[path], f"{prefix}attention_scaling", factor)
    return Damage(f"{prefix}tables times {factor:g}", site=site)


def rope_in_bf16(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Rotary tables that are rounded to bfloat16."""

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        return tuple(
            table.bfloat16().to(table.dtype) for table in original(*args, **kwargs)
        )

    replace_forward(parts.modules[path], forward)
    return Damage("tables in bfloat16")


def _rotary(parts: ModelParts) -> list[str]:
    return parts.rotary


def _embeddings(parts: ModelParts) -> list[str]:
    """Return the token embedding of each stack."""
    if len(parts.owners) > 1:
        return [
            path
            for owner in parts.owners
            if (path := joined(owner, "embed_tokens")) in parts.modules
        ]
    return [parts.embedding] if parts.embedding else []


def _same_module(parts: ModelParts, path: str) -> tuple[tuple[str, ...], str]:
    others = tuple(
        name
        for name, part in parts.modules.items()
        if part is parts.modules[path] and name != path
    )
    return others, ONE_MODULE if others else ""


def _scaled(parts: ModelParts) -> list[str]:
    return [
        path
        for path in _embeddings(parts)
        if float(getattr(parts.modules[path], "embed_scale", 1.0)) != 1.0
    ]


def _unscaled(parts: ModelParts) -> list[str]:
    return [path for path in _embeddings(parts) if path not in _scaled(parts)]


def no_embedding_scale(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Embeddings without the scale that this model gives them."""
    part: Any = parts.modules[path]
    part.embed_scale = (
        torch.ones_like(part.embed_scale)
        if isinstance(part.embed_scale, Tensor)
        else 1.0
    )
    return Damage("no embedding scale", *_same_module(parts, path))


def embedding_scale(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Embeddings with a scale that another model gives them."""
    replace_forward(
        parts.modules[path],
        lambda original, self, ids: original(ids) * self.embedding_dim**0.5,
    )
    return Damage(
        "embeddings times the root of their width", *_same_module(parts, path)
    )


def shift_ids(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Shift the vocabulary by one token."""
    replace_forward(
        parts.modules[path],
        lambda original, self, ids: original((ids + 1) % self.num_embeddings),
    )
    return Damage("each token is embedded as the next", *_same_module(parts, path))


def _tables(parts: ModelParts) -> list[str]:
    """Return the tables of learned positions."""
    tables = [
        path for path, part in parts.modules.items() if isinstance(part, nn.Embedding)
    ]
    return [
        path
        for path in tables
        if "position" in path.rpartition(".")[2] or path.endswith("wpe")
    ]


def _positioned(parts: ModelParts) -> list[str]:
    """Return the modules that turn places into learned positions.

    These are tables with an offset of their own, or the callers of tables.
    """
    callers = []
    for path in _tables(parts):
        caller = (
            path if hasattr(parts.modules[path], "offset") else path.rpartition(".")[0]
        )
        if (
            caller == path
            or "position_ids" in signature(parts.modules[caller].forward).parameters
        ):
            callers.append(caller)
    return callers


def _rotary_owners(parts: ModelParts) -> list[str]:
    return parts.owners if parts.rotary else []


def _shift(parts: ModelParts, path: str, places: Any) -> None:
    """Let a module count positions from another place on: `places(tokens)` further."""
    part: Any = parts.modules[path]

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature(original).bind(*args, **kwargs).arguments
        kwargs = {**bound.pop("kwargs", {}), **bound}
        names = ("input_ids", "inputs_embeds")
        embedded = next(kwargs[name] for name in names if kwargs.get(name) is not None)
        tokens = embedded.shape[1]
        positions = kwargs.get("position_ids")
        positions = (
            torch.arange(tokens, device=embedded.device)[None]
            if positions is None
            else positions
        )
        return original(**{**kwargs, "position_ids": positions + places(tokens)})

    replace_forward(part, forward)


def position_off_by_one(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Positions counted from one."""
    part: Any = parts.modules[path]
    if hasattr(part, "offset"):
        part.offset -= 1
        return Damage(f"an offset of {part.offset}")
    _shift(parts, path, lambda tokens: 1)
    return Damage("positions from 1 on")


def padded_left(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Count positions as if texts were padded on the left to multiples of eight."""
    _shift(parts, path, lambda tokens: -tokens % 8)
    return Damage("positions of a text that is padded on the left")


def _shiftable(parts: ModelParts) -> list[str]:
    return [
        path
        for path in _positioned(parts)
        if not hasattr(parts.modules[path], "offset")
    ]


def _owners(parts: ModelParts) -> list[str]:
    return [
        path
        for path in parts.owners
        if "attention_mask" in signature(parts.modules[path].forward).parameters
    ]


def hide_a_token(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Hide the second token from all layers, as if it were padding."""

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature(original).bind(*args, **kwargs).arguments
        kwargs = {**bound.pop("kwargs", {}), **bound}
        ids = next(
            kwargs[name]
            for name in ("input_ids", "inputs_embeds")
            if kwargs.get(name) is not None
        )
        mask = kwargs.get("attention_mask")
        mask = (
            torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
            if mask is None
            else mask.clone()
        )
        if mask.shape[1] > 2:
            mask[:, 1] = 0
        return original(**{**kwargs, "attention_mask": mask})

    replace_forward(parts.modules[path], forward)
    tables = [parts.modules[name] for name in _tables(parts) if name.startswith(path)]
    # OPT counts its mask.
    counted = any(
        "attention_mask" in signature(table.forward).parameters for table in tables
    )
    return Damage(
        "the second token is hidden",
        site=f"{parts.stack_of(path)}layer.{0 if counted else 1}",
    )


def _heads(parts: ModelParts) -> list[str]:
    return [parts.head] if parts.head else []


def scale_logits(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Logits with a scale that another model gives them."""
    factor = rng.choice((0.5, 0.9, 1.0625))
    replace_forward(parts.modules[path], lambda original, self, x: original(x) * factor)
    return Damage(f"logits times {factor:g}")


def _softcapped(parts: ModelParts) -> list[str]:
    return [""] if getattr(parts.config, "final_logit_softcapping", None) else []


def no_logit_softcap(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Logits that are not capped."""
    parts.config.final_logit_softcapping = None
    return Damage("no cap on the logits", site="logits")


def _bucketed(parts: ModelParts) -> list[str]:
    return parts.everywhere(
        lambda part: bool(getattr(part, "has_relative_attention_bias", False))
    )


def wrong_buckets(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Relative distances in the wrong buckets."""
    part: Any = parts.modules[path]
    if rng.random() < 0.5:
        # Half of the buckets are for single distances, which must not reach as far.
        shorter = part.relative_attention_max_distance // 4
        buckets = part.relative_attention_num_buckets
        part.relative_attention_max_distance = max(shorter, buckets)
        return Damage(f"distances up to {part.relative_attention_max_distance}")
    part.relative_attention_num_buckets //= 2
    return Damage(f"{part.relative_attention_num_buckets} buckets")


def _typed(parts: ModelParts) -> list[str]:
    return [
        path
        for path, part in parts.modules.items()
        if isinstance(getattr(part, "token_type_ids", None), Tensor)
    ]


def other_token_type(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Take every token for one of the second text of a pair."""
    parts.modules[path].token_type_ids.fill_(1)
    return Damage("token type 1")


MODELWIDE = (
    Fault("rope_base", "another base of the rotary frequencies", _rotary, rope_base),
    Fault("rope_scaling", "rotary positions scaled", _rotary, rope_scaling),
    Fault(
        "rope_attention_factor",
        "rotary tables with a factor",
        _rotary,
        rope_attention_factor,
    ),
    Fault("rope_bf16", "rotary tables in bfloat16", _rotary, rope_in_bf16),
    Fault("embedding_scale_missing", "no embedding scale", _scaled, no_embedding_scale),
    Fault(
        "embedding_scale_added",
        "an embedding scale of another model",
        _unscaled,
        embedding_scale,
    ),
    Fault("token_ids_shifted", "a vocabulary one token off", _embeddings, shift_ids),
    Fault(
        "position_off_by_one",
        "learned positions counted from one",
        _positioned,
        position_off_by_one,
    ),
    Fault(
        "rope_positions_shifted",
        "all rotary positions shifted, which moves nothing",
        _rotary_owners,
        position_off_by_one,
    ),
    Fault(
        "padding_side",
        "positions of a text padded on the left",
        _shiftable,
        padded_left,
    ),
    Fault(
        "mask_hides_token",
        "a token taken for padding in all layers",
        _owners,
        hide_a_token,
    ),
    Fault("logit_scale", "logits with a scale", _heads, scale_logits),
    Fault("logit_softcap_missing", "logits not capped", _softcapped, no_logit_softcap),
    Fault(
        "relative_buckets",
        "relative distances in wrong buckets",
        _bucketed,
        wrong_buckets,
    ),
    Fault("token_type", "the second token type for all", _typed, other_token_type),
)

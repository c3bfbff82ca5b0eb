"""List what goes wrong in attention: the scale of the scores, the mask, the heads, the
rotary positions.

A private copy of the reference's module attends by a plain kernel of ours, and a
hypothesis changes what enters it. transformers looks its kernels up by name, so this
serves fused and split projections alike, wherever a family keeps its scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hiddenscope.analyses.drift.suspect import Suspect, Trial
from hiddenscope.modules.module_copy import private_copy

KERNEL = "hiddenscope_trial"
# Steps of a fit of the scale, the factor by which its slope is measured, and the most
# such factors in a step.
STEPS, FACTOR, LARGEST_STEP = 6, 1.01, 100.0
Change = tuple[str, str, dict[str, Any]]
"""The name of a fault, what attention is with, and fields of `Heads` that differ."""


@dataclass(frozen=True)
class Heads:
    """What enters attention: heads [text, head, token, width], which keys a query sees,
    and a bias of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    visible: Tensor
    bias: Tensor
    scale: float
    cap: float | None
    flattened: bool = False

    def attend(self) -> Tensor:
        """Mix the values; returns [text, token, head, width]."""
        groups = self.query.shape[1] // self.key.shape[1]
        key, value = (
            heads.repeat_interleave(groups, 1) for heads in (self.key, self.value)
        )
        scores = self.query @ key.mT * self.scale
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        scores = (scores + self.bias).masked_fill(
            ~self.visible, torch.finfo(scores.dtype).min
        )
        mixed = scores.softmax(-1) @ value
        if self.flattened:
            return mixed.reshape(mixed.transpose(1, 2).shape)
        return mixed.transpose(1, 2).contiguous()


class Attention:
    """A private copy of the reference's module that attends by our kernel; `heads` is
    what enters it first.
    """

    def __init__(self, suspect: Suspect) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(KERNEL, _attend)
        self.suspect = suspect
        self.module = private_copy(suspect.reference, attention=KERNEL)
        self.heads: Heads | None = None
        self.fields: dict[str, Any] | None = None
        for part in self.module.modules():
            part.trial = [self]  # type: ignore[assignment]

    def run(self, **fields: Any) -> Tensor | None:
        """Run the module with other values in what enters its first attention."""
        self.fields = fields
        return self.suspect.run(self.module)


def _attend(
    part: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks its kernels to."""
    # Kernels add up in float32 at least, whatever they are given.
    wide = torch.promote_types(query.dtype, torch.float32)
    visible = torch.ones(
        query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
    )
    bias = torch.zeros((), dtype=wide, device=query.device)
    causal = options.get("is_causal")
    if causal is None:
        causal = getattr(part, "is_causal", True)
    if mask is None and causal:
        visible = visible.tril()
    elif mask is not None and mask.dtype == torch.bool:
        visible = mask
    elif mask is not None:
        visible = mask > torch.finfo(mask.dtype).min / 2
        bias = mask.to(wide).where(visible, bias)
    if options.get("position_bias") is not None:
        bias = bias + options["position_bias"]
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    heads = Heads(
        query.to(wide),
        key.to(wide),
        value.to(wide),
        visible,
        bias,
        scale,
        options.get("softcap"),
    )
    trial: Attention = part.trial[0]
    if trial.fields is not None:
        heads = replace(heads, **trial.fields)
        trial.heads, trial.fields = heads, None
    return heads.attend().to(query.dtype), None


def attention(suspect: Suspect) -> Iterator[Trial]:
    """Attend with another scale, mask, order of heads or rotation."""
    trial = Attention(suspect)
    output = trial.run()
    heads = trial.heads
    # Where our kernel does not give what the model's gives, it lacks something: nothing
    # can be tried.
    if (
        heads is None
        or output is None
        or suspect.distance(suspect.expected, output) > suspect.rounding
    ):
        return
    for fault, words, fields in (
        *_heads(heads),
        *_masks(suspect, heads.visible),
        *_rotations(suspect, heads),
    ):
        yield (
            fault,
            f"The output is that of attention with {words}.",
            trial.run(**fields),
        )
    ratio, words = _ratio(trial, heads)
    evidence = (
        f"The output is that of attention with scores {ratio:.6g} times the"
        f" reference's{words}."
    )
    yield "attention_scale", evidence, trial.run(scale=heads.scale * ratio)


def _heads(heads: Heads) -> Iterator[Change]:
    """List mistakes in heads and scores."""
    yield (
        "heads_flattened",
        "heads that are flattened before tokens are put first",
        {"flattened": True},
    )
    yield "softcap_missing", "scores that are not capped", {"cap": None}
    yield (
        "position_bias_missing",
        "no bias of the scores",
        {"bias": torch.zeros_like(heads.bias)},
    )
    count, groups = heads.key.shape[1], heads.query.shape[1] // heads.key.shape[1]
    key, value = (states.repeat(1, groups, 1, 1) for states in (heads.key, heads.value))
    order = ", ".join(str(head % count) for head in range(min(groups * count, 8)))
    words = f"keys and values repeated in turn: the query heads read heads {order}"
    yield "kv_heads", words, {"key": key, "value": value}


def _ratio(trial: Attention, heads: Heads) -> tuple[float, str]:
    """Find how much larger scores explain the output: a known mistake, or else the
    number that fits best.
    """
    suspect, width = trial.suspect, heads.query.shape[-1]
    ratios = {
        ", as without a scale of 1/sqrt(d)": width**0.5,
        ", as with one more scale of 1/sqrt(d)": width**-0.5,
        ", as scaled by 1/sqrt(hidden size)": (
            (width / suspect.expected.shape[-1]) ** 0.5
        ),
    }
    for words, ratio in ratios.items():
        if suspect.rest(trial.run(scale=heads.scale * ratio)) <= suspect.largest_rest:
            return ratio, words
    return _fit_scale(trial, heads.scale) / heads.scale, ""


def _fit_scale(trial: Attention, scale: float) -> float:
    """Fit the scale of the scores to the candidate's output by least squares, in steps
    along the slope.
    """
    suspect = trial.suspect
    real = suspect.mask.to(suspect.device)
    for _ in range(STEPS):
        output, ahead = trial.run(scale=scale), trial.run(scale=scale * FACTOR)
        if output is None or ahead is None or output.shape[:2] != real.shape:
            return scale
        slope, left = (
            (values - output)[real].double() for values in (ahead, suspect.made)
        )
        step = float((slope * left).sum() / slope.square().sum())
        # A longer step leaves the range in which the slope holds.
        scale *= FACTOR ** max(-LARGEST_STEP, min(step, LARGEST_STEP))
    return scale


def _masks(suspect: Suspect, mask: Tensor) -> Iterator[Change]:
    """List the masks of other mistakes, True where a key is visible."""
    tokens, keys = mask.shape[-2:]
    if tokens != keys or suspect.mask.shape[-1] != keys:
        return
    real = suspect.mask.to(mask.device)[:, None, None, :]
    places = torch.arange(tokens, device=mask.device)
    back = places[:, None] - places
    window = int(mask.sum(-1).max())
    causal = back >= 0
    if not (mask & ~causal).any():
        others = mask & (back != 0)
        alone = ~others.any(-1, keepdim=True)
        # A first token that sees no other sees itself, or all.
        for first in (mask, real):
            yield (
                "mask_off_by_one",
                "a mask that hides the token itself",
                {"visible": others | (alone & first)},
            )
        yield (
            "window_ignored",
            "a causal mask without a window",
            {"visible": causal & real},
        )
        yield (
            "window_short",
            "a window that is one token short",
            {"visible": mask & (back < window - 1)},
        )
        # A mistake in the causal mask may show padding, or not.
        for shown in (real, torch.ones_like(real)):
            yield (
                "mask_missing",
                "no causal mask",
                {"visible": mask | (~causal & shown)},
            )
            yield (
                "mask_looks_ahead",
                "a mask that shows the next token",
                {"visible": mask | ((back == -1) & shown)},
            )
        if suspect.padded:
            yield (
                "padding_not_masked",
                "padding that is not masked",
                {"visible": mask | (causal & ~real)},
            )
        return
    yield "causal_mask_added", "a causal mask", {"visible": mask & causal}
    if suspect.padded:
        yield (
            "padding_not_masked",
            "padding that is not masked",
            {"visible": mask | ~real},
        )


def _rotations(suspect: Suspect, heads: Heads) -> Iterator[Change]:
    """List queries and keys that are rotated in other ways, from those that are not
    rotated at all.
    """
    tables = suspect.call.kwargs.get("position_embeddings")
    if not isinstance(tables, tuple) or len(tables) != 2:
        return
    cos, sin = (table.to(heads.query)[:, None] for table in tables)
    size = cos.square() + sin.square()
    query, key = (
        _rotate(states, cos / size, -sin / size) for states in (heads.query, heads.key)
    )
    yield "rope_missing", "no rotary positions", {"query": query, "key": key}
    yield "rope_keys_missing", "rotary positions in the queries alone", {"key": key}
    last = _rotate(query, cos.roll(1, -2), sin.roll(1, -2))
    yield "query_off_by_one", "queries that are one position late", {"query": last}
    for fault, words, table_cos, table_sin in _tables(cos, sin):
        turned, turned_key = (
            _rotate(states, table_cos, table_sin) for states in (query, key)
        )
        yield fault, words, {"query": turned, "key": turned_key}
    # Neighbouring channels, put into two halves; those that are not rotated stay.
    places = torch.arange(query.shape[-1], device=cos.device)
    pairs, others = places[: cos.shape[-1]].reshape(-1, 2), places[cos.shape[-1] :]
    order = torch.cat([*pairs.T, others])
    query, key = (_rotate(states[..., order], cos, sin) for states in (query, key))
    yield (
        "rope_pairs",
        "rotary positions for neighbouring channels",
        {"query": query, "key": key},
    )


def _tables(cos: Tensor, sin: Tensor) -> Iterator[tuple[str, str, Tensor, Tensor]]:
    """List rotary tables of other mistakes."""
    half = cos.shape[-1] // 2
    mixed_cos, mixed_sin = (
        table[..., :half].repeat_interleave(2, -1) for table in (cos, sin)
    )
    yield "rope_direction", "positions that turn the other way", cos, -sin
    yield (
        "rope_interleaved",
        "rotary tables in the interleaved order",
        mixed_cos,
        mixed_sin,
    )
    yield (
        "position_off_by_one",
        "positions that are one off",
        cos.roll(-1, -2),
        sin.roll(-1, -2),
    )


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head, by halves."""
    width = cos.shape[-1]
    rotated, rest = heads[..., :width], heads[..., width:]
    left, right = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([rotated, rest], -1)

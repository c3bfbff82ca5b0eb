"""Hypotheses about attention: the scale of the scores, the mask, heads and rotations.

A private copy of the reference's module attends through a kernel defined here, and a
hypothesis changes what enters the kernel. transformers looks kernels up by name, so
this works for fused and split projections, wherever a family keeps its scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hiddenscope.analyses.drift.suspect import Hypothesis, Suspect
from hiddenscope.modules.module_copy import private_copy

KERNEL = "hiddenscope_trial"
# A fit of the scale takes this many steps. Its slope is measured over this factor, and
# a step is at most so many factors long: beyond that the slope does not hold.
STEPS, FACTOR, LARGEST_STEP = 6, 1.01, 100.0


@dataclass(frozen=True)
class Heads:
    """What enters attention: heads [text, head, token, width] and the score settings.

    `visible` tells which keys a query sees, `bias` is added to the scores, and `cap`
    bounds them.
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
        """Return the mixed values [text, token, head, width]."""
        groups = self.query.shape[1] // self.key.shape[1]
        key = self.key.repeat_interleave(groups, 1)
        value = self.value.repeat_interleave(groups, 1)
        scores = self.query @ key.mT * self.scale
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        hidden = torch.finfo(scores.dtype).min
        scores = (scores + self.bias).masked_fill(~self.visible, hidden)
        mixed = scores.softmax(-1) @ value
        if self.flattened:
            return mixed.reshape(mixed.transpose(1, 2).shape)
        return mixed.transpose(1, 2).contiguous()


Change = tuple[str, str, Heads]
"""The name of a fault, what attention is with, and the heads that it would see."""


class _AttentionTrial:
    """A private copy of the reference's module that attends through our kernel.

    `heads` is what entered its first attention in the last run.
    """

    def __init__(self, suspect: Suspect) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(KERNEL, _attend)
        self.suspect = suspect
        self.module = private_copy(suspect.reference, attention=KERNEL)
        self.heads: Heads | None = None
        self._replacement: Heads | None = None
        for part in self.module.modules():
            part.trial = self  # type: ignore[assignment]

    def run(self, replacement: Heads | None = None) -> Tensor | None:
        """Run the module, with other heads in its first attention if any are given."""
        self.heads, self._replacement = None, replacement
        return self.suspect.run(self.module)

    def enter(self, heads: Heads) -> Heads:
        """Return the heads that an attention of the module must use."""
        if self.heads is not None:
            return heads
        self.heads = self._replacement or heads
        return self.heads


def _attend(
    part: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend through the interface that transformers has for kernels."""
    # Kernels accumulate in float32 at least, whatever the dtype of their arguments.
    wide = torch.promote_types(query.dtype, torch.float32)
    device = query.device
    visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).to(device)
    bias = torch.zeros((), dtype=wide, device=device)
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
    cap = options.get("softcap")
    query_heads, key_heads, value_heads = query.to(wide), key.to(wide), value.to(wide)
    heads = Heads(query_heads, key_heads, value_heads, visible, bias, scale, cap)
    return part.trial.enter(heads).attend().to(query.dtype), None


def attention(suspect: Suspect) -> Iterator[Hypothesis]:
    """Attend with another scale, mask, order of heads or rotation."""
    trial = _AttentionTrial(suspect)
    output, heads = trial.run(), trial.heads
    if heads is None or output is None:
        return
    # If our kernel does not reproduce the model's, it lacks something that the model
    # does, and nothing can be tested.
    if suspect.distance(suspect.expected, output) > suspect.rounding:
        return
    changes = [*_heads(heads), *_masks(suspect, heads), *_rotations(suspect, heads)]
    for fault, words, changed in changes:
        evidence = f"The output is that of attention with {words}."
        yield Hypothesis(fault, evidence, trial.run(changed))
    ratio, words = _score_ratio(trial, heads)
    evidence = (
        f"The output is that of attention with scores {ratio:.6g} times the"
        f" reference's{words}."
    )
    rescaled = trial.run(replace(heads, scale=heads.scale * ratio))
    yield Hypothesis("attention_scale", evidence, rescaled)


def _heads(heads: Heads) -> Iterator[Change]:
    """Yield mistakes in heads and scores."""
    words = "heads that are flattened before tokens are put first"
    yield "heads_flattened", words, replace(heads, flattened=True)
    yield "softcap_missing", "scores that are not capped", replace(heads, cap=None)
    unbiased = replace(heads, bias=torch.zeros_like(heads.bias))
    yield "position_bias_missing", "no bias of the scores", unbiased
    count = heads.key.shape[1]
    groups = heads.query.shape[1] // count
    order = ", ".join(str(head % count) for head in range(min(groups * count, 8)))
    words = f"keys and values repeated in turn: the query heads read heads {order}"
    key = heads.key.repeat(1, groups, 1, 1)
    value = heads.value.repeat(1, groups, 1, 1)
    yield "kv_heads", words, replace(heads, key=key, value=value)


def _score_ratio(trial: _AttentionTrial, heads: Heads) -> tuple[float, str]:
    """Return the factor of the scores that explains the output, and what it is.

    A known mistake is preferred to a fitted factor.
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
        output = trial.run(replace(heads, scale=heads.scale * ratio))
        if suspect.rest(output) <= suspect.largest_rest:
            return ratio, words
    return _fit_scale(trial, heads) / heads.scale, ""


def _fit_scale(trial: _AttentionTrial, heads: Heads) -> float:
    """Fit the scale of the scores by least squares, in steps along the slope."""
    suspect, scale = trial.suspect, heads.scale
    real = suspect.mask.to(suspect.device)
    for _ in range(STEPS):
        output = trial.run(replace(heads, scale=scale))
        ahead = trial.run(replace(heads, scale=scale * FACTOR))
        if output is None or ahead is None or output.shape[:2] != real.shape:
            return scale
        slope = (ahead - output)[real].double()
        rest = (suspect.output - output)[real].double()
        step = float((slope * rest).sum() / slope.square().sum())
        scale *= FACTOR ** max(-LARGEST_STEP, min(step, LARGEST_STEP))
    return scale


def _masks(suspect: Suspect, heads: Heads) -> Iterator[Change]:
    """Yield mistakes in the mask, which is True where a key is visible."""
    mask = heads.visible
    tokens, keys = mask.shape[-2:]
    if tokens != keys or suspect.mask.shape[-1] != keys:
        return

    def seeing(visible: Tensor) -> Heads:
        return replace(heads, visible=visible)

    real = suspect.mask.to(mask.device)[:, None, None, :]
    places = torch.arange(tokens, device=mask.device)
    distance = places[:, None] - places
    causal = distance >= 0
    padding = "padding_not_masked", "padding that is not masked"
    if bool((mask & ~causal).any()):
        yield "causal_mask_added", "a causal mask", seeing(mask & causal)
        if suspect.padded:
            yield *padding, seeing(mask | ~real)
        return
    others = mask & (distance != 0)
    sees_none = ~others.any(-1, keepdim=True)
    # A kernel that hides the token itself shows the first token itself, or everything.
    for shown in (mask, real):
        words = "a mask that hides the token itself"
        yield "mask_off_by_one", words, seeing(others | (sees_none & shown))
    words = "a causal mask without a window"
    yield "window_ignored", words, seeing(causal & real)
    window = int(mask.sum(-1).max())
    words = "a window that is one token short"
    yield "window_short", words, seeing(mask & (distance < window - 1))
    # A mistake in the causal mask may or may not show padding.
    for shown in (real, torch.ones_like(real)):
        yield "mask_missing", "no causal mask", seeing(mask | (~causal & shown))
        words = "a mask that shows the next token"
        yield "mask_looks_ahead", words, seeing(mask | ((distance == -1) & shown))
    if suspect.padded:
        yield *padding, seeing(mask | (causal & ~real))


def _rotations(suspect: Suspect, heads: Heads) -> Iterator[Change]:
    """Yield mistakes in rotary positions, starting from heads without rotation."""
    tables = suspect.call.kwargs.get("position_embeddings")
    if not isinstance(tables, tuple) or len(tables) != 2:
        return
    cos, sin = tables[0].to(heads.query)[:, None], tables[1].to(heads.query)[:, None]
    size = cos.square() + sin.square()
    unrotated = _with_rotation(heads, cos / size, -sin / size)
    yield "rope_missing", "no rotary positions", unrotated
    words = "rotary positions in the queries alone"
    yield "rope_keys_missing", words, replace(heads, key=unrotated.key)
    late = _rotate(unrotated.query, cos.roll(1, -2), sin.roll(1, -2))
    words = "queries that are one position late"
    yield "query_off_by_one", words, replace(heads, query=late)
    words = "positions that turn the other way"
    yield "rope_direction", words, _with_rotation(unrotated, cos, -sin)
    half = cos.shape[-1] // 2
    mixed_cos = cos[..., :half].repeat_interleave(2, -1)
    mixed_sin = sin[..., :half].repeat_interleave(2, -1)
    words = "rotary tables in the interleaved order"
    yield "rope_interleaved", words, _with_rotation(unrotated, mixed_cos, mixed_sin)
    shifted = _with_rotation(unrotated, cos.roll(-1, -2), sin.roll(-1, -2))
    yield "position_off_by_one", "positions that are one off", shifted
    # Neighbouring channels are put into two halves; unrotated channels stay.
    places = torch.arange(heads.query.shape[-1], device=cos.device)
    pairs, others = places[: cos.shape[-1]].reshape(-1, 2), places[cos.shape[-1] :]
    order = torch.cat([*pairs.T, others])
    query, key = unrotated.query[..., order], unrotated.key[..., order]
    paired = _with_rotation(replace(heads, query=query, key=key), cos, sin)
    yield "rope_pairs", "rotary positions for neighbouring channels", paired


def _with_rotation(heads: Heads, cos: Tensor, sin: Tensor) -> Heads:
    """Rotate queries and keys."""
    query, key = _rotate(heads.query, cos, sin), _rotate(heads.key, cos, sin)
    return replace(heads, query=query, key=key)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of each head, by halves."""
    width = cos.shape[-1]
    rotated, rest = heads[..., :width], heads[..., width:]
    left, right = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat([-right, left], -1) * sin
    return torch.cat([rotated, rest], -1)

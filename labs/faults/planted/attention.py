"""Faults in the code of attention: scale, mask, window, softmax, heads, rotation.

Every attention module of transformers calls a function by the name in its
configuration. One module is given a configuration of its own that names `attend`: plain
attention, written out, with one `Mistake` or with none. With none it is the same maths
as the model's own kernel, which is one of the harmless changes.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from labs.faults.planted.fault import Damage, Fault, Places, Rng, replace_forward
from labs.faults.planted.parts import ModelParts, is_attention, joined

NAME = "hiddenscope_plain"


@dataclass(frozen=True)
class Mistake:
    """What plain attention does wrong; nothing if all is left as it is."""

    scale: float = 1.0
    tiled: bool = False
    mask: str = "right"  # or "ahead", "strict", "none", "causal", "no_window", "narrow"
    softmax: torch.dtype | None = None
    transposed: bool = True
    biased: bool = True
    capped: bool = True


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend in plain steps, with the mistake of the module.

    Tensors are `[text, head, token, width]`.
    """
    mistake: Mistake = module.planted_mistake  # type: ignore[assignment]
    groups = query.shape[1] // key.shape[1]
    key, value = (
        _repeated(heads, groups, tiled=mistake.tiled) for heads in (key, value)
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * (scale * mistake.scale)
    if options.get("softcap") is not None and mistake.capped:
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    if options.get("position_bias") is not None and mistake.biased:
        scores = scores + options["position_bias"]
    causal = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", True)) if causal is None else causal
    hidden = _hidden(attention_mask, scores, causal=causal)
    hidden = _mistaken(hidden, mistake.mask, getattr(module, "sliding_window", None))
    scores = scores.to(mistake.softmax or scores.dtype)
    weights = (
        scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        .softmax(-1)
        .to(value.dtype)
    )
    mixed = weights @ value
    # The heads' axes are flattened as they lie, without putting tokens first.
    if not mistake.transposed:
        texts, heads, tokens, width = mixed.shape
        return mixed.reshape(texts, tokens, heads, width), None
    return mixed.transpose(1, 2).contiguous(), None


def _repeated(heads: Tensor, groups: int, *, tiled: bool) -> Tensor:
    return (
        heads.repeat(1, groups, 1, 1) if tiled else heads.repeat_interleave(groups, 1)
    )


def _hidden(mask: Tensor | None, scores: Tensor, *, causal: bool) -> Tensor:
    """Return which scores are hidden.

    A model may omit a mask that is only causal, or that hides nothing.
    """
    tokens, keys = scores.shape[-2:]
    if mask is None:
        full = torch.ones(tokens, keys, dtype=torch.bool, device=scores.device)
        hidden = full.triu(1) if causal and tokens > 1 else torch.zeros_like(full)
        return hidden[None, None]
    hidden = (
        ~mask if mask.dtype == torch.bool else mask < torch.finfo(mask.dtype).min / 2
    )
    return hidden[..., :keys]


def _mistaken(hidden: Tensor, mask: str, window: int | None) -> Tensor:
    """Return the mask with a mistake.

    What hides padding stays, as far as it can be told apart.
    """
    if mask == "right":
        return hidden
    tokens, keys = hidden.shape[-2], hidden.shape[-1]
    full = torch.ones(tokens, keys, dtype=torch.bool, device=hidden.device)
    above = full.triu(1)
    if mask == "ahead":  # sees one token too many
        return hidden & ~(above & ~full.triu(2))
    if mask == "strict":  # does not see itself; the first token must
        itself = ~above & full.triu(0)
        itself[0, 0] = False
        return hidden | itself
    if mask == "none":
        return hidden & ~above
    if mask == "causal":
        return hidden | above
    assert window is not None
    if mask == "no_window":
        return hidden & ~full.tril(-window)
    return hidden | full.tril(1 - window)  # "narrow": one token fewer


def attend_plainly(part: nn.Module, mistake: Mistake) -> None:
    """Let one attention module attend by `attend`, with a mistake."""
    AttentionInterface.register(NAME, attend)
    config: Any = copy.copy(part.config)
    config._attn_implementation = NAME
    part.config = config
    part.planted_mistake = mistake  # type: ignore[assignment]


def self_attentions(parts: ModelParts) -> list[str]:
    """Return the attention modules within one stack."""
    return [
        path
        for path in parts.everywhere(is_attention)
        if not any(name in path for name in ("EncDec", "encoder_"))
    ]


def _those(wanted: Callable[[ModelParts, nn.Module], bool]) -> Places:
    return lambda parts: [
        path for path in self_attentions(parts) if wanted(parts, parts.modules[path])
    ]


def _causal(parts: ModelParts, part: nn.Module) -> bool:
    return bool(getattr(part, "is_causal", False))


def _mistake(detail: str, **wrong: Any) -> Callable[[ModelParts, str, Rng], Damage]:
    def change(parts: ModelParts, path: str, rng: Rng) -> Damage:
        attend_plainly(parts.modules[path], Mistake(**wrong))
        return Damage(detail)

    return change


def wrong_scale(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Omit the scale of the scores, take its root, or apply it twice."""
    part: Any = parts.modules[path]
    width = parts.head_width
    named = float(getattr(part, "scaling", 1.0))
    left_out = named != 1.0 and rng.random() < 0.5 and not hasattr(part, "out_proj")
    factor, detail = (
        (1 / named, "no scale")
        if left_out
        else (width**-0.25, "divided by the fourth root once more")
    )
    attend_plainly(part, Mistake(scale=factor))
    return Damage(detail)


def rotated(part: nn.Module, mode: str) -> None:
    """Let an attention module with separate q, k, v and o rotate wrongly."""

    def forward(
        original: Any, self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs = {
            **dict(zip(("position_embeddings", "attention_mask"), args, strict=False)),
            **kwargs,
        }
        cos, sin = kwargs.pop("position_embeddings")
        mask = kwargs.pop("attention_mask", None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            getattr(self, name)(hidden_states).view(shape).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = _rotate(query, key, cos[:, None], sin[:, None], mode)
        options = {
            "scaling": self.scaling,
            "sliding_window": getattr(self, "sliding_window", None),
        }
        mixed, _ = attend(self, query, key, value, mask, **options)
        return self.o_proj(
            mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()
        ), None

    part.planted_mistake = Mistake()  # type: ignore[assignment]
    replace_forward(part, forward)


def _rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, mode: str
) -> tuple[Tensor, Tensor]:
    def by_halves(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = heads.chunk(2, -1)
        return heads * cos + torch.cat((-right, left), -1) * sin

    def by_pairs(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        even, odd = heads[..., ::2], heads[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
        cos, sin = (table[..., :half].repeat_interleave(2, -1) for table in (cos, sin))
        return heads * cos + turned * sin

    if mode == "pairs":
        return by_pairs(query, cos, sin), by_pairs(key, cos, sin)
    if mode == "queries":
        return by_halves(query, cos, sin), key
    if mode == "reversed":
        return by_halves(query, cos, -sin), by_halves(key, cos, -sin)
    if mode == "late":
        return by_halves(query, cos.roll(1, -2), sin.roll(1, -2)), by_halves(
            key, cos, sin
        )
    return by_halves(query, cos, sin), by_halves(key, cos, sin)


def _rotating(parts: ModelParts) -> list[str]:
    """Attention modules with q, k, v and o apart that rotate whole heads."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    attentions = self_attentions(parts) if parts.rotary else []
    return [
        path
        for path in attentions
        if all(joined(path, name) in parts.modules for name in names)
    ]


def _rotation(mode: str, detail: str) -> Callable[[ModelParts, str, Rng], Damage]:
    def change(parts: ModelParts, path: str, rng: Rng) -> Damage:
        rotated(parts.modules[path], mode)
        return Damage(detail)

    return change


_grouped = _those(
    lambda parts, part: (
        getattr(part, "num_key_value_groups", 1) > 1 and parts.key_heads > 1
    )
)
_windowed = _those(lambda parts, part: bool(getattr(part, "sliding_window", None)))
_capped = _those(
    lambda parts, part: bool(getattr(part, "attn_logit_softcapping", None))
)
_relative = _those(lambda parts, part: hasattr(part, "has_relative_attention_bias"))
_causals = _those(_causal)
_encoders = _those(lambda parts, part: not _causal(parts, part))

ATTENTION = (
    Fault(
        "attention_scale",
        "scores without their scale, or scaled again",
        self_attentions,
        wrong_scale,
    ),
    Fault(
        "kv_heads_tiled",
        "key and value heads tiled, not each repeated",
        _grouped,
        _mistake("tiled", tiled=True),
    ),
    Fault(
        "mask_off_by_one",
        "each token sees the next",
        _causals,
        _mistake("sees the next token", mask="ahead"),
    ),
    Fault(
        "mask_strict",
        "a token does not see itself",
        _causals,
        _mistake("does not see itself", mask="strict"),
    ),
    Fault(
        "causal_mask_missing",
        "a causal layer sees all",
        _causals,
        _mistake("no causal mask", mask="none"),
    ),
    Fault(
        "causal_mask_added",
        "an encoder's layer is causal",
        _encoders,
        _mistake("a causal mask", mask="causal"),
    ),
    Fault(
        "softmax_bf16",
        "softmax in bfloat16",
        self_attentions,
        _mistake("bfloat16", softmax=torch.bfloat16),
    ),
    Fault(
        "window_ignored",
        "a sliding window ignored",
        _windowed,
        _mistake("no window", mask="no_window"),
    ),
    Fault(
        "window_off_by_one",
        "a window one token short",
        _windowed,
        _mistake("a token short", mask="narrow"),
    ),
    Fault(
        "heads_flattened",
        "heads flattened, tokens not first",
        self_attentions,
        _mistake("", transposed=False),
    ),
    Fault(
        "position_bias_missing",
        "no relative bias in a layer",
        _relative,
        _mistake("no bias", biased=False),
    ),
    Fault(
        "attention_softcap_missing",
        "scores not capped",
        _capped,
        _mistake("no cap", capped=False),
    ),
    Fault(
        "rope_interleaved",
        "pairs rotated where halves should be",
        _rotating,
        _rotation("pairs", "pairs"),
    ),
    Fault(
        "rope_keys_missing",
        "keys not rotated",
        _rotating,
        _rotation("queries", "queries alone"),
    ),
    Fault(
        "rope_reversed",
        "rotated the other way",
        _rotating,
        _rotation("reversed", "the sine negated"),
    ),
    Fault(
        "rope_position_off_by_one",
        "queries one position late",
        _rotating,
        _rotation("late", "queries late"),
    ),
)

"""Harmless changes: the same maths by another kernel, layout, order or dtype.

Each is made in a copy, and what differs after it is rounding. Whatever calls one of
them a fault has raised a false alarm.
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.faults.planted.attention import Mistake, attend_plainly, self_attentions
from labs.faults.planted.fault import Rng, generator, replace_forward
from labs.faults.planted.parts import (
    ModelParts,
    is_activation,
    is_attention,
    is_layer_norm,
    is_linear,
    is_norm,
    joined,
    weight_out_first,
)


@dataclass(frozen=True)
class Harmless:
    """A harmless change: its name, what it is, where it can be made, how, and whether
    it changes the dtype.
    """

    name: str
    says: str
    places: Callable[[ModelParts], list[str]]
    change: Callable[[ModelParts, str, Rng], nn.Module | None]
    other_dtype: bool = False
    everywhere: bool = True

    def applies(self, module: nn.Module) -> bool:
        """Check whether there is a place for it in a model."""
        return bool(self.places(ModelParts(module)))

    def make(self, module: nn.Module, rng: Rng | int | str = 0) -> nn.Module:
        """Return a copy of a module with the change, everywhere or in one place.

        >>> from hiddenscope.testing import tiny_model
        >>> from labs.faults.planted import HARMLESS
        >>> module, ids = tiny_model("llama"), torch.tensor([[5, 6, 7]])
        >>> other = HARMLESS["linear_einsum"].make(module)
        >>> torch.allclose(other(ids).logits, module(ids).logits, atol=1e-5)
        True
        """
        rng = rng if isinstance(rng, Rng) else Rng(f"{self.name} {rng}")
        parts = ModelParts(copy.deepcopy(module))
        places = self.places(parts)
        changed = parts.module
        with torch.no_grad():
            for path in places if self.everywhere else [rng.choice(places)]:
                replacement = self.change(parts, path, rng)
                changed = changed if replacement is None else replacement
        return changed.eval()


def _model(parts: ModelParts) -> list[str]:
    return [""]


def _linears(parts: ModelParts) -> list[str]:
    return parts.everywhere(is_linear)


def _norms(parts: ModelParts) -> list[str]:
    return [*parts.everywhere(is_norm), *parts.final_norms]


def other_kernel(parts: ModelParts, path: str, rng: Rng) -> None:
    """Attention by the other kernel of the two that every model has."""
    module: Any = parts.module
    module.set_attn_implementation(
        "eager" if module.config._attn_implementation == "sdpa" else "sdpa"
    )


def _has_kernels(parts: ModelParts) -> list[str]:
    capped = getattr(parts.config, "attn_logit_softcapping", None)
    return [""] if getattr(parts.module, "_supports_sdpa", False) and not capped else []


def plain_attention(parts: ModelParts, path: str, rng: Rng) -> None:
    """Attention written out: products, mask, softmax, products."""
    attend_plainly(parts.modules[path], Mistake())


def _plainly(parts: ModelParts) -> list[str]:
    return [
        path
        for path in self_attentions(parts)
        if hasattr(parts.modules[path], "config")
    ]


def einsum(parts: ModelParts, path: str, rng: Rng) -> None:
    """Linears by einsum."""

    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        product = torch.einsum("...i,oi->...o", x, weight_out_first(self))
        return product if self.bias is None else product + self.bias

    replace_forward(parts.modules[path], forward)


def addmm(parts: ModelParts, path: str, rng: Rng) -> None:
    """Linears by addmm, or by a product of the transposed."""

    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        weight, rows = weight_out_first(self), x.reshape(-1, x.shape[-1])
        product = (
            (weight @ rows.T).T
            if self.bias is None
            else torch.addmm(self.bias, rows, weight.T)
        )
        return product.reshape(*x.shape[:-1], -1)

    replace_forward(parts.modules[path], forward)


def split_sum(parts: ModelParts, path: str, rng: Rng) -> None:
    """Linears as the sum of two halves of the input, as on two devices."""

    def forward(original: Any, self: Any, x: Tensor) -> Tensor:
        weight, half = weight_out_first(self), x.shape[-1] // 2
        product = functional.linear(
            x[..., :half], weight[:, :half]
        ) + functional.linear(x[..., half:], weight[:, half:])
        return product if self.bias is None else product + self.bias

    replace_forward(parts.modules[path], forward)


def norm_by_hand(parts: ModelParts, path: str, rng: Rng) -> None:
    """Norms by division and a root, in place of a reciprocal root."""
    part: Any = parts.modules[path]
    gemma = "gemma" in type(part).__name__.lower()
    eps = part.eps if hasattr(part, "eps") else part.variance_epsilon
    layer = is_layer_norm(part)

    def forward(original: Any, self: Any, x: Tensor) -> Any:
        wide = x if x.dtype == torch.float64 else x.float()
        wide = wide - wide.mean(-1, keepdim=True) if layer else wide
        normed = wide / torch.sqrt(
            (wide * wide).sum(-1, keepdim=True) / x.shape[-1] + eps
        )
        scaled = normed * (self.weight + 1 if gemma else self.weight)
        return (scaled + self.bias if layer else scaled).to(x.dtype)

    replace_forward(part, forward)


def activation_by_hand(parts: ModelParts, path: str, rng: Rng) -> None:
    """SiLU, ReLU and both GELUs from their formulas."""
    part = parts.modules[path]
    probe = torch.linspace(-3, 3, 7)
    formula = next(
        (f for f in FORMULAS if torch.allclose(f(probe), part(probe), atol=1e-5)), None
    )
    if formula is not None:
        replace_forward(part, lambda original, self, x: formula(x))


FORMULAS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x / (1 + torch.exp(-x)),
    lambda x: (x + x.abs()) / 2,
    lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    lambda x: x * torch.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x**3)),
)


def fuse_products(parts: ModelParts, path: str, rng: Rng) -> None:
    """Queries, keys and values as parts of one product."""
    projections = [
        parts.modules[name] for role in "qkv" if (name := parts.projection(path, role))
    ]
    fused = torch.cat([part.weight for part in projections])
    ends = (
        torch.tensor([0, *(part.weight.shape[0] for part in projections)])
        .cumsum(0)
        .tolist()
    )
    for part, start, end in zip(projections, ends, ends[1:], strict=False):

        def forward(
            original: Any, self: Any, x: Tensor, start: int = start, end: int = end
        ) -> Tensor:
            product = functional.linear(x, fused.to(x))[..., start:end]
            return product if self.bias is None else product + self.bias

        replace_forward(part, forward)


def _apart(parts: ModelParts) -> list[str]:
    return [
        path for path in parts.everywhere(is_attention) if parts.projection(path, "q")
    ]


def not_contiguous(parts: ModelParts, path: str, rng: Rng) -> None:
    """Weights that lie in memory the other way round."""
    weight: Any = parts.modules[path].weight
    weight.data = weight.data.T.contiguous().T


def round_trip(parts: ModelParts, path: str, rng: Rng) -> nn.Module:
    """Save the model as safetensors and read it again."""
    module: Any = parts.module
    with tempfile.TemporaryDirectory() as folder:
        module.save_pretrained(Path(folder))
        again = type(module).from_pretrained(
            folder, attn_implementation=module.config._attn_implementation
        )
    if hasattr(module, "generation_config"):
        again.generation_config = module.generation_config
    assert isinstance(again, nn.Module)
    return again


def plain_copy(parts: ModelParts, path: str, rng: Rng) -> None:
    """Copy the model, and nothing else."""


def _gated(parts: ModelParts) -> list[str]:
    return [
        path.rpartition(".")[0]
        for path in _linears(parts)
        if path.endswith("gate_proj")
    ]


def permute_channels(parts: ModelParts, path: str, rng: Rng) -> None:
    """Permute the inner channels of an MLP on both sides."""
    gate, up, down = (
        parts.modules[joined(path, name)].weight
        for name in ("gate_proj", "up_proj", "down_proj")
    )
    order = torch.randperm(len(gate), generator=generator(rng))
    for weight in (gate, up):
        weight.copy_(weight[order].clone())
    down.copy_(down[:, order].clone())


def fold_norm(parts: ModelParts, path: str, rng: Rng) -> None:
    """Fold the weight of the norm before attention into the projections behind it."""
    block: Any = parts.modules[path]
    norm = block.input_layernorm
    gemma = "gemma" in type(norm).__name__.lower()
    scale = norm.weight + 1 if gemma else norm.weight.clone()
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(block.self_attn, name).weight.mul_(scale)
    norm.weight.fill_(0.0 if gemma else 1.0)


def _foldable(parts: ModelParts) -> list[str]:
    needed = (
        "input_layernorm",
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
    )
    return [
        block.path
        for block in parts.blocks
        if all(f"{block.path}.{name}" in parts.modules for name in needed)
    ]


def other_experts(parts: ModelParts, path: str, rng: Rng) -> None:
    """Experts one after another in a loop, in place of a grouped product."""
    module: Any = parts.module
    module.set_experts_implementation("eager")


def _mixture(parts: ModelParts) -> list[str]:
    return (
        [""]
        if parts.everywhere(
            lambda part: any(w.ndim == 3 for w in part.parameters(recurse=False))
        )
        else []
    )


def compiled(parts: ModelParts, path: str, rng: Rng) -> nn.Module:
    """Compile the whole model.

    `torch.compile` needs a C++ compiler, and takes its time.
    """
    module = torch.compile(parts.module)
    assert isinstance(module, nn.Module)
    return module


def all_by_hand(parts: ModelParts, path: str, rng: Rng) -> None:
    """Compute every linear, norm, activation and attention in other steps at once."""
    steps = (
        (_linears, split_sum),
        (_norms, norm_by_hand),
        (_activations, activation_by_hand),
        (_plainly, plain_attention),
    )
    for places, change in steps:
        for each in places(parts):
            change(parts, each, rng)


def _activations(parts: ModelParts) -> list[str]:
    return parts.everywhere(is_activation)


def to_dtype(dtype: torch.dtype) -> Callable[[ModelParts, str, Rng], None]:
    """Convert the whole model to another dtype."""

    def change(parts: ModelParts, path: str, rng: Rng) -> None:
        module: Any = parts.module.to(dtype)
        # The grouped product has no kernel for it.
        if dtype == torch.float64 and _mixture(parts):
            module.set_experts_implementation("eager")

    return change


ALL = (
    Harmless("copy", "a copy", _model, plain_copy),
    Harmless("attention_kernel", "eager for sdpa", _has_kernels, other_kernel),
    Harmless("attention_plain", "attention written out", _plainly, plain_attention),
    Harmless("linear_einsum", "linears by einsum", _linears, einsum),
    Harmless("linear_addmm", "linears by addmm", _linears, addmm),
    Harmless("linear_split", "linears as a sum of two halves", _linears, split_sum),
    Harmless(
        "one_linear_split",
        "one linear as a sum of two halves",
        _linears,
        split_sum,
        everywhere=False,
    ),
    Harmless("norm_by_hand", "norms by division and a root", _norms, norm_by_hand),
    Harmless(
        "activation_by_hand", "activations by formula", _activations, activation_by_hand
    ),
    Harmless(
        "qkv_fused", "queries, keys and values in one product", _apart, fuse_products
    ),
    Harmless(
        "weights_not_contiguous",
        "weights the other way round in memory",
        _linears,
        not_contiguous,
    ),
    Harmless("round_trip", "saved as safetensors and read again", _model, round_trip),
    Harmless(
        "channels_permuted",
        "inner channels of MLPs in another order",
        _gated,
        permute_channels,
    ),
    Harmless(
        "norm_folded", "norm weights folded into projections", _foldable, fold_norm
    ),
    Harmless("experts_loop", "experts in a loop", _mixture, other_experts),
    Harmless("all_by_hand", "all of these steps by hand", _model, all_by_hand),
    Harmless("compiled", "the model compiled", _model, compiled),
    Harmless(
        "bf16",
        "the model in bfloat16",
        _model,
        to_dtype(torch.bfloat16),
        other_dtype=True,
    ),
    Harmless(
        "fp16",
        "the model in float16",
        _model,
        to_dtype(torch.float16),
        other_dtype=True,
    ),
    Harmless(
        "fp64",
        "the model in float64",
        _model,
        to_dtype(torch.float64),
        other_dtype=True,
    ),
)
HARMLESS: dict[str, Harmless] = {change.name: change for change in ALL}

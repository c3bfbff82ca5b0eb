"""Faults in the code of a module: activations, norms, residuals, dtype, dropout."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.faults.planted.fault import (
    Damage,
    Fault,
    Places,
    Rng,
    first,
    generator,
    replace_forward,
    with_first,
)
from labs.faults.planted.parts import (
    ModelParts,
    is_activation,
    is_layer_norm,
    is_linear,
    is_norm,
)

NARROW = (
    "every product in the block is rounded, so its modules are wrong on equal input too"
)


def _blocks(parts: ModelParts) -> list[str]:
    return [block.path for block in parts.blocks]


def _all(wanted: Callable[[nn.Module], bool]) -> Places:
    return lambda parts: parts.everywhere(wanted)


def other_activation(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Another activation: the other GELU for a GELU, and GELU for the others."""
    part = parts.modules[path]
    before = type(part).__name__
    probe = torch.tensor([0.7])
    is_erf = bool(torch.isclose(part(probe), functional.gelu(probe), atol=1e-7).all())
    is_tanh = bool(
        torch.isclose(
            part(probe), functional.gelu(probe, approximate="tanh"), atol=1e-7
        ).all()
    )
    after = nn.GELU("tanh") if is_erf or not is_tanh else nn.GELU()
    parent, _, name = path.rpartition(".")
    setattr(parts.modules[parent], name, after)
    return Damage(f"{after} for {before}")


def wrong_eps(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Another epsilon in a norm, from those that models have."""
    part: Any = parts.modules[path]
    name = next(name for name in ("eps", "variance_epsilon") if hasattr(part, name))
    before = getattr(part, name)
    after = rng.choice([eps for eps in (1e-12, 1e-6, 1e-5, 1e-3) if eps != before])
    setattr(part, name, after)
    return Damage(f"eps {after:g} for {before:g}")


def other_norm(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Let an RMSNorm subtract the mean, or a LayerNorm not."""
    part = parts.modules[path]
    if is_layer_norm(part):
        replace_forward(part, _without_mean)
        return Damage("the mean is not taken off")
    replace_forward(
        part, lambda original, self, x: original(x - x.mean(-1, keepdim=True))
    )
    return Damage("the mean is taken off")


def _without_mean(original: Any, self: Any, x: Tensor) -> Any:
    return (
        x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight
        + self.bias
    )


def skip_norm(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Let a norm return its input."""
    replace_forward(parts.modules[path], lambda original, self, x: x.clone())
    return Damage("no norm")


def norm_twice(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Apply a norm to its own output."""
    replace_forward(
        parts.modules[path], lambda original, self, x: original(original(x))
    )
    return Damage("normed twice")


def bias_twice(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Add a bias in the product and once more after it."""
    replace_forward(
        parts.modules[path], lambda original, self, x: original(x) + self.bias
    )
    return Damage("the bias is added twice")


def skip_layer(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Skip a block.

    Of T5's, only what it returns beside the states is taken.
    """
    beside = "position_bias" in signature(parts.modules[path].forward).parameters

    def forward(
        original: Any, self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        if beside:
            return with_first(
                original(hidden_states, *args, **kwargs), hidden_states.clone()
            )
        return hidden_states.clone()

    replace_forward(parts.modules[path], forward)
    return Damage("the block is not run")


def double_layer(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Run a block again on its own output."""

    def forward(
        original: Any, self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        return original(
            first(original(hidden_states, *args, **kwargs)), *args, **kwargs
        )

    replace_forward(parts.modules[path], forward)
    return Damage("the block is run twice")


def scale_residual(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Scale what a block adds, as in another model."""
    factor = rng.choice((0.22, 0.5, 0.98, 1.4))

    def forward(
        original: Any, self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = original(hidden_states, *args, **kwargs)
        return with_first(
            output, hidden_states + factor * (first(output) - hidden_states)
        )

    replace_forward(parts.modules[path], forward)
    return Damage(f"what the block adds times {factor:g}")


def block_in_bf16(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Compute one block in bfloat16 in a float32 model."""
    block = parts.modules[path].to(torch.bfloat16)

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), torch.float32, torch.bfloat16)
        return _cast(original(*args, **kwargs), torch.bfloat16, torch.float32)

    replace_forward(block, forward)
    inner = tuple(f"{path}.{name}" for name, _ in block.named_modules() if name)
    return Damage("computed in bfloat16", inner, NARROW)


def _cast(value: Any, dtype: torch.dtype, to: torch.dtype) -> Any:
    """Return nested tuples and mappings with tensors of one dtype in another."""
    if isinstance(value, Tensor):
        return value.to(to) if value.dtype == dtype else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype, to) for item in value)
    return (
        {name: _cast(item, dtype, to) for name, item in value.items()}
        if type(value) is dict
        else value
    )


def linear_in_bf16(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Compute one product in bfloat16 in a float32 model."""

    def forward(original: Any, self: Any, x: Tensor) -> Any:
        with torch.autocast(x.device.type, torch.bfloat16):
            return original(x).to(x.dtype)

    replace_forward(parts.modules[path], forward)
    return Damage("computed in bfloat16")


def dropout_on(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Leave dropout on in one module.

    The same elements are dropped in every run, so that it can be repeated.
    """
    rate, seed = 0.1, generator(rng).initial_seed()

    def forward(original: Any, self: Any, x: Tensor) -> Any:
        output = original(x)
        keep_mask = (
            torch.rand(output.shape[-2:], generator=torch.Generator().manual_seed(seed))
            >= rate
        )
        return output * keep_mask.to(output) / (1 - rate)

    replace_forward(parts.modules[path], forward)
    return Damage(f"a tenth of the output at zero, seed {seed}")


def _gated(parts: ModelParts) -> list[str]:
    names = ("gate_proj", "up_proj", "down_proj", "act_fn")
    return parts.everywhere(
        lambda part: all(name in dict(part.named_children()) for name in names)
    )


def activate_up(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Let a gated MLP activate the wrong half."""
    replace_forward(
        parts.modules[path],
        lambda original, self, x: self.down_proj(
            self.gate_proj(x) * self.act_fn(self.up_proj(x))
        ),
    )
    return Damage("up is activated, gate is not")


def _parallel(parts: ModelParts) -> list[str]:
    return [
        path
        for path in _blocks(parts)
        if hasattr(parts.modules[path], "use_parallel_residual")
    ]


def other_residual(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Run attention and MLP in sequence instead of in parallel, or the reverse."""
    block: Any = parts.modules[path]
    block.use_parallel_residual = not block.use_parallel_residual
    return Damage(f"parallel: {block.use_parallel_residual}")


def _routers(parts: ModelParts) -> list[str]:
    return parts.everywhere(
        lambda part: "router" in type(part).__name__.lower() and hasattr(part, "top_k")
    )


def wrong_top_k(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Let a router select one expert more, or one fewer."""
    router: Any = parts.modules[path]
    before = router.top_k
    router.top_k = rng.choice(
        [k for k in (before - 1, before + 1) if 0 < k < router.num_experts]
    )
    return Damage(f"{router.top_k} experts for {before}")


def other_normalisation(parts: ModelParts, path: str, rng: Rng) -> Damage:
    """Normalise the weights of the experts wrongly, or not at all."""
    normalised = bool(getattr(parts.modules[path], "norm_topk_prob", True))

    def forward(original: Any, self: Any, hidden_states: Tensor, *args: Any) -> Any:
        logits, scores, selected = original(hidden_states, *args)
        weights = logits.float().softmax(-1).gather(-1, selected)
        weights = weights if normalised else weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(scores.dtype), selected

    replace_forward(parts.modules[path], forward)
    return Damage(f"the weights {'do not' if normalised else 'do'} add up to one")


def _has_bias(part: nn.Module) -> bool:
    return is_linear(part) and part.bias is not None


def _finals(parts: ModelParts) -> list[str]:
    return parts.final_norms


FUNCTIONS = (
    Fault(
        "activation",
        "another activation function",
        _all(is_activation),
        other_activation,
    ),
    Fault("norm_eps", "another epsilon in a norm", _all(is_norm), wrong_eps),
    Fault(
        "norm_mean",
        "LayerNorm for RMSNorm, or the other way round",
        _all(is_norm),
        other_norm,
    ),
    Fault("norm_skipped", "a norm left out", _all(is_norm), skip_norm),
    Fault("norm_twice", "a norm applied twice", _all(is_norm), norm_twice),
    Fault("final_norm_missing", "no final norm", _finals, skip_norm),
    Fault("final_norm_twice", "the final norm applied twice", _finals, norm_twice),
    Fault("final_norm_eps", "another epsilon in the final norm", _finals, wrong_eps),
    Fault("bias_twice", "a bias added twice", _all(_has_bias), bias_twice),
    Fault("layer_skipped", "a block that is not run", _blocks, skip_layer),
    Fault("layer_doubled", "a block that is run twice", _blocks, double_layer),
    Fault("residual_scaled", "what a block adds, scaled", _blocks, scale_residual),
    Fault("block_bf16", "a block in bfloat16", _blocks, block_in_bf16),
    Fault("linear_bf16", "a product in bfloat16", _all(is_linear), linear_in_bf16),
    Fault("dropout_on", "dropout left on in one module", _all(is_linear), dropout_on),
    Fault("wrong_half_activated", "up activated, gate not", _gated, activate_up),
    Fault(
        "parallel_residual",
        "parallel for sequential, or the other way round",
        _parallel,
        other_residual,
    ),
    Fault(
        "router_top_k",
        "a router that chooses more or fewer experts",
        _routers,
        wrong_top_k,
    ),
    Fault(
        "router_normalisation",
        "expert weights normalised, or not, wrongly",
        _routers,
        other_normalisation,
    ),
)

"""What ports share: norms, attention, rotation, blocks, and mistakes in their code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# A norm with a wrong eps adds this many times the right one.
EPS_FACTOR = 100
# A wrong rotary base is this share of the right one.
BASE_FACTOR = 0.25


class Part(nn.Module):
    """A module of a port that can make a mistake in its own forward.

    `mistake` is the one that it makes, and `mistakes` lists those that it can make.
    """

    mistakes: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.mistake = ""


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear with copies of a weight `[out, in]` and a bias."""
    rows, columns = weight.shape
    part = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    part.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        part.bias = nn.Parameter(bias.detach().clone())
    return part


def embedding(weight: Tensor) -> nn.Embedding:
    """Return an embedding with a copy of a table."""
    rows, width = weight.shape
    part = nn.Embedding(rows, width, device="meta")
    part.weight = nn.Parameter(weight.detach().clone())
    return part


def copied(part: Any, bias: bool = True) -> nn.Linear:
    """Copy a linear of the reference; a Conv1D keeps its weight the other way round."""
    return linear(out_first(part), part.bias if bias else None)


def out_first(part: Any) -> Tensor:
    """Return the weight of a linear or a Conv1D as `[out, in]`."""
    weight: Tensor = part.weight
    return weight if isinstance(part, nn.Linear) else weight.T


def wide(x: Tensor) -> Tensor:
    """Widen a tensor to float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class RmsNorm(Part):
    """RMSNorm, with a weight or without."""

    mistakes = ("norm_eps", "norm_identity")

    def __init__(self, weight: Tensor | None, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.gain = None if weight is None else nn.Parameter(weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "norm_identity":
            return x
        eps = self.eps * EPS_FACTOR if self.mistake == "norm_eps" else self.eps
        states = wide(x)
        normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + eps)
        normed = normed.to(x.dtype)
        return normed if self.gain is None else self.gain * normed


class CenteredNorm(Part):
    """LayerNorm, with a weight and a bias or with neither."""

    mistakes = ("norm_eps", "norm_identity")

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.scale = None if weight is None else nn.Parameter(weight.detach().clone())
        self.shift = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "norm_identity":
            return x
        eps = self.eps * EPS_FACTOR if self.mistake == "norm_eps" else self.eps
        return functional.layer_norm(x, x.shape[-1:], self.scale, self.shift, eps)


Activation = Callable[[Tensor], Tensor]


def gelu_tanh(x: Tensor) -> Tensor:
    """Compute GELU by tanh, as GPT-2 does."""
    return functional.gelu(x, approximate="tanh")


class Activate(Part):
    """An activation as a module."""

    mistakes = ("activation",)

    def __init__(self, right: Activation, wrong: Activation) -> None:
        super().__init__()
        self.right = right
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        return self.wrong(x) if self.mistake == "activation" else self.right(x)


def split_heads(x: Tensor, width: int) -> Tensor:
    """Turn `[text, token, channel]` into `[text, head, token, width]`."""
    texts, tokens, _ = x.shape
    return x.reshape(texts, tokens, -1, width).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Turn `[text, head, token, width]` into `[text, token, channel]`."""
    return x.transpose(1, 2).flatten(-2)


def visible(tokens: int, mistake: str, device: torch.device) -> Tensor:
    """Return which tokens each token sees: itself and those before it, or a mistake."""
    ahead = {"mask_off_by_one": 1, "mask_missing": tokens}.get(mistake, 0)
    return torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril(ahead)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mistake: str, *, kernel: bool = False
) -> Tensor:
    """Attend causally, with grouped keys and values: written out, or by a kernel."""
    groups = query.shape[1] // key.shape[1]
    if mistake == "kv_heads_tiled":
        key, value = key.repeat(1, groups, 1, 1), value.repeat(1, groups, 1, 1)
    else:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    scale = 1.0 if mistake == "scale_missing" else query.shape[-1] ** -0.5
    mask = visible(query.shape[-2], mistake, query.device)
    if kernel:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale
        )
    scores = (query @ key.mT * scale).masked_fill(~mask, float("-inf"))
    return wide(scores).softmax(-1).to(value.dtype) @ value


def angles(tokens: int, width: int, base: float, device: torch.device) -> Tensor:
    """Return the angle of each position and channel pair, `[token, width / 2]`."""
    steps = torch.arange(0, width, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (base ** (steps / width))
    positions = torch.arange(tokens, dtype=torch.float32, device=device)
    return positions[:, None] * frequencies


def rotate_halves(x: Tensor, base: float) -> Tensor:
    """Rotate heads; the first half of the channels is paired with the second."""
    turn = angles(x.shape[-2], x.shape[-1], base, x.device)
    cos, sin = turn.cos().to(x), turn.sin().to(x)
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def rotate_pairs(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate heads by complex numbers; each channel is paired with its neighbour."""
    neighbours = wide(x).reshape(*x.shape[:-1], -1, 2)
    pairs = torch.view_as_complex(neighbours.contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


def interleaved(weight: Tensor, width: int) -> Tensor:
    """Order the rows of a projection, or the elements of a bias, for neighbour pairs."""
    heads = weight.reshape(-1, 2, width // 2, *weight.shape[1:])
    return heads.transpose(1, 2).flatten(0, 2).contiguous()


def rotated(
    query: Tensor, key: Tensor, base: float, mistake: str
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by halves."""
    used = base * BASE_FACTOR if mistake == "rope_base" else base
    turned_key = key if mistake == "rope_keys_missing" else rotate_halves(key, used)
    return rotate_halves(query, used), turned_key


class Assembled(Part):
    """A module of parts that are used in a fixed order, under any names."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.roles = tuple(parts)

    def ordered_parts(self) -> list[nn.Module]:
        """Return the parts in their order."""
        return [self.get_submodule(name) for name in self.roles]


class PreNormBlock(Assembled):
    """A pre-norm block of a norm, attention, a norm and an MLP.

    Attention and MLP are each added to the residual stream. Further arguments of the
    block are passed to attention.
    """

    mistakes = ("residual_misplaced", "residual_parallel", "norm_not_called")

    def forward(self, x: Tensor, *tables: Tensor) -> Tensor:
        norm1, attention, norm2, mlp = self.ordered_parts()
        normed = norm1(x)
        base = normed if self.mistake == "residual_misplaced" else x
        middle = base + self.call_attention(attention, normed, *tables)
        source = x if self.mistake == "residual_parallel" else middle
        entering = source if self.mistake == "norm_not_called" else norm2(source)
        out: Tensor = middle + mlp(entering)
        return out

    def call_attention(
        self, attention: nn.Module, normed: Tensor, *tables: Tensor
    ) -> Tensor:
        """Call attention."""
        out: Tensor = attention(normed, *tables)
        return out


class Port(Assembled):
    """A whole port of an embedding, blocks, a norm and a head: ids in, logits out."""

    @property
    def block_list(self) -> str:
        """Return the path of the list of blocks."""
        for name in self.roles:
            if isinstance(self.get_submodule(name), nn.ModuleList):
                return name
        raise LookupError("a port has a list of blocks")

    def forward(self, ids: Tensor) -> Tensor:
        embed, blocks, norm, head = self.ordered_parts()
        out: Tensor = head(norm(through(blocks, embed(ids))))
        return out


def through(blocks: nn.Module, x: Tensor, *arguments: Tensor) -> Tensor:
    """Run states through all blocks, each with the same further arguments."""
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        x = block(x, *arguments)
    return x

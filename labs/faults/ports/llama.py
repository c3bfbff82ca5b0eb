"""Llama and Phi-3: split, fused, Meta's layout, folded norms, and custom linears."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.faults.ports.maths import (
    BASE_FACTOR,
    Activate,
    Part,
    Port,
    PreNormBlock,
    RmsNorm,
    angles,
    attend,
    copied,
    embedding,
    interleaved,
    join_heads,
    linear,
    rotate_pairs,
    rotated,
    split_heads,
    through,
)

IN_ATTENTION = ("scale_missing", "mask_off_by_one", "mask_missing", "kv_heads_tiled")
IN_ROTARY_ATTENTION = (*IN_ATTENTION, "rope_base", "rope_keys_missing")


class Rotary(Part):
    """Attention with rotary positions by halves; subclasses have the projections."""

    mistakes = IN_ROTARY_ATTENTION

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.width = config.hidden_size // config.num_attention_heads
        self.heads = config.num_attention_heads
        self.shared = config.num_key_value_heads
        self.base = config.rope_parameters["rope_theta"]

    def mix(
        self, query: Tensor, key: Tensor, value: Tensor, *, kernel: bool = False
    ) -> Tensor:
        """Rotate and attend; all tensors are `[text, token, channel]`."""
        query, key = split_heads(query, self.width), split_heads(key, self.width)
        query, key = rotated(query, key, self.base, self.mistake)
        value = split_heads(value, self.width)
        return join_heads(attend(query, key, value, self.mistake, kernel=kernel))


class Separate(Rotary):
    """Queries, keys and values from projections of their own."""

    def __init__(
        self, config: Any, q: nn.Module, k: nn.Module, v: nn.Module, o: nn.Module
    ) -> None:
        super().__init__(config)
        self.q = q
        self.k = k
        self.v = v
        self.o = o

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.mix(self.q(x), self.k(x), self.v(x)))
        return out


class Fused(Rotary):
    """Queries, keys and values from one projection."""

    def __init__(self, config: Any, qkv: nn.Module, proj: nn.Module) -> None:
        super().__init__(config)
        self.qkv = qkv
        self.proj = proj

    def forward(self, x: Tensor) -> Tensor:
        sizes = [count * self.width for count in (self.heads, self.shared, self.shared)]
        query, key, value = self.qkv(x).split(sizes, -1)
        out: Tensor = self.proj(self.mix(query, key, value, kernel=True))
        return out


class Gated(Part):
    """A gated MLP whose activation is a function."""

    mistakes = ("activation", "gate_up_exchanged")

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.up = up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.gate(x), self.up(x), self.down, self.mistake)


class GatedFused(Part):
    """The same with both input projections in one."""

    mistakes = ("activation", "gate_up_exchanged")

    def __init__(self, gate_up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return gated(gate, up, self.down, self.mistake)


def gated(gate: Tensor, up: Tensor, down: nn.Module, mistake: str) -> Tensor:
    """Multiply the activated gate with `up`, and project the product."""
    if mistake == "gate_up_exchanged":
        gate, up = up, gate
    act = functional.gelu if mistake == "activation" else functional.silu
    out: Tensor = down(act(gate) * up)
    return out


def split_phi3(theirs: Any) -> Port:
    """Port Phi-3 with q, k, v and gate, up as linears of their own."""
    return llama_port(theirs, "embed layers last_norm head", _split_block)


def llama_port(
    theirs: Any,
    names: str,
    make_block: Callable[[Any, Any], nn.Module],
    *,
    norm: nn.Module | None = None,
    head: nn.Module | None = None,
) -> Port:
    """Assemble a port whose four parts have these names.

    The norm and the head are copies of the reference's unless they are given.
    """
    config, inner = theirs.config, theirs.model
    blocks = nn.ModuleList([make_block(block, config) for block in inner.layers])
    if norm is None:
        norm = RmsNorm(inner.norm.weight, config.rms_norm_eps)
    if head is None:
        head = linear(theirs.lm_head.weight)
    parts = (embedding(inner.embed_tokens.weight), blocks, norm, head)
    return Port(**dict(zip(names.split(), parts, strict=True)))


def _split_block(block: Any, config: Any) -> PreNormBlock:
    width, eps = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
    shared = width * config.num_key_value_heads
    sizes = [width * config.num_attention_heads, shared, shared]
    q, k, v = map(linear, block.self_attn.qkv_proj.weight.split(sizes))
    gate, up = map(linear, block.mlp.gate_up_proj.weight.chunk(2))
    norm1, norm2 = norms(block, eps)
    attention = Separate(config, q, k, v, copied(block.self_attn.o_proj))
    mlp = Gated(gate, up, copied(block.mlp.down_proj))
    return PreNormBlock(norm1=norm1, attention=attention, norm2=norm2, mlp=mlp)


def norms(block: Any, eps: float) -> tuple[RmsNorm, RmsNorm]:
    """Copy the two norms of a block."""
    before = RmsNorm(block.input_layernorm.weight, eps)
    behind = RmsNorm(block.post_attention_layernorm.weight, eps)
    return before, behind


def fused_llama(theirs: Any) -> Port:
    """Port Llama with one linear for q, k and v, and one for gate and up."""
    return llama_port(theirs, "stem blocks closing unembed", _fused_block)


def _fused_block(block: Any, config: Any) -> PreNormBlock:
    attention, mlp, eps = block.self_attn, block.mlp, config.rms_norm_eps
    qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
    gate_up = _joined(mlp.gate_proj, mlp.up_proj)
    pre, post = norms(block, eps)
    mix = Fused(config, qkv, copied(attention.o_proj))
    ffn = GatedFused(gate_up, copied(mlp.down_proj))
    return PreNormBlock(pre=pre, mix=mix, post=post, ffn=ffn)


def _joined(*parts: Any) -> nn.Linear:
    """Join linears of one input into one."""
    weight = torch.cat([part.weight for part in parts])
    bias = torch.cat([part.bias for part in parts])
    return linear(weight, bias)


class Rope(Part):
    """The rotary table, as complex numbers, for all blocks."""

    mistakes = ("rope_base",)

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.width = width
        self.base = base

    def forward(self, ids: Tensor) -> Tensor:
        base = self.base * BASE_FACTOR if self.mistake == "rope_base" else self.base
        turn = angles(ids.shape[1], self.width, base, ids.device)
        return torch.polar(torch.ones_like(turn), turn)


class MetaAttention(Part):
    """Attention in Meta's layout: neighbours are rotary pairs, the table is given."""

    mistakes = (*IN_ATTENTION, "rope_keys_missing")

    def __init__(
        self, width: int, wq: nn.Module, wk: nn.Module, wv: nn.Module, wo: nn.Module
    ) -> None:
        super().__init__()
        self.width = width
        self.wq = wq
        self.wk = wk
        self.wv = wv
        self.wo = wo

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        query = rotate_pairs(split_heads(self.wq(x), self.width), turn)
        key = split_heads(self.wk(x), self.width)
        value = split_heads(self.wv(x), self.width)
        if self.mistake != "rope_keys_missing":
            key = rotate_pairs(key, turn)
        out: Tensor = self.wo(join_heads(attend(query, key, value, self.mistake)))
        return out


class MetaFeedForward(Part):
    """A gated MLP with Meta's names."""

    mistakes = ("activation",)

    def __init__(self, w1: nn.Module, w2: nn.Module, w3: nn.Module) -> None:
        super().__init__()
        self.w1 = w1
        self.w2 = w2
        self.w3 = w3

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.w1(x), self.w3(x), self.w2, self.mistake)


class MetaPort(Port):
    """A whole Llama in Meta's layout: one rotary table is passed to every block."""

    def forward(self, ids: Tensor) -> Tensor:
        embed, rope, blocks, norm, head = self.ordered_parts()
        out: Tensor = head(norm(through(blocks, embed(ids), rope(ids))))
        return out


def meta_llama(theirs: Any, *, folded: bool = False) -> Port:
    """Port Llama in Meta's layout, with folded norms if asked for."""
    config = theirs.config
    width, eps = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
    blocks = nn.ModuleList(
        [_meta_block(block, width, eps, folded) for block in theirs.model.layers]
    )
    head, gain = theirs.lm_head.weight, theirs.model.norm.weight
    return MetaPort(
        tok_embeddings=embedding(theirs.model.embed_tokens.weight),
        rope=Rope(width, config.rope_parameters["rope_theta"]),
        layers=blocks,
        norm=RmsNorm(None if folded else gain, eps),
        output=linear(head * gain if folded else head),
    )


def _meta_block(block: Any, width: int, eps: float, folded: bool) -> PreNormBlock:
    attention, mlp = block.self_attn, block.mlp
    before, behind = torch.ones(()), torch.ones(())
    norm1, norm2 = norms(block, eps)
    if folded:
        before = block.input_layernorm.weight
        behind = block.post_attention_layernorm.weight
        norm1, norm2 = RmsNorm(None, eps), RmsNorm(None, eps)
    wq = linear(interleaved(attention.q_proj.weight * before, width))
    wk = linear(interleaved(attention.k_proj.weight * before, width))
    wv, wo = linear(attention.v_proj.weight * before), copied(attention.o_proj)
    w1, w3 = linear(mlp.gate_proj.weight * behind), linear(mlp.up_proj.weight * behind)
    att = MetaAttention(width, wq, wk, wv, wo)
    feed_forward = MetaFeedForward(w1, copied(mlp.down_proj), w3)
    return PreNormBlock(
        attention_norm=norm1, att=att, ffn_norm=norm2, feed_forward=feed_forward
    )


def meta_folded_llama(theirs: Any) -> Port:
    """Port Llama in Meta's layout with folded norms."""
    return meta_llama(theirs, folded=True)


def folded_llama(theirs: Any) -> Port:
    """Port Llama with the weights of its norms in the projections behind them."""
    norm = RmsNorm(None, theirs.config.rms_norm_eps)
    head = linear(theirs.lm_head.weight * theirs.model.norm.weight)
    return llama_port(theirs, "embed h norm lm", _folded_block, norm=norm, head=head)


def _folded_block(block: Any, config: Any) -> PreNormBlock:
    attention, mlp, eps = block.self_attn, block.mlp, config.rms_norm_eps
    before, behind = block.input_layernorm.weight, block.post_attention_layernorm.weight
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    q, k, v = (linear(part.weight * before, part.bias) for part in projections)
    gate, up = (linear(part.weight * behind) for part in (mlp.gate_proj, mlp.up_proj))
    n1, n2 = RmsNorm(None, eps), RmsNorm(None, eps)
    mixing = Separate(config, q, k, v, copied(attention.o_proj))
    feedforward = Gated(gate, up, copied(mlp.down_proj))
    return PreNormBlock(n1=n1, self_attention=mixing, n2=n2, feedforward=feedforward)


class Affine(Part):
    """A custom linear, with a weight called `w` and a bias called `b`."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(theirs.weight.detach().clone())
        self.b = None
        if theirs.bias is not None:
            self.b = nn.Parameter(theirs.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.w.T
        return product if self.b is None else product + self.b


class GatedByModule(Part):
    """A gated MLP whose activation is a module."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate = gate
        self.up = up
        self.down = down
        self.act = Activate(functional.silu, functional.gelu)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


def own_llama(theirs: Any) -> Port:
    """Port Llama with custom linears and activations as modules."""
    head = Affine(theirs.lm_head)
    return llama_port(theirs, "table stack ln_f readout", _own_block, head=head)


def _own_block(block: Any, config: Any) -> PreNormBlock:
    attention, mlp, eps = block.self_attn, block.mlp, config.rms_norm_eps
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    q, k, v, o = map(Affine, parts)
    gate, up, down = map(Affine, (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    ln_1, ln_2 = norms(block, eps)
    sa = Separate(config, q, k, v, o)
    ff = GatedByModule(gate, up, down)
    return PreNormBlock(ln_1=ln_1, sa=sa, ln_2=ln_2, ff=ff)

"""Llama and Phi-3 in other layouts: split, fused, Meta's, with folded norms, and with
linears of one's own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.ports.maths import (
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
)

IN_ATTENTION = ("scale_missing", "mask_off_by_one", "mask_missing", "kv_heads_tiled")
IN_ROTARY_ATTENTION = (*IN_ATTENTION, "rope_base", "rope_keys_missing")


class Rotary(Part):
    """Attention with rotary positions by halves. What it projects with is up to its
    subclasses.
    """

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
        """Rotate and attend; what it is given and gives is `[text, token, channel]`."""
        query, key, value = (
            split_heads(heads, self.width) for heads in (query, key, value)
        )
        query, key = rotated(query, key, self.base, self.mistake)
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
    """Multiply what is activated with what is not, and project it."""
    if mistake == "gate_up_exchanged":
        gate, up = up, gate
    act = functional.gelu if mistake == "activation" else functional.silu
    out: Tensor = down(act(gate) * up)
    return out


def split_phi3(theirs: Any) -> Port:
    """Phi-3 with q, k, v and gate, up as linears of their own."""
    blocks = nn.ModuleList(
        [_split_block(block, theirs.config) for block in theirs.model.layers]
    )
    norm = RmsNorm(theirs.model.norm.weight, theirs.config.rms_norm_eps)
    embed, head = (
        embedding(theirs.model.embed_tokens.weight),
        linear(theirs.lm_head.weight),
    )
    return Port(embed=embed, layers=blocks, last_norm=norm, head=head)


def _split_block(block: Any, config: Any) -> PreNormBlock:
    width, eps = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
    sizes = [
        width * config.num_attention_heads,
        *[width * config.num_key_value_heads] * 2,
    ]
    q, k, v = (
        linear(weight) for weight in block.self_attn.qkv_proj.weight.split(sizes)
    )
    gate, up = (linear(weight) for weight in block.mlp.gate_up_proj.weight.chunk(2))
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
    """Llama with one linear for q, k and v, and one for gate and up."""
    blocks = nn.ModuleList(
        [_fused_block(block, theirs.config) for block in theirs.model.layers]
    )
    norm = RmsNorm(theirs.model.norm.weight, theirs.config.rms_norm_eps)
    stem, unembed = (
        embedding(theirs.model.embed_tokens.weight),
        linear(theirs.lm_head.weight),
    )
    return Port(stem=stem, blocks=blocks, closing=norm, unembed=unembed)


def _fused_block(block: Any, config: Any) -> PreNormBlock:
    attention, mlp, eps = block.self_attn, block.mlp, config.rms_norm_eps
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    qkv = _joined(*projections)
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
    """Attention in Meta's layout: rotary pairs are neighbours, and the table comes from
    outside.
    """

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
        query, key, value = (
            split_heads(part(x), self.width) for part in (self.wq, self.wk, self.wv)
        )
        query = rotate_pairs(query, turn)
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
    """The whole of Llama in Meta's layout: one rotary table is handed to every block."""

    def forward(self, ids: Tensor) -> Tensor:
        embed, rope, blocks, norm, head = (
            self.get_submodule(name) for name in self.roles
        )
        x, turn = embed(ids), rope(ids)
        for block in blocks:  # type: ignore[attr-defined]
            x = block(x, turn)
        out: Tensor = head(norm(x))
        return out


def meta_llama(theirs: Any, *, folded: bool = False) -> Port:
    """Llama in Meta's layout, and if asked for with the weights of its norms in the
    projections behind them.
    """
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
    gains = block.input_layernorm.weight, block.post_attention_layernorm.weight
    before, behind = (
        gains if folded else (torch.ones_like(gains[0]), torch.ones_like(gains[1]))
    )
    wq, wk = (
        linear(interleaved(part.weight * before, width))
        for part in (attention.q_proj, attention.k_proj)
    )
    wv, wo = linear(attention.v_proj.weight * before), copied(attention.o_proj)
    w1, w3 = linear(mlp.gate_proj.weight * behind), linear(mlp.up_proj.weight * behind)
    norm1, norm2 = (
        (RmsNorm(None, eps), RmsNorm(None, eps)) if folded else norms(block, eps)
    )
    att = MetaAttention(width, wq, wk, wv, wo)
    feed_forward = MetaFeedForward(w1, copied(mlp.down_proj), w3)
    return PreNormBlock(
        attention_norm=norm1, att=att, ffn_norm=norm2, feed_forward=feed_forward
    )


def meta_folded_llama(theirs: Any) -> Port:
    """Llama in Meta's layout with folded norms."""
    return meta_llama(theirs, folded=True)


def folded_llama(theirs: Any) -> Port:
    """Llama whose norms have no weights: they are in the projections behind them, and
    the last in the head.
    """
    blocks = nn.ModuleList(
        [_folded_block(block, theirs.config) for block in theirs.model.layers]
    )
    norm = RmsNorm(None, theirs.config.rms_norm_eps)
    head = linear(theirs.lm_head.weight * theirs.model.norm.weight)
    return Port(
        embed=embedding(theirs.model.embed_tokens.weight), h=blocks, norm=norm, lm=head
    )


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
    """A linear of one's own, with a weight called `w` and a bias called `b`."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(theirs.weight.detach().clone())
        self.b = (
            None if theirs.bias is None else nn.Parameter(theirs.bias.detach().clone())
        )

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
    """Llama with linears of one's own and activations as modules."""
    blocks = nn.ModuleList(
        [_own_block(block, theirs.config) for block in theirs.model.layers]
    )
    norm = RmsNorm(theirs.model.norm.weight, theirs.config.rms_norm_eps)
    table = embedding(theirs.model.embed_tokens.weight)
    return Port(table=table, stack=blocks, ln_f=norm, readout=Affine(theirs.lm_head))


def _own_block(block: Any, config: Any) -> PreNormBlock:
    attention, mlp, eps = block.self_attn, block.mlp, config.rms_norm_eps
    parts = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    q, k, v, o = (Affine(part) for part in parts)
    gate, up, down = (
        Affine(part) for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    ln_1, ln_2 = norms(block, eps)
    sa = Separate(config, q, k, v, o)
    ff = GatedByModule(gate, up, down)
    return PreNormBlock(ln_1=ln_1, sa=sa, ln_2=ln_2, ff=ff)

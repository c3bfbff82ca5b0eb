"""GPT-2 with split projections, folded norms or torch's attention, and BERT with that."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.faults.ports.maths import (
    Activate,
    CenteredNorm,
    Part,
    Port,
    PreNormBlock,
    attend,
    copied,
    embedding,
    gelu_tanh,
    join_heads,
    linear,
    out_first,
    split_heads,
    through,
    visible,
)

IN_ATTENTION = ("scale_missing", "mask_off_by_one", "mask_missing")


class Separate(Part):
    """Causal attention with q, k and v as projections of their own."""

    mistakes = IN_ATTENTION

    def __init__(
        self,
        width: int,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        out: nn.Module,
    ) -> None:
        super().__init__()
        self.width = width
        self.query = query
        self.key = key
        self.value = value
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        query = split_heads(self.query(x), self.width)
        key = split_heads(self.key(x), self.width)
        value = split_heads(self.value(x), self.width)
        out: Tensor = self.out(join_heads(attend(query, key, value, self.mistake)))
        return out


class Fused(Part):
    """Causal attention with one projection for q, k and v."""

    mistakes = IN_ATTENTION

    def __init__(self, width: int, qkv: nn.Module, out: nn.Module) -> None:
        super().__init__()
        self.width = width
        self.qkv = qkv
        self.out = out

    def forward(self, x: Tensor) -> Tensor:
        thirds = self.qkv(x).chunk(3, -1)
        query, key, value = (split_heads(third, self.width) for third in thirds)
        mixed = attend(query, key, value, self.mistake, kernel=True)
        out: Tensor = self.out(join_heads(mixed))
        return out


class FeedForward(Part):
    """An MLP whose activation is a function."""

    mistakes = ("activation",)

    def __init__(self, wide: nn.Module, narrow: nn.Module) -> None:
        super().__init__()
        self.wide = wide
        self.narrow = narrow

    def forward(self, x: Tensor) -> Tensor:
        act = functional.gelu if self.mistake == "activation" else gelu_tanh
        out: Tensor = self.narrow(act(self.wide(x)))
        return out


class FeedForwardByModule(Part):
    """An MLP whose activation is a module."""

    def __init__(self, fc_in: nn.Module, fc_out: nn.Module) -> None:
        super().__init__()
        self.fc_in = fc_in
        self.fc_out = fc_out
        self.act = Activate(gelu_tanh, functional.gelu)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc_out(self.act(self.fc_in(x)))
        return out


class Positioned(Port):
    """A whole port of an embedding, positions, blocks, a norm and a head."""

    mistakes = ("positions_off_by_one",)

    def forward(self, ids: Tensor) -> Tensor:
        embed, positions, blocks, norm, head = self.ordered_parts()
        x = embed(ids) + positions(_positions(ids, self.mistake))
        out: Tensor = head(norm(through(blocks, x)))
        return out


def _positions(ids: Tensor, mistake: str) -> Tensor:
    first = 1 if mistake == "positions_off_by_one" else 0
    return torch.arange(first, first + ids.shape[1], device=ids.device)


def _gpt2_port(
    theirs: Any,
    names: str,
    make_block: Callable[[Any, Any], nn.Module],
    *,
    folds_norms: bool = False,
) -> Port:
    """Assemble a port whose five parts have these names."""
    inner = theirs.transformer
    norm, head = _norm(inner.ln_f), linear(theirs.lm_head.weight)
    if folds_norms:
        norm = CenteredNorm(None, None, inner.ln_f.eps)
        head = folded(theirs.lm_head, inner.ln_f)
    words, places = embedding(inner.wte.weight), embedding(inner.wpe.weight)
    blocks = nn.ModuleList([make_block(block, theirs.config) for block in inner.h])
    parts = (words, places, blocks, norm, head)
    return Positioned(**dict(zip(names.split(), parts, strict=True)))


def split_gpt2(theirs: Any) -> Port:
    """Port GPT-2 with q, k and v as linears of their own."""
    return _gpt2_port(theirs, "tok pos blocks ln_end head", _split_block)


def _norm(norm: Any) -> CenteredNorm:
    return CenteredNorm(norm.weight, norm.bias, norm.eps)


def _split_block(block: Any, config: Any) -> PreNormBlock:
    fused = block.attn.c_attn
    weights, biases = out_first(fused).chunk(3), fused.bias.chunk(3)
    query, key, value = map(linear, weights, biases)
    width = config.n_embd // config.n_head
    ln_a, ln_b = _norm(block.ln_1), _norm(block.ln_2)
    attn = Separate(width, query, key, value, copied(block.attn.c_proj))
    ff = FeedForwardByModule(copied(block.mlp.c_fc), copied(block.mlp.c_proj))
    return PreNormBlock(ln_a=ln_a, attn=attn, ln_b=ln_b, ff=ff)


def folded(part: Any, norm: Any) -> nn.Linear:
    """Fold the weight and the bias of a norm into the linear behind it."""
    weight = out_first(part)
    bias = weight @ norm.bias
    if part.bias is not None:
        bias = bias + part.bias
    return linear(weight * norm.weight, bias)


def folded_gpt2(theirs: Any) -> Port:
    """Port GPT-2 with the weights and biases of its norms in the linears behind them."""
    names = "words places layers norm out"
    return _gpt2_port(theirs, names, _folded_block, folds_norms=True)


def _folded_block(block: Any, config: Any) -> PreNormBlock:
    width = config.n_embd // config.n_head
    norm1 = CenteredNorm(None, None, block.ln_1.eps)
    norm2 = CenteredNorm(None, None, block.ln_2.eps)
    qkv = folded(block.attn.c_attn, block.ln_1)
    wide = folded(block.mlp.c_fc, block.ln_2)
    attention = Fused(width, qkv, copied(block.attn.c_proj))
    mlp = FeedForward(wide, copied(block.mlp.c_proj))
    return PreNormBlock(norm1=norm1, attention=attention, norm2=norm2, mlp=mlp)


def packed(
    weight: Tensor, bias: Tensor, out: nn.Linear, heads: int
) -> nn.MultiheadAttention:
    """Return torch's attention with packed projections `[3 * width, width]`."""
    attention = nn.MultiheadAttention(
        weight.shape[1], heads, batch_first=True, device="meta"
    )
    attention.in_proj_weight = nn.Parameter(weight.detach().clone())
    attention.in_proj_bias = nn.Parameter(bias.detach().clone())
    attention.out_proj.weight, attention.out_proj.bias = out.weight, out.bias
    return attention


class PackedBlock(PreNormBlock):
    """A block of GPT-2 around `nn.MultiheadAttention`, for which it makes the mask."""

    mistakes = ("mask_off_by_one", "mask_missing", *PreNormBlock.mistakes)

    def call_attention(
        self, attention: nn.Module, normed: Tensor, *tables: Tensor
    ) -> Tensor:
        """Call attention on equal queries, keys and values, with a causal mask."""
        hidden = ~visible(normed.shape[1], self.mistake, normed.device)
        mixed: Tensor
        mixed, _ = attention(
            normed, normed, normed, attn_mask=hidden, need_weights=False
        )
        return mixed


def packed_gpt2(theirs: Any) -> Port:
    """Port GPT-2 with torch's own attention."""
    return _gpt2_port(theirs, "wte wpe trunk norm head", _packed_block)


def _packed_block(block: Any, config: Any) -> PackedBlock:
    fused, out = block.attn.c_attn, copied(block.attn.c_proj)
    mha = packed(out_first(fused), fused.bias, out, config.n_head)
    mlp = FeedForwardByModule(copied(block.mlp.c_fc), copied(block.mlp.c_proj))
    norm1, norm2 = _norm(block.ln_1), _norm(block.ln_2)
    return PackedBlock(norm1=norm1, mha=mha, norm2=norm2, mlp=mlp)


class BertBlock(Part):
    """A block of BERT around `nn.MultiheadAttention`, with norms after the sums."""

    mistakes = ("mask_added", "residual_misplaced", "residual_parallel")

    def __init__(
        self, mha: nn.Module, norm1: nn.Module, mlp: nn.Module, norm2: nn.Module
    ) -> None:
        super().__init__()
        self.mha = mha
        self.norm1 = norm1
        self.mlp = mlp
        self.norm2 = norm2

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        ahead = None
        if self.mistake == "mask_added":
            ahead = ~visible(x.shape[1], "", x.device)
        mixed, _ = self.mha(
            x, x, x, key_padding_mask=padding, attn_mask=ahead, need_weights=False
        )
        middle = self.norm1(x + mixed)
        base = x if self.mistake == "residual_misplaced" else middle
        source = x if self.mistake == "residual_parallel" else middle
        out: Tensor = self.norm2(base + self.mlp(source))
        return out


class BertStem(Part):
    """What enters the blocks of BERT: words, positions, the first token type, normed."""

    mistakes = ("positions_off_by_one",)

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.words = embedding(theirs.word_embeddings.weight)
        self.positions = embedding(theirs.position_embeddings.weight)
        self.types = embedding(theirs.token_type_embeddings.weight)
        self.norm = _torch_norm(theirs.LayerNorm)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.positions(_positions(ids, self.mistake))
        x = self.words(ids) + positions + self.types(torch.zeros_like(ids))
        out: Tensor = self.norm(x)
        return out


def _torch_norm(theirs: Any) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(theirs.weight), eps=theirs.eps, device="meta")
    norm.weight = nn.Parameter(theirs.weight.detach().clone())
    norm.bias = nn.Parameter(theirs.bias.detach().clone())
    return norm


class BertPort(Port):
    """A whole BERT of a stem, blocks, and a head in three steps."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        stem, blocks, transform, norm, head = self.ordered_parts()
        padding = torch.zeros_like(ids, dtype=torch.bool)
        if mask is not None:
            padding = mask == 0
        x = through(blocks, stem(ids), padding)
        out: Tensor = head(norm(functional.gelu(transform(x))))
        return out


def packed_bert(theirs: Any) -> Port:
    """Port BERT with torch's own attention, norms and activations."""
    predictions = theirs.cls.predictions
    blocks = [_bert_block(block, theirs.config) for block in theirs.bert.encoder.layer]
    return BertPort(
        stem=BertStem(theirs.bert.embeddings),
        encoder=nn.ModuleList(blocks),
        dense=copied(predictions.transform.dense),
        norm=_torch_norm(predictions.transform.LayerNorm),
        words_out=copied(predictions.decoder),
    )


def _bert_block(block: Any, config: Any) -> BertBlock:
    inner = block.attention.self
    parts = (inner.query, inner.key, inner.value)
    weight = torch.cat([part.weight for part in parts])
    bias = torch.cat([part.bias for part in parts])
    out = copied(block.attention.output.dense)
    mha = packed(weight, bias, out, config.num_attention_heads)
    mlp = nn.Sequential(
        copied(block.intermediate.dense), nn.GELU(), copied(block.output.dense)
    )
    return BertBlock(
        mha,
        _torch_norm(block.attention.output.LayerNorm),
        mlp,
        _torch_norm(block.output.LayerNorm),
    )

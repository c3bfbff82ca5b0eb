"""GPT-2 in other layouts: q, k, v split, norms folded, and attention by
`nn.MultiheadAttention`; and BERT by that.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from faults.ports.maths import (
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
        query, key, value = (
            split_heads(part(x), self.width)
            for part in (self.query, self.key, self.value)
        )
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
        query, key, value = (
            split_heads(third, self.width) for third in self.qkv(x).chunk(3, -1)
        )
        out: Tensor = self.out(
            join_heads(attend(query, key, value, self.mistake, kernel=True))
        )
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
    """The whole of a port with a table of positions: embedding, positions, blocks,
    norm, head.
    """

    mistakes = ("positions_off_by_one",)

    def forward(self, ids: Tensor) -> Tensor:
        embed, positions, blocks, norm, head = (
            self.get_submodule(name) for name in self.roles
        )
        first = 1 if self.mistake == "positions_off_by_one" else 0
        numbers = torch.arange(first, first + ids.shape[1], device=ids.device)
        x = embed(ids) + positions(numbers)
        for block in blocks:  # type: ignore[attr-defined]
            x = block(x)
        out: Tensor = head(norm(x))
        return out


def split_gpt2(theirs: Any) -> Port:
    """GPT-2 with q, k and v as linears of their own."""
    inner = theirs.transformer
    return Positioned(
        tok=embedding(inner.wte.weight),
        pos=embedding(inner.wpe.weight),
        blocks=nn.ModuleList([_split_block(block, theirs.config) for block in inner.h]),
        ln_end=_norm(inner.ln_f),
        head=linear(theirs.lm_head.weight),
    )


def _norm(norm: Any) -> CenteredNorm:
    return CenteredNorm(norm.weight, norm.bias, norm.eps)


def _split_block(block: Any, config: Any) -> PreNormBlock:
    fused = block.attn.c_attn
    weights, biases = out_first(fused).chunk(3), fused.bias.chunk(3)
    query, key, value = (
        linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)
    )
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
    """GPT-2 whose norms have no weights and no biases: they are in the linears behind
    them.
    """
    inner = theirs.transformer
    return Positioned(
        words=embedding(inner.wte.weight),
        places=embedding(inner.wpe.weight),
        layers=nn.ModuleList(
            [_folded_block(block, theirs.config) for block in inner.h]
        ),
        norm=CenteredNorm(None, None, inner.ln_f.eps),
        out=folded(theirs.lm_head, inner.ln_f),
    )


def _folded_block(block: Any, config: Any) -> PreNormBlock:
    width = config.n_embd // config.n_head
    norm1 = CenteredNorm(None, None, block.ln_1.eps)
    norm2 = CenteredNorm(None, None, block.ln_2.eps)
    qkv, wide = (
        folded(block.attn.c_attn, block.ln_1),
        folded(block.mlp.c_fc, block.ln_2),
    )
    attention = Fused(width, qkv, copied(block.attn.c_proj))
    mlp = FeedForward(wide, copied(block.mlp.c_proj))
    return PreNormBlock(norm1=norm1, attention=attention, norm2=norm2, mlp=mlp)


def packed(
    weight: Tensor, bias: Tensor, out: nn.Linear, heads: int
) -> nn.MultiheadAttention:
    """Make torch's own attention of packed projections `[3 * width, width]`."""
    attention = nn.MultiheadAttention(
        weight.shape[1], heads, batch_first=True, device="meta"
    )
    attention.in_proj_weight = nn.Parameter(weight.detach().clone())
    attention.in_proj_bias = nn.Parameter(bias.detach().clone())
    attention.out_proj.weight, attention.out_proj.bias = out.weight, out.bias
    return attention


class PackedBlock(Part):
    """A block of GPT-2 around `nn.MultiheadAttention`, for which it makes the mask."""

    mistakes = (
        "mask_off_by_one",
        "mask_missing",
        "residual_misplaced",
        "residual_parallel",
        "norm_not_called",
    )

    def __init__(
        self, norm1: nn.Module, mha: nn.Module, norm2: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.mha = mha
        self.norm2 = norm2
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        hidden = ~visible(x.shape[1], self.mistake, x.device)
        mixed, _ = self.mha(
            normed, normed, normed, attn_mask=hidden, need_weights=False
        )
        base = normed if self.mistake == "residual_misplaced" else x
        middle = base + mixed
        source = x if self.mistake == "residual_parallel" else middle
        entering = source if self.mistake == "norm_not_called" else self.norm2(source)
        out: Tensor = middle + self.mlp(entering)
        return out


def packed_gpt2(theirs: Any) -> Port:
    """GPT-2 with torch's own attention."""
    inner = theirs.transformer
    return Positioned(
        wte=embedding(inner.wte.weight),
        wpe=embedding(inner.wpe.weight),
        trunk=nn.ModuleList([_packed_block(block, theirs.config) for block in inner.h]),
        norm=_norm(inner.ln_f),
        head=linear(theirs.lm_head.weight),
    )


def _packed_block(block: Any, config: Any) -> PackedBlock:
    fused, out = block.attn.c_attn, copied(block.attn.c_proj)
    mha = packed(out_first(fused), fused.bias, out, config.n_head)
    mlp = FeedForwardByModule(copied(block.mlp.c_fc), copied(block.mlp.c_proj))
    return PackedBlock(_norm(block.ln_1), mha, _norm(block.ln_2), mlp)


class BertBlock(Part):
    """A block of BERT around `nn.MultiheadAttention`: norms come after the residual
    sums.
    """

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
        ahead = (
            ~visible(x.shape[1], "", x.device) if self.mistake == "mask_added" else None
        )
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
        first = 1 if self.mistake == "positions_off_by_one" else 0
        numbers = torch.arange(first, first + ids.shape[1], device=ids.device)
        x = (
            self.words(ids)
            + self.positions(numbers)
            + self.types(torch.zeros_like(ids))
        )
        out: Tensor = self.norm(x)
        return out


def _torch_norm(theirs: Any) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(theirs.weight), eps=theirs.eps, device="meta")
    norm.weight = nn.Parameter(theirs.weight.detach().clone())
    norm.bias = nn.Parameter(theirs.bias.detach().clone())
    return norm


class BertPort(Port):
    """The whole of BERT, `forward(ids, mask)`: stem, blocks, and the head in three
    steps.
    """

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        stem, blocks, transform, norm, head = (
            self.get_submodule(name) for name in self.roles
        )
        padding = torch.zeros_like(ids, dtype=torch.bool) if mask is None else mask == 0
        x = stem(ids)
        for block in blocks:  # type: ignore[attr-defined]
            x = block(x, padding)
        out: Tensor = head(norm(functional.gelu(transform(x))))
        return out


def packed_bert(theirs: Any) -> Port:
    """BERT with torch's own attention, norms and activations."""
    predictions = theirs.cls.predictions
    return BertPort(
        stem=BertStem(theirs.bert.embeddings),
        encoder=nn.ModuleList(
            [_bert_block(block, theirs.config) for block in theirs.bert.encoder.layer]
        ),
        dense=copied(predictions.transform.dense),
        norm=_torch_norm(predictions.transform.LayerNorm),
        words_out=copied(predictions.decoder),
    )


def _bert_block(block: Any, config: Any) -> BertBlock:
    inner = block.attention.self
    parts = (inner.query, inner.key, inner.value)
    weight, bias = (
        torch.cat([part.weight for part in parts]),
        torch.cat([part.bias for part in parts]),
    )
    mha = packed(
        weight, bias, copied(block.attention.output.dense), config.num_attention_heads
    )
    mlp = nn.Sequential(
        copied(block.intermediate.dense), nn.GELU(), copied(block.output.dense)
    )
    return BertBlock(
        mha,
        _torch_norm(block.attention.output.LayerNorm),
        mlp,
        _torch_norm(block.output.LayerNorm),
    )

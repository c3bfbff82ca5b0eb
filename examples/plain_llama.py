"""Llama in plain PyTorch, with the weights of a Hugging Face model, and three mistakes
that ports really make.

python examples/plain_llama.py               the port as it should be, held against the default model
python examples/plain_llama.py interleaved   rotary positions for neighbouring channels, as in the original weights
python examples/plain_llama.py repeat        key and value heads repeated in turn: 0, 1, 2, 0, 1, 2
python examples/plain_llama.py eps           the root of the norm's eps, added outside the square root
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MISTAKES = ("interleaved", "repeat", "eps")


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, width: int, eps: float, mistake: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.mistake = mistake

    def forward(self, x: Tensor) -> Tensor:
        mean_square = x.square().mean(-1, keepdim=True)
        if self.mistake == "eps":
            return self.gain * x / (mean_square.sqrt() + self.eps**0.5)
        return self.gain * x * torch.rsqrt(mean_square + self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions and shared key and value heads."""

    def __init__(self, config: Any, mistake: str) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        self.mistake = mistake
        width = getattr(config, "head_dim", None)
        self.width = width or config.hidden_size // self.heads
        self.base = config.rope_parameters["rope_theta"]
        queries = self.heads * self.width
        keys = self.groups * self.width
        self.wq = nn.Linear(config.hidden_size, queries, bias=False)
        self.wk = nn.Linear(config.hidden_size, keys, bias=False)
        self.wv = nn.Linear(config.hidden_size, keys, bias=False)
        self.wo = nn.Linear(queries, config.hidden_size, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of channels [..., token, channel] by the token's position."""
        channels = torch.arange(0, self.width, 2)
        frequencies = self.base ** (-channels / self.width)
        positions = torch.arange(x.shape[-2])
        angles = positions[:, None] * frequencies
        cos = angles.cos().to(x)
        sin = angles.sin().to(x)
        if self.mistake == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        rotated = [a * cos - b * sin, b * cos + a * sin]
        if self.mistake == "interleaved":
            return torch.stack(rotated, -1).flatten(-2)
        return torch.cat(rotated, -1)

    def repeat(self, x: Tensor) -> Tensor:
        """Repeat key or value heads, so that each query head has one."""
        times = self.heads // self.groups
        if self.mistake == "repeat":
            return x.repeat(1, times, 1, 1)
        return x.repeat_interleave(times, 1)

    def split(self, x: Tensor) -> Tensor:
        """Split channels into heads: [text, head, token, channel]."""
        by_head = x.unflatten(-1, (-1, self.width))
        return by_head.transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.wq(x))
        k = self.split(self.wk(x))
        v = self.split(self.wv(x))
        q = self.rotate(q)
        k = self.repeat(self.rotate(k))
        v = self.repeat(v)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        together = mixed.transpose(1, 2).flatten(-2)
        return self.wo(together)

    def take(self, theirs: Any) -> None:
        """Take over the weights of an attention layer."""
        self.wq.weight.copy_(theirs.q_proj.weight)
        self.wk.weight.copy_(theirs.k_proj.weight)
        self.wv.weight.copy_(theirs.v_proj.weight)
        self.wo.weight.copy_(theirs.o_proj.weight)


class Block(nn.Module):
    """One block: attention, then the gated MLP, each added to the residual stream."""

    def __init__(self, config: Any, mistake: str) -> None:
        super().__init__()
        width = config.hidden_size
        inner = config.intermediate_size
        self.norm1 = Norm(width, config.rms_norm_eps, mistake)
        self.attention = Attention(config, mistake)
        self.norm2 = Norm(width, config.rms_norm_eps, "")
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        gated = functional.silu(self.gate(y)) * self.up(y)
        return x + self.down(gated)

    def take(self, theirs: Any) -> None:
        """Take over the weights of a block."""
        self.norm1.gain.copy_(theirs.input_layernorm.weight)
        self.attention.take(theirs.self_attn)
        self.norm2.gain.copy_(theirs.post_attention_layernorm.weight)
        self.gate.weight.copy_(theirs.mlp.gate_proj.weight)
        self.up.weight.copy_(theirs.mlp.up_proj.weight)
        self.down.weight.copy_(theirs.mlp.down_proj.weight)


class PlainLlama(nn.Module):
    """The whole model: token ids [text, token] to logits. A mistake is made in one
    block.
    """

    def __init__(self, theirs: Any, mistake: str = "", block: int = 0) -> None:
        super().__init__()
        config = theirs.config
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        mistakes = [""] * config.num_hidden_layers
        mistakes[block] = mistake
        blocks = [Block(config, of_block) for of_block in mistakes]
        self.blocks = nn.ModuleList(blocks)
        self.norm = Norm(width, config.rms_norm_eps, "")
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        self.to(theirs.lm_head.weight.device)
        self.take(theirs)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def take(self, theirs: Any) -> None:
        """Take over the weights of a Hugging Face Llama."""
        self.embed.weight.copy_(theirs.model.embed_tokens.weight)
        for block, layer in zip(self.blocks, theirs.model.layers, strict=True):
            block.take(layer)
        self.norm.gain.copy_(theirs.model.norm.weight)
        self.head.weight.copy_(theirs.lm_head.weight)


if __name__ == "__main__":
    import hiddenscope as hs

    mistake = ""
    if len(sys.argv) > 1:
        mistake = sys.argv[1]
    model = hs.load()
    port = PlainLlama(model.module, mistake, block=7).eval()
    texts = [
        "The capital of France is Paris, and the capital of Germany is Berlin.",
        "In 1969, people landed on the moon.",
    ]
    result = hs.drift(model, port, texts)
    print(result.summary())
    sys.exit(int(result.facts["drifted"]))

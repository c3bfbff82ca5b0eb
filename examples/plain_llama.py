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
        self.gain, self.eps, self.mistake = (
            nn.Parameter(torch.ones(width)),
            eps,
            mistake,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.mistake == "eps":
            return (
                self.gain
                * x
                / (x.square().mean(-1, keepdim=True).sqrt() + self.eps**0.5)
            )
        return self.gain * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Attention(nn.Module):
    """Causal attention with rotary positions and shared key and value heads."""

    def __init__(self, config: Any, mistake: str) -> None:
        super().__init__()
        self.heads, self.groups, self.mistake = (
            config.num_attention_heads,
            config.num_key_value_heads,
            mistake,
        )
        self.width = (
            getattr(config, "head_dim", None) or config.hidden_size // self.heads
        )
        self.base = config.rope_parameters["rope_theta"]
        sizes = (self.heads, self.groups, self.groups)
        self.wq, self.wk, self.wv = (
            nn.Linear(config.hidden_size, n * self.width, bias=False) for n in sizes
        )
        self.wo = nn.Linear(self.heads * self.width, config.hidden_size, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        frequencies = self.base ** (-torch.arange(0, self.width, 2) / self.width)
        angles = torch.arange(x.shape[-2])[:, None] * frequencies
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        if self.mistake == "interleaved":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def repeat(self, x: Tensor) -> Tensor:
        times = self.heads // self.groups
        return (
            x.repeat(1, times, 1, 1)
            if self.mistake == "repeat"
            else x.repeat_interleave(times, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k, v = self.rotate(q), self.repeat(self.rotate(k)), self.repeat(v)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One block: attention, then the gated MLP, each added to the residual stream."""

    def __init__(self, config: Any, mistake: str) -> None:
        super().__init__()
        self.norm1 = Norm(config.hidden_size, config.rms_norm_eps, mistake)
        self.attention = Attention(config, mistake)
        self.norm2 = Norm(config.hidden_size, config.rms_norm_eps, "")
        self.gate, self.up = (
            nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
            for _ in range(2)
        )
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """The whole model: token ids [text, token] to logits. A mistake is made in one
    block.
    """

    def __init__(self, theirs: Any, mistake: str = "", block: int = 0) -> None:
        super().__init__()
        config = theirs.config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        numbers = range(config.num_hidden_layers)
        self.blocks = nn.ModuleList(
            [Block(config, mistake if number == block else "") for number in numbers]
        )
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, "")
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.take(theirs)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def take(self, theirs: Any) -> None:
        """Take over the weights of a Hugging Face Llama."""
        pairs = [
            (self.embed.weight, theirs.model.embed_tokens),
            (self.norm.gain, theirs.model.norm),
        ]
        pairs.append((self.head.weight, theirs.lm_head))
        for mine, block in zip(self.blocks, theirs.model.layers, strict=True):
            pairs += [
                (mine.norm1.gain, block.input_layernorm),
                (mine.norm2.gain, block.post_attention_layernorm),
            ]
            pairs += [
                (
                    getattr(mine.attention, f"w{x}").weight,
                    getattr(block.self_attn, f"{x}_proj"),
                )
                for x in "qkvo"
            ]
            pairs += [
                (getattr(mine, name).weight, getattr(block.mlp, f"{name}_proj"))
                for name in ("gate", "up", "down")
            ]
        for own, module in pairs:
            own.copy_(module.weight)


if __name__ == "__main__":
    import hiddenscope as hs

    model = hs.load()
    port = PlainLlama(model.module, *sys.argv[1:2], block=7).eval()
    texts = [
        "The capital of France is Paris, and the capital of Germany is Berlin.",
        "In 1969, people landed on the moon.",
    ]
    result = hs.drift(model, port, texts)
    print(result.summary())
    sys.exit(int(result.facts["drifted"]))

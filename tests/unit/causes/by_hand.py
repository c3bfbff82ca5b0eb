"""Two families written by hand, in which every reader reads a stream of its own.

A llama whose heads share keys and values, and a GPT-J whose parts are side by side. An
edge is added where it is read; nothing of the package is used but the weights.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope.testing import build, tiny_model

Edge = tuple[str, str]
"""The names of a writer and a reader."""


def grouped_llama(seed: int = 0, layers: int = 3) -> nn.Module:
    """Build a tiny llama whose four heads share two keys and values."""
    config: dict[str, Any] = {
        **dict.fromkeys(("num_attention_heads",), 4),
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "head_dim": 16,
    }
    row = {"model_class": "LlamaForCausalLM", "config_class": "LlamaConfig"}
    return build({**row, "config": config}, seed=seed)


HANDS = {"llama": grouped_llama, "gptj": partial(tiny_model, "gptj")}


class Run:
    """One run by hand: what every part writes, and what heads and MLPs make inside.

    Through `edges` a reader gets what the writer wrote in `other`. `inside` are the
    values of each head before its projection, and the normed input of each MLP.
    """

    def __init__(
        self,
        module: Any,
        ids: list[int],
        other: Mapping[str, Tensor] | None = None,
        edges: Iterable[Edge] = (),
    ) -> None:
        self.module = module
        self.other = other or {}
        self.edges = [*edges]
        self.written: dict[str, Tensor] = {}
        self.inside: dict[str, Tensor] = {}
        with torch.no_grad():
            is_llama = module.config.model_type == "llama"
            self.logits = self._llama(ids) if is_llama else self._gptj(ids)

    def _read(self, reader: str) -> Tensor:
        """Return the stream so far, with what the edges into a reader exchange."""
        stream = torch.stack([*self.written.values()]).sum(0)
        for writer, end in self.edges:
            if end == reader and writer in self.written:
                stream = stream + self.other[writer] - self.written[writer]
        return stream

    def _attend(self, layer: int, part: Any, norm: Any, out: Any, rotate: Any) -> None:
        name = f"layer.{layer}.attn"
        dim, new = 16, {}
        count = part.k_proj.weight.shape[0] // dim
        for head in range(4):
            shared = head * count // 4
            operands = []
            for kind, place in (("q", head), ("k", shared), ("v", shared)):
                weight = getattr(part, f"{kind}_proj").weight
                read = norm(self._read(f"{name}.{kind}.{place}"))
                operands.append(read @ weight[place * dim : (place + 1) * dim].T)
            q, k, v = operands
            scores = rotate(q) @ rotate(k).T / dim**0.5
            future = torch.ones_like(scores).triu(1).bool()
            z = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
            columns = slice(head * dim, (head + 1) * dim)
            self.inside[f"{name}.head.{head}"] = z
            new[f"{name}.head.{head}"] = z @ out.weight[:, columns].T
        self.new = new

    def _llama(self, ids: list[int]) -> Tensor:
        model = self.module.model
        self.written["layer.0"] = model.embed_tokens.weight[ids]
        angles = _angles(len(ids), 16).repeat(1, 2)

        def rotate(x: Tensor) -> Tensor:
            turned = torch.cat([-x[:, 8:], x[:, :8]], -1)
            return x * angles.cos() + turned * angles.sin()

        for layer, block in enumerate(model.layers, 1):
            part = block.self_attn
            norm = partial(_rms, block.input_layernorm)
            self._attend(layer, part, norm, part.o_proj, rotate)
            self.written |= self.new
            name = f"layer.{layer}.mlp"
            x = _rms(block.post_attention_layernorm, self._read(name))
            self.inside[name] = x
            mlp = block.mlp
            gate = functional.silu(x @ mlp.gate_proj.weight.T)
            up = x @ mlp.up_proj.weight.T
            self.written[name] = (gate * up) @ mlp.down_proj.weight.T
        return _rms(model.norm, self._read("logits")) @ self.module.lm_head.weight.T

    def _gptj(self, ids: list[int]) -> Tensor:
        model = self.module.transformer
        self.written["layer.0"] = model.wte.weight[ids]
        angles = _angles(len(ids), 8).repeat_interleave(2, 1)

        def rotate(x: Tensor) -> Tensor:
            first = x[:, :8]
            pairs = first.unflatten(1, (4, 2))
            turned = torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(1)
            return torch.cat(
                [first * angles.cos() + turned * angles.sin(), x[:, 8:]], -1
            )

        for layer, block in enumerate(model.h, 1):
            part, mlp = block.attn, block.mlp
            self._attend(layer, part, block.ln_1, part.out_proj, rotate)
            name = f"layer.{layer}.mlp"
            x = block.ln_1(self._read(name))
            self.inside[name] = x
            hidden = functional.gelu(mlp.fc_in(x), approximate="tanh")
            self.written |= self.new
            self.written[name] = mlp.fc_out(hidden)
        return self.module.lm_head(model.ln_f(self._read("logits")))


def _angles(tokens: int, dim: int) -> Tensor:
    speeds = 10_000 ** (-torch.arange(0, dim, 2) / dim)
    return torch.outer(torch.arange(tokens).float(), speeds)


def _rms(norm: Any, x: Tensor) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    return x * scale * norm.weight

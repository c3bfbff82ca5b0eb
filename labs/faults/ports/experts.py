"""Mixtral and Qwen2-MoE with experts as modules that are called in a loop."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labs.faults.ports.llama import Gated, Separate, gated, llama_port, norms
from labs.faults.ports.maths import (
    Activate,
    Part,
    Port,
    PreNormBlock,
    copied,
    linear,
    wide,
)


class Expert(Part):
    """One expert whose activation is a function."""

    mistakes = ("activation",)

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.w1 = linear(gate)
        self.w3 = linear(up)
        self.w2 = linear(down)

    def forward(self, x: Tensor) -> Tensor:
        return gated(self.w1(x), self.w3(x), self.w2, self.mistake)


class ExpertByModule(Part):
    """One expert whose activation is a module."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.gate = linear(gate)
        self.up = linear(up)
        self.down = linear(down)
        self.act = Activate(functional.silu, functional.gelu)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.gate(x)) * self.up(x))
        return out


def loop(
    experts: nn.ModuleList, rows: Tensor, shares: Tensor, selected: Tensor
) -> Tensor:
    """Add up the outputs of the selected experts, each on the rows routed to it."""
    out = torch.zeros_like(rows)
    for number, expert in enumerate(experts):
        row, place = (selected == number).nonzero(as_tuple=True)
        if len(row):
            share = shares[row, place, None]
            out.index_add_(0, row, (expert(rows[row]) * share).to(rows.dtype))
    return out


class Mixture(Part):
    """A mixture that routes in its own code."""

    mistakes = ("router_normalisation", "router_top_k")

    def __init__(self, mlp: Any, top: int) -> None:
        super().__init__()
        self.top = top
        self.router = linear(mlp.gate.weight)
        weights = zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(
            [Expert(gate_up, down) for gate_up, down in weights]
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        top = self.top - 1 if self.mistake == "router_top_k" else self.top
        shares, selected = wide(self.router(rows)).softmax(-1).topk(top, -1)
        if self.mistake != "router_normalisation":
            shares = shares / shares.sum(-1, keepdim=True)
        return loop(self.experts, rows, shares, selected).view_as(x)


class Router(Part):
    """A router as a module: it returns the shares and numbers of the experts."""

    mistakes = ("router_normalisation", "router_top_k")

    def __init__(self, weight: Tensor, top: int) -> None:
        super().__init__()
        self.top = top
        self.logits = linear(weight)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        top = self.top - 1 if self.mistake == "router_top_k" else self.top
        shares, selected = wide(self.logits(rows)).softmax(-1).topk(top, -1)
        if self.mistake == "router_normalisation":
            shares = shares / shares.sum(-1, keepdim=True)
        return shares.to(rows.dtype), selected


class SharedMixture(Part):
    """A mixture with a router of its own, and an expert that every token takes."""

    mistakes = ("shared_expert_ungated",)

    def __init__(self, mlp: Any, top: int) -> None:
        super().__init__()
        self.router = Router(mlp.gate.weight, top)
        weights = zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)
        self.experts = nn.ModuleList(
            [ExpertByModule(gate_up, down) for gate_up, down in weights]
        )
        shared = mlp.shared_expert
        self.common = Gated(
            copied(shared.gate_proj), copied(shared.up_proj), copied(shared.down_proj)
        )
        self.common_gate = linear(mlp.shared_expert_gate.weight)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        common = self.common(rows)
        if self.mistake != "shared_expert_ungated":
            common = self.common_gate(rows).sigmoid() * common
        mixed = loop(self.experts, rows, *self.router(rows))
        out: Tensor = mixed + common
        return out.view_as(x)


def loop_mixtral(theirs: Any) -> Port:
    """Port Mixtral with experts in a loop."""
    return _port(theirs, Mixture)


def loop_qwen2_moe(theirs: Any) -> Port:
    """Port Qwen2-MoE with experts in a loop, and a router as a module."""
    return _port(theirs, SharedMixture)


def _port(theirs: Any, mixture: type[Mixture] | type[SharedMixture]) -> Port:
    def make_block(block: Any, config: Any) -> PreNormBlock:
        attention = block.self_attn
        q, k, v = map(copied, (attention.q_proj, attention.k_proj, attention.v_proj))
        norm1, norm2 = norms(block, config.rms_norm_eps)
        mixing = Separate(config, q, k, v, copied(attention.o_proj))
        moe = mixture(block.mlp, config.num_experts_per_tok)
        return PreNormBlock(norm1=norm1, attention=mixing, norm2=norm2, moe=moe)

    return llama_port(theirs, "embed layers norm head", make_block)

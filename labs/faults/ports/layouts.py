"""The ports by name, with their layouts and references."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from hiddenscope.testing import build
from labs.faults.ports.experts import loop_mixtral, loop_qwen2_moe
from labs.faults.ports.gpt2 import folded_gpt2, packed_bert, packed_gpt2, split_gpt2
from labs.faults.ports.llama import (
    folded_llama,
    fused_llama,
    meta_folded_llama,
    meta_llama,
    own_llama,
    split_phi3,
)
from labs.faults.ports.maths import Port

BLOCKS = 4

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": BLOCKS,
    "max_position_embeddings": 128,
}
_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {**_COMMON, **_GROUPED, **_SPECIAL, "head_dim": 16, "intermediate_size": 96}
_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_GPT2 = {
    **_SPECIAL,
    **_DROPOUT,
    "vocab_size": 128,
    "n_positions": 128,
    "n_embd": 64,
    "n_layer": BLOCKS,
    "n_head": 4,
}
_BERT = {**_COMMON, "num_attention_heads": 4, "intermediate_size": 96}
_MIXTRAL = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
_QWEN = {
    **_COMMON,
    **_GROUPED,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def _row(family: str, head: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "config_class": f"{family}Config",
        "model_class": f"{family}{head}",
        "config": dict(config),
    }


_causal = partial(_row, head="ForCausalLM")
_DROPLESS_BERT = {
    **_BERT,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ROWS = {
    "gpt2": _row("GPT2", "LMHeadModel", _GPT2),
    "phi3": _causal(
        "Phi3",
        config={**_LLAMA, "original_max_position_embeddings": 128, "resid_pdrop": 0.0},
    ),
    "llama": _causal("Llama", config=_LLAMA),
    "llama_bias": _causal(
        "Llama", config={**_LLAMA, "attention_bias": True, "mlp_bias": True}
    ),
    "mixtral": _causal("Mixtral", config=_MIXTRAL),
    "qwen2_moe": _causal("Qwen2Moe", config=_QWEN),
    "bert": _row("Bert", "ForMaskedLM", _DROPLESS_BERT),
}


@dataclass(frozen=True)
class PortLayout:
    """A port: its name, its layout, its reference's family, and how it is made."""

    name: str
    layout: str
    family: str
    make: Callable[[Any], Port]

    def reference(self, seed: int = 0) -> nn.Module:
        """Build the tiny Hugging Face model that the port takes its weights from."""
        return build(ROWS[self.family], seed=seed)

    def port(self, reference: nn.Module) -> Port:
        """Return the port without a fault, in its reference's dtype and device.

        >>> ids = torch.tensor([[5, 6, 7, 8]])
        >>> reference = PORTS["meta-llama"].reference()
        >>> port = PORTS["meta-llama"].port(reference)
        >>> torch.allclose(port(ids), reference(ids).logits, atol=1e-5)
        True
        """
        weight = next(reference.parameters())
        # Norms are folded in float32 at least: a weight is rounded once, at the end.
        exact = copy.deepcopy(reference).to(
            torch.promote_types(weight.dtype, torch.float32)
        )
        port = self.make(exact).eval()
        return port.to(device=weight.device, dtype=weight.dtype)


ALL = (
    PortLayout("split-gpt2", "split", "gpt2", split_gpt2),
    PortLayout("split-phi3", "split", "phi3", split_phi3),
    PortLayout("fused-llama", "fused", "llama_bias", fused_llama),
    PortLayout("meta-llama", "meta", "llama", meta_llama),
    PortLayout("folded-llama", "folded", "llama", folded_llama),
    PortLayout("folded-gpt2", "folded", "gpt2", folded_gpt2),
    PortLayout("meta-folded-llama", "meta and folded", "llama", meta_folded_llama),
    PortLayout("own-llama", "own linears", "llama_bias", own_llama),
    PortLayout("loop-mixtral", "experts", "mixtral", loop_mixtral),
    PortLayout("loop-qwen2-moe", "experts", "qwen2_moe", loop_qwen2_moe),
    PortLayout("packed-gpt2", "packed", "gpt2", packed_gpt2),
    PortLayout("packed-bert", "packed", "bert", packed_bert),
)
PORTS: dict[str, PortLayout] = {layout.name: layout for layout in ALL}

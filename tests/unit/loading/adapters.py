"""Adapters of several kinds, each of which changes every layer that it is on."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn

KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]),
    "rslora": lambda: peft.LoraConfig(
        r=4, lora_alpha=2, use_rslora=True, target_modules=["v_proj"]
    ),
    "dora": lambda: peft.LoraConfig(r=3, use_dora=True, target_modules=["q_proj"]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["o_proj"]),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
    "parameter": lambda: peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["q_proj.weight"]
    ),
    "saved_head": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
    # Whole modules, of which one is named by its path.
    "saved_parts": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["self_attn.o_proj", "mlp"]
    ),
}


def write_adapter(folder: Path, kind: str, base: nn.Module, seed: int = 1) -> Path:
    """Save an adapter on a base that nobody else uses."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(base, KINDS[kind]())
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            noise = 0.3 * torch.randn_like(weight)
            weight.data.add_(noise if "head" not in name else 0.1 * noise)
    with warnings.catch_warnings():
        # PEFT says that it saves the embeddings as well.
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return folder

"""The models that faults are planted in, and the texts they read."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from labs.faults.ports import PORTS, Port

TEXTS = (
    "The river rises in the hills and runs to the sea.",
    "An engine turns the heat of steam into motion.",
    "Write to the address on the other side.",
    "Nothing is lost.",
)
TARGETS = (
    "A river that rises.",
    "Heat as motion of steam.",
    "An address there.",
    "All of it.",
)
LAYERS = 4
REAL = "smollm2"

_COMMON = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 128,
}
_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROWS: dict[str, dict[str, Any]] = {
    "llama": {
        "config_class": "LlamaConfig",
        "model_class": "LlamaForCausalLM",
        "config": {
            **_COMMON,
            **_GROUPED,
            "intermediate_size": 96,
            "attention_bias": True,
            "pad_token_id": 0,
        },
    },
    "gemma2": {
        "config_class": "Gemma2Config",
        "model_class": "Gemma2ForCausalLM",
        "config": {
            **_COMMON,
            **_GROUPED,
            "intermediate_size": 96,
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    },
    "qwen2_moe": {
        "config_class": "Qwen2MoeConfig",
        "model_class": "Qwen2MoeForCausalLM",
        "config": {
            **_COMMON,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "num_experts": 6,
            "num_experts_per_tok": 2,
        },
    },
}
FAMILIES = (
    "gpt2",
    "llama",
    "gemma3_text",
    "gemma2",
    "bert",
    "t5",
    "bart",
    "mixtral",
    "qwen2_moe",
    "gpt_neox",
    "opt",
)


@dataclass(frozen=True)
class Subject:
    """A model with its tokenizer and texts, as modules and as token ids."""

    name: str
    module: nn.Module
    tokenizer: Any
    texts: tuple[str, ...]
    targets: tuple[str, ...] | None = None

    @property
    def ids(self) -> list[list[int]]:
        return [self.tokenizer(text).input_ids for text in self.texts]

    @property
    def target_ids(self) -> list[list[int]] | None:
        if self.targets is None:
            return None
        start = self.module.config.decoder_start_token_id
        return [
            [start, *self.tokenizer(text, add_special_tokens=False).input_ids]
            for text in self.targets
        ]


@cache
def subject(
    name: str, dtype: str = "float32", device: str = "cpu", seed: int = 0
) -> Subject:
    """Build the reference of a family or of a port, or load the real model by its name."""
    if name == REAL:
        model = hs.load(REAL, dtype=dtype)
        return Subject(name, model.module.to(device), model.tokenizer, TEXTS)
    module = _tiny(name, seed).to(device=device, dtype=getattr(torch, dtype))
    config: Any = module.config
    two = bool(config.is_encoder_decoder)
    if two:
        config.decoder_start_token_id = (
            module.generation_config.decoder_start_token_id
        ) = 1  # type: ignore[union-attr]
    return Subject(
        name,
        module,
        tiny_tokenizer(cls=config.model_type == "bert"),
        TEXTS,
        TARGETS if two else None,
    )


def _tiny(name: str, seed: int) -> nn.Module:
    if name in PORTS:
        return PORTS[name].reference(seed)
    module: Any = build(ROWS[name]) if name in ROWS else tiny_model(name, layers=LAYERS)
    # Some versions of transformers choose a kernel that leaves the cap of the scores
    # out.
    if getattr(module.config, "attn_logit_softcapping", None):
        module.set_attn_implementation("eager")
    assert isinstance(module, nn.Module)
    return module


@torch.no_grad()
def outputs(module: nn.Module, of: Subject, *, together: bool = False) -> Tensor:
    """Run a module and return a row of logits for each token.

    Texts run one by one, or all in one padded batch.
    """
    ids, targets = of.ids, of.target_ids
    device = next(module.parameters()).device
    batches = (
        [range(len(ids))] if together else [[number] for number in range(len(ids))]
    )
    rows = []
    for batch in batches:
        arguments, lengths = _padded([ids[number] for number in batch], device)
        if targets is not None:
            decoded, lengths = _padded([targets[number] for number in batch], device)
            arguments["decoder_input_ids"] = decoded["input_ids"]
        logits = _logits(module, arguments)
        rows += [row[:length] for row, length in zip(logits, lengths, strict=True)]
    return torch.cat(rows).double().cpu()


def _logits(module: nn.Module, arguments: dict[str, Tensor]) -> Tensor:
    """Call a module as what it is: a port on ids alone, or a Hugging Face model."""
    output: Any = (
        module(arguments["input_ids"])
        if isinstance(module, Port)
        else module(**arguments, use_cache=False)
    )
    logits: Tensor = output if isinstance(module, Port) else output.logits
    return logits


def _padded(
    ids: Sequence[Sequence[int]], device: torch.device
) -> tuple[dict[str, Tensor], list[int]]:
    lengths = [len(row) for row in ids]
    filled = torch.zeros(len(ids), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(filled)
    for row, (text_ids, length) in enumerate(zip(ids, lengths, strict=True)):
        filled[row, :length], mask[row, :length] = torch.tensor(text_ids), 1
    return {"input_ids": filled.to(device), "attention_mask": mask.to(device)}, lengths


def with_kernel(module: nn.Module, kernel: str) -> nn.Module:
    """Return a copy that attends by another kernel."""
    other: Any = copy.deepcopy(module)
    other.set_attn_implementation(kernel)
    return other


def in_float64(module: nn.Module) -> nn.Module:
    """Return a copy in float64.

    The grouped product of experts has no float64 kernel, but a loop over experts has.
    """
    other: Any = copy.deepcopy(module).double()
    if getattr(other.config, "_experts_implementation", None):
        other.set_experts_implementation("eager")
    return other

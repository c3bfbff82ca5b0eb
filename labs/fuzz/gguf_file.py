"""A sound GGUF file of a tiny Llama, as llama.cpp's converter writes it: the fuzz
damages it, and tests read it.
"""

from pathlib import Path

import gguf
import torch
from transformers import LlamaForCausalLM

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "a",
    "b",
    "▁a",
    "ab",
]


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """A query or key projection as llama.cpp keeps it: the two halves of each head's
    rotation interleaved.
    """
    rows, width = weight.shape
    return (
        weight.reshape(heads, 2, rows // heads // 2, width)
        .swapaxes(1, 2)
        .reshape(rows, width)
    )


def write_gguf(path: Path, module: LlamaForCausalLM, bos: bool | None = None) -> None:
    """Write a module whose vocabulary is PIECES; `bos` says whether texts begin with
    that token, if it is said.
    """
    config, state = module.config, module.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(rank) for rank in range(len(PIECES))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * 5])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if bos is not None:
        writer.add_add_bos_token(bos)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    parts = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
    }
    parts |= {
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
    }
    parts |= {
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for layer in range(config.num_hidden_layers):
        names |= {
            f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}"
            for ours, theirs in parts.items()
        }
    for ours, theirs in names.items():
        weight = state[f"{ours}.weight"]
        if theirs.endswith("attn_q"):
            weight = interleaved(weight, config.num_attention_heads)
        if theirs.endswith("attn_k"):
            weight = interleaved(weight, config.num_key_value_heads)
        writer.add_tensor(f"{theirs}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

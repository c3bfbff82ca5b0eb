"""Hosts: a compiled program as a GPT-2, OPT, BERT, Llama or plain module.

The first four are classes of transformers with their own activation functions, norms,
masks and positions. Nothing in them is patched: only their weights are set.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_outputs import CausalLMOutput

from labs.truth.circuit import circuit_of
from labs.truth.known import KnownModel
from labs.truth.layout import LOGIT, Compiled, clear, copy_rows
from labs.truth.program import Program
from labs.truth.rewrite import with_counted_positions, with_hidden_future

# Slow enough that a key turns by next to nothing over the longest input.
SLOW_BASE = 1e9
# What norms multiply states with, so that a norm can be told from nothing.
GAIN = 2.0
# More than any program needs: positions beyond its inputs are of no value.
POSITIONS = 64


def compile_into(host: str, program: Program) -> KnownModel:
    """Compile a program into a host."""
    return HOSTS[host](program)


def _in_gpt2(program: Program) -> KnownModel:
    circuit = circuit_of(program)
    compiled = Compiled(circuit, ACT2FN["gelu_new"], is_doubled=True, gain=GAIN)
    config = transformers.GPT2Config(
        vocab_size=len(program.vocabulary),
        n_positions=POSITIONS,
        n_embd=compiled.width,
        n_layer=circuit.blocks,
        n_head=compiled.heads,
        n_inner=compiled.neurons,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
    )
    module: Any = transformers.GPT2LMHeadModel(config).eval()
    clear(module)
    body = module.transformer
    copy_rows(body.wte.weight, compiled.embeddings())
    copy_rows(body.wpe.weight, compiled.positions())
    epsilon = config.layer_norm_epsilon
    for number, block in enumerate(body.h):
        weights = _HeadWeights(compiled, number)
        compiled.set_gain(block.ln_1, (number - 1, 1), epsilon)
        compiled.set_gain(block.ln_2, (number, 0), epsilon)
        stacked = torch.cat([weights.query, weights.key, weights.value])
        copy_rows(block.attn.c_attn.weight, stacked.T)
        copy_rows(block.attn.c_proj.weight, weights.output.T)
        units = compiled.blocks[number].neurons
        copy_rows(block.mlp.c_fc.weight, compiled.reading(units.reads).T)
        copy_rows(block.mlp.c_proj.weight, compiled.writing(units.writes).T)
    compiled.set_gain(body.ln_f, (circuit.blocks - 1, 1), epsilon)
    copy_rows(module.lm_head.weight, compiled.unembedding())
    return KnownModel("gpt2", program, circuit, module, compiled)


def _in_opt(program: Program) -> KnownModel:
    circuit = circuit_of(program)
    compiled = Compiled(circuit, ACT2FN["relu"], is_doubled=True, gain=GAIN)
    config = transformers.OPTConfig(
        vocab_size=len(program.vocabulary),
        max_position_embeddings=POSITIONS,
        hidden_size=compiled.width,
        word_embed_proj_dim=compiled.width,
        num_hidden_layers=circuit.blocks,
        num_attention_heads=compiled.heads,
        ffn_dim=compiled.neurons,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    module: Any = transformers.OPTForCausalLM(config).eval()
    clear(module)
    body = module.model.decoder
    copy_rows(body.embed_tokens.weight, compiled.embeddings())
    positions = compiled.positions()
    with torch.no_grad():
        # OPT leaves the first rows of its table to padding.
        first = body.embed_positions.offset
        body.embed_positions.weight[first : first + len(positions)] = positions
    epsilon = body.final_layer_norm.eps
    for number, block in enumerate(body.layers):
        weights = _HeadWeights(compiled, number)
        before = block.self_attn_layer_norm
        compiled.set_gain(before, (number - 1, 1), epsilon)
        after = block.final_layer_norm
        compiled.set_gain(after, (number, 0), epsilon)
        copy_rows(block.self_attn.q_proj.weight, weights.query)
        copy_rows(block.self_attn.k_proj.weight, weights.key)
        copy_rows(block.self_attn.v_proj.weight, weights.value)
        copy_rows(block.self_attn.out_proj.weight, weights.output)
        units = compiled.blocks[number].neurons
        copy_rows(block.fc1.weight, compiled.reading(units.reads))
        copy_rows(block.fc2.weight, compiled.writing(units.writes))
    compiled.set_gain(body.final_layer_norm, (circuit.blocks - 1, 1), epsilon)
    copy_rows(module.lm_head.weight, compiled.unembedding())
    return KnownModel("opt", program, circuit, module, compiled)


def _in_bert(program: Program) -> KnownModel:
    program, looks_back = with_hidden_future(program)
    circuit = circuit_of(program)
    compiled = Compiled(
        circuit, ACT2FN["gelu"], is_doubled=True, idle_terms=[looks_back]
    )
    config = transformers.BertConfig(
        vocab_size=len(program.vocabulary),
        max_position_embeddings=POSITIONS,
        hidden_size=compiled.width,
        num_hidden_layers=circuit.blocks,
        num_attention_heads=compiled.heads,
        intermediate_size=compiled.neurons,
        tie_word_embeddings=False,
        bos_token_id=0,
        pad_token_id=None,
    )
    module: Any = transformers.BertForMaskedLM(config).eval()
    clear(module)
    body = module.bert
    epsilon = config.layer_norm_eps
    copy_rows(body.embeddings.word_embeddings.weight, compiled.embeddings())
    copy_rows(body.embeddings.position_embeddings.weight, compiled.positions())
    compiled.set_gain(body.embeddings.LayerNorm, (-1, 0), epsilon)
    for number, block in enumerate(body.encoder.layer):
        weights = _HeadWeights(compiled, number)
        # The norms come after what was added.
        after_heads = block.attention.output.LayerNorm
        compiled.set_gain(after_heads, (number, 0), epsilon)
        after = block.output.LayerNorm
        compiled.set_gain(after, (number, 1), epsilon)
        copy_rows(block.attention.self.query.weight, weights.query)
        copy_rows(block.attention.self.key.weight, weights.key)
        copy_rows(block.attention.self.value.weight, weights.value)
        copy_rows(block.attention.output.dense.weight, weights.output)
        units = compiled.blocks[number].neurons
        copy_rows(block.intermediate.dense.weight, compiled.reading(units.reads))
        copy_rows(block.output.dense.weight, compiled.writing(units.writes))
    _set_bert_head(module.cls.predictions, compiled)
    return KnownModel("bert", program, circuit, module, compiled)


def _set_bert_head(head: Any, compiled: Compiled) -> None:
    """Read the output through a layer with an activation function and a norm.

    Of all values of the output one is on, so that mean and variance are always the same
    and the last matrix can undo both.
    """
    program = compiled.circuit.program
    rows = compiled.unembedding() / LOGIT
    # Far from zero, where the activation function is the identity.
    size = 10.0
    copy_rows(head.transform.dense.weight, size * rows)
    width = compiled.width
    mean, square = size / width, size**2 / width
    deviation = math.sqrt(square - mean**2 + head.transform.LayerNorm.eps)
    with torch.no_grad():
        head.transform.LayerNorm.weight.fill_(deviation * LOGIT / size)
        head.transform.LayerNorm.bias.fill_(mean * LOGIT / size)
        for row, _ in enumerate(program.vocabulary):
            head.decoder.weight[row, row] = 1


def _in_llama(program: Program) -> KnownModel:
    program = with_counted_positions(program)
    circuit = circuit_of(program)
    compiled = Compiled(circuit, ACT2FN["silu"], is_doubled=False, gain=GAIN)
    # Half of the pairs turn fast, and hold nothing.
    pairs = 2 * compiled.widest_head
    head_width = 2 * pairs
    config = transformers.LlamaConfig(
        vocab_size=len(program.vocabulary),
        max_position_embeddings=POSITIONS,
        hidden_size=compiled.width,
        num_hidden_layers=circuit.blocks,
        num_attention_heads=compiled.heads,
        num_key_value_heads=compiled.heads,
        head_dim=head_width,
        intermediate_size=compiled.neurons,
        rope_parameters={"rope_type": "default", "rope_theta": SLOW_BASE},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    module: Any = transformers.LlamaForCausalLM(config).eval()
    clear(module)
    body = module.model
    copy_rows(body.embed_tokens.weight, compiled.embeddings())
    epsilon = config.rms_norm_eps
    for number, block in enumerate(body.layers):
        # The slowest pairs are the last of the first half of a head.
        weights = _HeadWeights(compiled, number, head_width, pairs)
        before = block.input_layernorm
        compiled.set_gain(before, (number - 1, 1), epsilon)
        after = block.post_attention_layernorm
        compiled.set_gain(after, (number, 0), epsilon)
        copy_rows(block.self_attn.q_proj.weight, weights.query)
        copy_rows(block.self_attn.k_proj.weight, weights.key)
        copy_rows(block.self_attn.v_proj.weight, weights.value)
        copy_rows(block.self_attn.o_proj.weight, weights.output)
        units = compiled.blocks[number].neurons
        copy_rows(block.mlp.gate_proj.weight, compiled.reading(units.reads))
        # What multiplies the activation is always one.
        ones = compiled.channels.zeros()
        compiled.channels.add_constant(ones, 1.0)
        rows = compiled.reading(ones[None]).expand(len(units.reads), -1)
        copy_rows(block.mlp.up_proj.weight, rows)
        copy_rows(block.mlp.down_proj.weight, compiled.writing(units.writes))
    compiled.set_gain(body.norm, (circuit.blocks - 1, 1), epsilon)
    copy_rows(module.lm_head.weight, compiled.unembedding())
    return KnownModel("llama", program, circuit, module, compiled)


class _HeadWeights:
    """The four matrices of a block's attention, heads one after another.

    `end` is where the queries and keys of a head end among its numbers.
    """

    def __init__(
        self,
        compiled: Compiled,
        block: int,
        head_width: int | None = None,
        end: int | None = None,
    ) -> None:
        width = head_width or compiled.head_width
        shape = compiled.heads * width, compiled.width
        self.query, self.key = torch.zeros(shape), torch.zeros(shape)
        self.value, self.output = torch.zeros(shape), torch.zeros(shape[::-1])
        for number, unit in enumerate(compiled.blocks[block].heads):
            start = number * width
            last = start + (len(unit.query) if end is None else end)
            rows = slice(last - len(unit.query), last)
            # Every host divides scores by the root of the width of a head.
            self.query[rows] = math.sqrt(width) * compiled.reading(unit.query)
            self.key[rows] = compiled.reading(unit.key)
            places = slice(start, start + len(unit.value))
            self.value[places] = compiled.reading(unit.value)
            self.output[:, places] = compiled.writing(unit.output)


class PlainBlock(nn.Module):
    """Attention and an MLP that add to a stream without norms."""

    def __init__(self, width: int, heads: int, neurons: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.reads = nn.Linear(width, neurons, bias=False)
        self.writes = nn.Linear(neurons, width, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Add what the heads gather, then what the neurons compute."""
        batch, length, _ = stream.shape

        def by_head(linear: nn.Linear) -> Tensor:
            return linear(stream).view(batch, length, self.heads, -1).transpose(1, 2)

        gathered = nn.functional.scaled_dot_product_attention(
            by_head(self.query), by_head(self.key), by_head(self.value), is_causal=True
        )
        stream = stream + self.output(gathered.transpose(1, 2).flatten(2))
        added: Tensor = self.writes(torch.relu(self.reads(stream)))
        return stream + added


class PlainTransformer(nn.Module):
    """A transformer of nothing but embeddings, blocks and an unembedding."""

    def __init__(self, tokens: int, width: int, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.blocks = blocks
        self.unembedding = nn.Linear(width, tokens, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of the tokens, as models of transformers do."""
        return self.tokens

    def forward(
        self,
        input_ids: Tensor,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> CausalLMOutput:
        """Return the logits of token ids `[text, token]`, and all states if asked."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        stream: Tensor = self.tokens(input_ids) + self.positions(places)
        states = [stream]
        for block in self.blocks:
            stream = block(stream)
            states.append(stream)
        held = tuple(states) if output_hidden_states else None
        logits = self.unembedding(stream)
        return CausalLMOutput(logits=logits, hidden_states=held)


def _in_plain(program: Program) -> KnownModel:
    circuit = circuit_of(program)
    compiled = Compiled(circuit, torch.relu, is_doubled=False)
    blocks = nn.ModuleList()
    for _ in range(circuit.blocks):
        blocks.append(PlainBlock(compiled.width, compiled.heads, compiled.neurons))
    tokens = len(program.vocabulary)
    module = PlainTransformer(tokens, compiled.width, blocks).eval()
    clear(module)
    copy_rows(module.tokens.weight, compiled.embeddings())
    copy_rows(module.positions.weight, compiled.positions())
    copy_rows(module.unembedding.weight, compiled.unembedding())
    for number, block in enumerate(blocks):
        weights = _HeadWeights(compiled, number)
        part: Any = block
        copy_rows(part.query.weight, weights.query)
        copy_rows(part.key.weight, weights.key)
        copy_rows(part.value.weight, weights.value)
        copy_rows(part.output.weight, weights.output)
        units = compiled.blocks[number].neurons
        copy_rows(part.reads.weight, compiled.reading(units.reads))
        copy_rows(part.writes.weight, compiled.writing(units.writes))
    return KnownModel("plain", program, circuit, module, compiled)


HOSTS: dict[str, Callable[[Program], KnownModel]] = {
    "plain": _in_plain,
    "gpt2": _in_gpt2,
    "opt": _in_opt,
    "bert": _in_bert,
    "llama": _in_llama,
}

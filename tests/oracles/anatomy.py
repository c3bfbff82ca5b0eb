"""What `hs.anatomy` should say: the states of the blocks beside `hidden_states`.

The trial texts, which the raw last layer depends on, are those of the proof. Left out:
`head.gives_logits`, which other analyses rest on, and `earlier_entries`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.discovery.find import TRIAL_SHAPES, trial_inputs, trial_shapes
from tests.oracles import naive


def anatomy(
    model: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected differences of all layers from the model's own report."""
    naive.need_model(model)
    module = naive.in_float64(model)
    if getattr(module, "config", None) is None:
        raise naive.Uncovered("a model without hidden_states")
    shape = next(iter(trial_shapes(model.module, TRIAL_SHAPES)))
    inputs = {}
    for name, value in trial_inputs(model.module, shape).items():
        inputs[name] = value.cpu() if isinstance(value, torch.Tensor) else value
    stacks = naive.stacks_of(module)
    states, output = naive.run_module(module, {**inputs, "output_hidden_states": True})
    sites = naive.sites_of(result)
    differences = {}
    facts: dict[str, Any] = {}
    for number, stack in enumerate(stacks):
        entries = naive.entries_of(output, stack)
        blocks = states[stack]
        layers = [blocks[0].input, *(block.output for block in blocks)]
        if len(entries) != len(layers) or not layers[-1].numel():
            raise naive.Uncovered("entries that are no layers")
        where = f"facts.stacks.{number}"
        for layer, (state, entry) in enumerate(zip(layers, entries, strict=True)):
            differences[f"{stack}layer.{layer}"] = _largest(state, entry)
        raw = differences[f"{stack}layer.{len(blocks)}"]
        facts[f"{where}.blocks"] = len(blocks)
        facts[f"{where}.width"] = layers[0][0, 0].numel()
        facts[f"{where}.causal"] = naive.is_causal(model, stack)
        facts[f"{where}.proved_entries"] = len(entries)
        facts[f"{where}.largest_difference"] = 0.0
        facts[f"{where}.raw_difference"] = raw if raw > 0 else np.nan
        if _largest(layers[0], entries[0]) > 0:
            # Mamba's report begins with layer.1, XLM's blocks are no modules.
            raise naive.Uncovered("entries that are no layers")
        if raw != 0:
            last = getattr(
                output, f"{'encoder_' * (stack == 'encoder.')}last_hidden_state", None
            )
            differences[f"{stack}final"] = (
                0.0 if last is None else _largest(last, entries[-1])
            )
    facts["facts.makes_logits"] = getattr(output, "logits", None) is not None
    head = getattr(module, "get_output_embeddings", lambda: None)()
    if head is not None and result.facts.get("head"):
        tied = head.weight.data_ptr() == module.get_input_embeddings().weight.data_ptr()
        facts["facts.head.tied"] = tied
    facts["facts.padded_batches"] = _padding_changes_nothing(model)
    expected = {"difference": np.array([differences[site] for site in sites])}
    return expected | {name: np.asarray(value) for name, value in facts.items()}


def _largest(state: torch.Tensor, entry: torch.Tensor) -> float:
    if state.shape == entry.transpose(0, 1).shape:
        # XLNet has tokens before texts.
        entry = entry.transpose(0, 1)
    if state.shape != entry.shape:
        return float("nan")
    return float((state - entry).abs().max())


def _padding_changes_nothing(model: Any) -> bool:
    """Tell whether two texts of two lengths keep their states in one batch."""
    module = naive.in_float64(model)
    short, long = [7, 8, 9], [7, 9, 11, 13, 15, 17, 19]
    mask = torch.tensor([[1] * 3 + [0] * 4, [1] * 7])
    ids = torch.tensor([short + [0] * 4, long])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if getattr(module.config, "is_encoder_decoder", False):
        start = model.module.config.decoder_start_token_id
        inputs["decoder_input_ids"] = torch.tensor([[start], [start]])
    states, _ = naive.run_module(module, {**inputs, "output_hidden_states": True})
    for stack, blocks in states.items():
        for number, text in enumerate((short, long)):
            alone = naive.run(model, text)[f"{stack}layer.{len(blocks)}"]
            output = blocks[-1].output
            rows = output[number] if len(output) == 2 else output[:, number]
            batched = rows[: len(alone)].reshape(alone.shape).numpy()
            if not np.allclose(
                batched, alone, rtol=1e-5, atol=1e-5 * np.abs(alone).max()
            ):
                return False
    return True

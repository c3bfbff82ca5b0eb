"""Do the tasks with TransformerLens: a bridge around the model of Hugging Face.

`names_filter` keeps the states that are asked for, and `stop_at_layer` ends the pass,
as its documentation recommends.
"""

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas
import torch
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
)
from transformer_lens.tools.analysis.logit_lens import logit_readout
from transformers import AutoModelForCausalLM, AutoTokenizer

from labs.bench import plain
from labs.bench.peers.ways import Job, Numbers, Way


def _boot(folder: str) -> Any:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = _tokenizer(folder)
    return TransformerBridge.boot_transformers(
        folder, hf_model=module, tokenizer=tokenizer, device="cpu"
    )


@lru_cache(maxsize=1)
def _bridge(folder: str) -> Any:
    return _boot(folder)


def _tokenizer(folder: str) -> Any:
    if not Path(folder, "tokenizer.json").exists():
        return None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _is_residual(name: str) -> bool:
    return name.endswith("hook_resid_post")


def _depth(bridge: Any) -> int:
    depth: int = bridge.cfg.n_layers
    return depth


def _named(bridge: Any, cache: Any) -> Numbers:
    named = {}
    for block in range(_depth(bridge)):
        named[f"layer.{block + 1}"] = cache[f"blocks.{block}.hook_resid_post"]
    return named


def load(job: Job) -> Way:
    """Load the model and build its bridge."""

    def run() -> Numbers:
        bridge = _boot(job["folder"])
        return {"embeddings": bridge.original_model.get_input_embeddings().weight[:4]}

    return Way(run)


def capture(job: Job) -> Way:
    """Run with a cache of the residual stream, without the head."""
    bridge, ids = _bridge(job["folder"]), torch.tensor(job["ids"])

    def run() -> Numbers:
        _, cache = bridge.run_with_cache(
            ids, names_filter=_is_residual, stop_at_layer=_depth(bridge)
        )
        return _named(bridge, cache)

    return Way(run)


def early(job: Job) -> Way:
    """Stop after one layer."""
    bridge, ids, layer = _bridge(job["folder"]), torch.tensor(job["ids"]), job["layer"]
    name = f"blocks.{layer - 1}.hook_resid_post"

    def run() -> Numbers:
        _, cache = bridge.run_with_cache(ids, names_filter=name, stop_at_layer=layer)
        return {f"layer.{layer}": cache[name]}

    return Way(run)


def ragged(job: Job) -> Way:
    """Cache the last block's output of padded batches, then apply the final norm.

    The pass stops after the last block: asked for the norm's own output, it would run
    the head as well.
    """
    bridge, tokenizer = _bridge(job["folder"]), _tokenizer(job["folder"])
    name = f"blocks.{_depth(bridge) - 1}.hook_resid_post"

    def run() -> list[Any]:
        kept = []
        for batch in plain.batches(job["texts"], tokenizer, "cpu"):
            mask = batch["attention_mask"]
            _, cache = bridge.run_with_cache(
                batch["input_ids"],
                attention_mask=mask,
                names_filter=name,
                stop_at_layer=_depth(bridge),
            )
            for row, state in enumerate(bridge.ln_final(cache[name])):
                kept.append(state[mask[row].bool()])
        return kept

    return Way(run, lambda states: {"final": torch.cat(states)})


def extract(job: Job) -> Way:
    """Save the cache of padded batches with torch.save."""
    bridge, tokenizer = _bridge(job["folder"]), _tokenizer(job["folder"])
    folder = Path(job["to"], "transformer_lens")

    def run() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        batches = plain.batches(job["texts"], tokenizer, "cpu")
        for number, batch in enumerate(batches):
            _, cache = bridge.run_with_cache(
                batch["input_ids"],
                attention_mask=batch["attention_mask"],
                names_filter=_is_residual,
                stop_at_layer=_depth(bridge),
            )
            torch.save(dict(cache.items()), folder / f"{number}.pt")
        return folder

    def numbers(folder: Path) -> Numbers:
        states = torch.load(folder / "0.pt")["blocks.0.hook_resid_post"]
        return {"layer.1": states[0, : job["first_tokens"]]}

    return Way(run, numbers)


def lens(job: Job) -> Way:
    """Read the residual stream with `logit_readout`."""
    bridge, ids = _bridge(job["folder"]), torch.tensor(job["ids"])

    def run() -> Numbers:
        _, cache = bridge.run_with_cache(
            ids, names_filter=_is_residual, stop_at_layer=_depth(bridge)
        )
        stream = torch.stack(list(_named(bridge, cache).values()))
        read = logit_readout(bridge, stream, top_k=job["k"], return_type="probs")
        return {"probability": read.values}

    return Way(run)


def patch(job: Job) -> Way:
    """Patch with `generic_activation_patch`, which runs one pass for each cell."""
    bridge = _bridge(job["folder"])
    clean, corrupt = (torch.tensor([job[name]]) for name in ("clean", "corrupt"))
    rows = [(layer - 1, token) for layer, token in job["cells"]]
    cells = pandas.DataFrame(rows, columns=["layer", "pos"])

    def metric(logits: Any) -> Any:
        return logits[0, -1, job["answer"]] - logits[0, -1, job["other"]]

    def run() -> Numbers:
        _, cache = bridge.run_with_cache(clean, names_filter=_is_residual)
        differences = patching.generic_activation_patch(
            bridge,
            corrupt,
            cache,
            metric,
            patching.layer_pos_patch_setter,
            "resid_post",
            index_df=cells,
        )
        return {"difference": differences}

    return Way(run, times=job["times"])


def heads(job: Job) -> Way:
    """Patch heads with `generic_activation_patch`, which runs one pass for each."""
    bridge = _bridge(job["folder"])
    clean, corrupt = (torch.tensor([job[name]]) for name in ("clean", "corrupt"))
    rows = [(layer - 1, head) for layer, head in job["cells"]]
    cells = pandas.DataFrame(rows, columns=["layer", "head"])

    def metric(logits: Any) -> Any:
        return logits[0, -1, job["answer"]] - logits[0, -1, job["other"]]

    def is_z(name: str) -> bool:
        return name.endswith("attn.hook_z")

    def run() -> Numbers:
        _, cache = bridge.run_with_cache(clean, names_filter=is_z)
        differences = patching.generic_activation_patch(
            bridge,
            corrupt,
            cache,
            metric,
            patching.layer_head_vector_patch_setter,
            "z",
            index_df=cells,
        )
        return {"difference": differences}

    return Way(run, times=job["times"])


def edges(job: Job) -> Way:
    """Score every edge at every token with one gradient; steps are not implemented."""
    bridge = _bridge(job["folder"])
    clean, corrupt = (torch.tensor([job[name]]) for name in ("clean", "corrupt"))
    config = EdgeAttributionConfig(granularity="edge", ig_steps=job["steps"])

    def metric(logits: Any) -> Any:
        return logits[0, -1, job["answer"]] - logits[0, -1, job["other"]]

    def run() -> Any:
        with torch.enable_grad():
            return attribution_patch(bridge, clean, corrupt, metric, config)

    def numbers(result: Any) -> Numbers:
        return {
            "differences": torch.stack([metric(bridge(clean)), metric(bridge(corrupt))])
        }

    return Way(run, numbers)

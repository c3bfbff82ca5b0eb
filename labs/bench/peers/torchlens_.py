"""Do the tasks with TorchLens: `record`, its light recording of chosen outputs.

`trace` logs every operation of the pass and costs about three times as much. `halt`
ends the pass at the first operation after the states that are wanted.
"""

from functools import lru_cache, reduce
from operator import or_
from typing import Any

import torch
import torchlens
from transformers import AutoModel, AutoTokenizer

from labs.bench import plain
from labs.bench.peers.ways import Job, Numbers, Way


@lru_cache(maxsize=1)
def _module(folder: str) -> Any:
    return AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


def _outputs(recording: Any) -> list[Any]:
    """Return the recorded states in the order of the pass."""
    return [record.ram_payload for record in recording.records]


def capture(job: Job) -> Way:
    """Record the output of every block."""
    module, ids = _module(job["folder"]), torch.tensor(job["ids"])
    places = [
        torchlens.module(f"layers.{number}") for number in range(len(module.layers))
    ]
    wanted = reduce(or_, places)

    def run() -> Numbers:
        recording = torchlens.record(module, ids, {"use_cache": False}, save=wanted)
        states = enumerate(_outputs(recording), start=1)
        return {f"layer.{number}": state for number, state in states}

    return Way(run)


def early(job: Job) -> Way:
    """Record the output of one block and halt in the next."""
    module, ids, layer = _module(job["folder"]), torch.tensor(job["ids"]), job["layer"]
    wanted = torchlens.module(f"layers.{layer - 1}")
    beyond = torchlens.in_module(f"layers.{layer}")

    def run() -> Numbers:
        recording = torchlens.record(
            module, ids, {"use_cache": False}, save=wanted, halt=beyond
        )
        return {f"layer.{layer}": _outputs(recording)[0]}

    return Way(run)


def ragged(job: Job) -> Way:
    """Record the output of the final norm of padded batches, in their order."""
    module = _module(job["folder"])
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    wanted = torchlens.module("norm")

    def run() -> list[Any]:
        kept = []
        for batch in plain.batches(job["texts"], tokenizer, "cpu"):
            options = {**batch, "use_cache": False}
            ids = options.pop("input_ids")
            recording = torchlens.record(module, ids, options, save=wanted)
            mask = batch["attention_mask"].bool()
            for row, state in enumerate(_outputs(recording)[0]):
                kept.append(state[mask[row]])
        return kept

    return Way(run, lambda states: {"final": torch.cat(states)})

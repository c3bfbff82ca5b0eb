"""Do the tasks with nnterp: nnsight with one name for the parts of every model."""

from functools import lru_cache
from typing import Any

import torch
from nnterp import StandardizedTransformer

from labs.bench.peers.ways import Job, Numbers, Way


def _wrap(folder: str) -> Any:
    # Without `dispatch` the weights would be loaded by the first trace.
    options = {"dtype": torch.float32, "device_map": "cpu", "dispatch": True}
    return StandardizedTransformer(folder, **options)


@lru_cache(maxsize=1)
def _model(folder: str) -> Any:
    return _wrap(folder)


def load(job: Job) -> Way:
    """Load the model; its parts are renamed and checked."""

    def run() -> Numbers:
        model = _wrap(job["folder"])
        return {"embeddings": model._model.get_input_embeddings().weight[:4]}

    return Way(run)


def capture(job: Job) -> Way:
    """Save the output of every layer, and stop before the head."""
    model, ids = _model(job["folder"]), torch.tensor(job["ids"])
    depth = model.num_layers

    def run() -> Numbers:
        kept: list[Any] = []
        with model.trace(ids, use_cache=False) as tracer:
            for layer in range(depth):
                kept.append(model.layers_output[layer].save())
            tracer.stop()
        return {f"layer.{number + 1}": state for number, state in enumerate(kept)}

    return Way(run)


def early(job: Job) -> Way:
    """Save the output of one layer and stop."""
    model, ids, number = _model(job["folder"]), torch.tensor(job["ids"]), job["layer"]
    place = number - 1

    def run() -> Numbers:
        with model.trace(ids, use_cache=False) as tracer:
            state = model.layers_output[place].save()
            tracer.stop()
        return {f"layer.{number}": state}

    return Way(run)


def lens(job: Job) -> Way:
    """Project the output of every layer on the vocabulary."""
    model, ids, k = _model(job["folder"]), torch.tensor(job["ids"]), job["k"]
    depth = model.num_layers

    def run() -> Numbers:
        kept: list[Any] = []
        with model.trace(ids, use_cache=False) as tracer:
            for layer in range(depth):
                logits = model.project_on_vocab(model.layers_output[layer])
                kept.append(logits.softmax(-1).topk(k).values.save())
            tracer.stop()
        return {"probability": torch.stack(kept)}

    return Way(run)

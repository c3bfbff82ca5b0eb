"""Do the tasks with nnsight: a trace that saves the outputs of modules.

`tracer.stop()` ends the pass after the last state that is wanted, as its documentation
recommends. nnsight reads the source of a `with` body and runs it later.
"""

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from nnsight import LanguageModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from labs.bench import plain
from labs.bench.peers.ways import Job, Numbers, Way


def _wrap(folder: str) -> Any:
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return LanguageModel(module, tokenizer=_tokenizer(folder))


@lru_cache(maxsize=1)
def _model(folder: str) -> Any:
    return _wrap(folder)


def _tokenizer(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _named(states: list[Any]) -> Numbers:
    return {f"layer.{number + 1}": state for number, state in enumerate(states)}


def load(job: Job) -> Way:
    """Load the model and wrap it."""

    def run() -> Numbers:
        model = _wrap(job["folder"])
        return {"embeddings": model.model.embed_tokens.weight[:4]}

    return Way(run)


def capture(job: Job) -> Way:
    """Save the output of every block, and stop before the head."""
    model, ids = _model(job["folder"]), torch.tensor(job["ids"])

    def run() -> Numbers:
        kept: list[Any] = []
        with model.trace(ids, use_cache=False) as tracer:
            for layer in model.model.layers:
                kept.append(layer.output.save())
            tracer.stop()
        return _named(kept)

    return Way(run)


def early(job: Job) -> Way:
    """Save the output of one block and stop."""
    model, ids, number = _model(job["folder"]), torch.tensor(job["ids"]), job["layer"]
    place = number - 1

    def run() -> Numbers:
        with model.trace(ids, use_cache=False) as tracer:
            state = model.model.layers[place].output.save()
            tracer.stop()
        return {f"layer.{number}": state}

    return Way(run)


def ragged(job: Job) -> Way:
    """Trace padded batches in the order of the texts, without the head."""
    # nnsight pads on the left by default, where plain code pads on the right.
    model, tokenizer = _model(job["folder"]), _tokenizer(job["folder"])

    def run() -> list[Any]:
        kept: list[Any] = []
        for batch in plain.batches(job["texts"], tokenizer, "cpu"):
            ids, mask = batch["input_ids"], batch["attention_mask"]
            with model.trace(ids, attention_mask=mask, use_cache=False) as tracer:
                states = model.model.norm.output.save()
                tracer.stop()
            for row, state in enumerate(states):
                kept.append(state[mask[row].bool()])
        return kept

    return Way(run, lambda states: {"final": torch.cat(states)})


def extract(job: Job) -> Way:
    """Save the states of padded batches with torch.save."""
    model, tokenizer = _model(job["folder"]), _tokenizer(job["folder"])
    folder = Path(job["to"], "nnsight")

    def run() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        batches = plain.batches(job["texts"], tokenizer, "cpu")
        for number, batch in enumerate(batches):
            ids, mask = batch["input_ids"], batch["attention_mask"]
            states: list[Any] = []
            with model.trace(ids, attention_mask=mask, use_cache=False) as tracer:
                for layer in model.model.layers:
                    states.append(layer.output.save())
                tracer.stop()
            torch.save(states, folder / f"{number}.pt")
        return folder

    def numbers(folder: Path) -> Numbers:
        states = torch.load(folder / "0.pt")[0]
        return {"layer.1": states[0, : job["first_tokens"]]}

    return Way(run, numbers)


def lens(job: Job) -> Way:
    """Send the output of every block through the norm and the head of the model."""
    model, ids, k = _model(job["folder"]), torch.tensor(job["ids"]), job["k"]

    def run() -> Numbers:
        kept: list[Any] = []
        with model.trace(ids, use_cache=False) as tracer:
            for layer in model.model.layers:
                logits = model.lm_head(model.model.norm(layer.output))
                kept.append(logits.softmax(-1).topk(k).values.save())
            tracer.stop()
        return {"probability": torch.stack(kept)}

    return Way(run)


def patch(job: Job) -> Way:
    """Trace the clean text once, then one patched pass for each cell."""
    model = _model(job["folder"])
    clean, corrupt = (torch.tensor([job[name]]) for name in ("clean", "corrupt"))
    cells, answer, other = job["cells"], job["answer"], job["other"]

    def run() -> Numbers:
        states: list[Any] = []
        with model.trace(clean, use_cache=False) as tracer:
            for layer in model.model.layers:
                states.append(layer.output.save())
            tracer.stop()
        differences = []
        for number, token in cells:
            place = number - 1
            row = states[place][:, token]
            with model.trace(corrupt, use_cache=False):
                model.model.layers[place].output[:, token] = row
                logits = model.lm_head.output.save()
            differences.append(float(logits[0, -1, answer] - logits[0, -1, other]))
        return {"difference": differences}

    return Way(run, times=job["times"])

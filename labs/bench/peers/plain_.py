"""Do the tasks with torch and transformers alone."""

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from labs.bench import plain
from labs.bench.peers.ways import Job, Numbers, Way
from labs.truth.eap_ig import eap_ig


@lru_cache(maxsize=1)
def _module(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _tokenizer(folder: str) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


def _named(states: tuple[Any, ...]) -> Numbers:
    """Name Hugging Face's states: the last has been through the final norm."""
    names = [f"layer.{number}" for number in range(len(states) - 1)]
    return dict(zip([*names, "final"], states, strict=True))


def load(job: Job) -> Way:
    """Load the model."""

    def run() -> Numbers:
        module = AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype=torch.float32
        )
        return {"embeddings": module.get_input_embeddings().weight[:4]}

    return Way(run)


def capture(job: Job) -> Way:
    """Ask the model for its hidden states; the head does not run."""
    module, ids = _module(job["folder"]), torch.tensor(job["ids"])
    return Way(lambda: plain.hidden_states(module, ids), _named)


def early(job: Job) -> Way:
    """Ask for all hidden states and keep one: the pass cannot be stopped."""
    module, ids, layer = _module(job["folder"]), torch.tensor(job["ids"]), job["layer"]
    return Way(lambda: {f"layer.{layer}": plain.hidden_states(module, ids)[layer]})


def ragged(job: Job) -> Way:
    """Run padded batches in the order of the texts."""
    module, tokenizer = _module(job["folder"]), _tokenizer(job["folder"])
    return Way(
        lambda: plain.last_states(module, tokenizer, job["texts"]),
        lambda states: {"final": torch.cat(states)},
    )


def extract(job: Job) -> Way:
    """Save the states of padded batches with torch.save."""
    module, tokenizer = _module(job["folder"]), _tokenizer(job["folder"])
    folder = Path(job["to"], "plain")

    def run() -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        plain.extract(module, tokenizer, job["texts"], folder)
        return folder

    return Way(run, lambda folder: _first_text(folder, job["first_tokens"]))


def _first_text(folder: Path, tokens: int) -> Numbers:
    states = torch.load(folder / "0.pt")
    return {"layer.1": states[1][0, :tokens], "final": states[-1][0, :tokens]}


def lens(job: Job) -> Way:
    """Loop over the layers: norm, head, softmax, top-k."""
    module, ids = _module(job["folder"]), torch.tensor(job["ids"])

    def run() -> Numbers:
        return {"probability": plain.lens(module, ids, job["k"])[0]}

    return Way(run)


def patch(job: Job) -> Way:
    """Run one pass with a hook for each cell."""
    module = _module(job["folder"])
    clean, corrupt = (torch.tensor([job[name]]) for name in ("clean", "corrupt"))

    def numbers(logits: list[Any]) -> Numbers:
        last = torch.stack(logits)
        return {"difference": last[:, job["answer"]] - last[:, job["other"]]}

    return Way(
        lambda: plain.patch(module, clean, corrupt, job["cells"]), numbers, job["times"]
    )


def heads(job: Job) -> Way:
    """Run one pass with a hook for each head."""
    module = _module(job["folder"])
    clean, corrupt = (torch.tensor([job[name]]) for name in ("clean", "corrupt"))

    def numbers(logits: list[Any]) -> Numbers:
        last = torch.stack(logits)
        return {"difference": last[:, job["answer"]] - last[:, job["other"]]}

    return Way(
        lambda: plain.patch_heads(module, clean, corrupt, job["cells"]),
        numbers,
        job["times"],
    )


def edges(job: Job) -> Way:
    """Score every edge of a GPT-2 with gradients, as published for EAP and EAP-IG."""
    module = _module(job["folder"])
    answers = job["answer"], job["other"]

    def numbers(scores: Any) -> Numbers:
        differences = []
        for name in ("clean", "corrupt"):
            logits = module(torch.tensor([job[name]])).logits[0, -1]
            differences.append(logits[answers[0]] - logits[answers[1]])
        return {"differences": torch.stack(differences)}

    return Way(
        lambda: eap_ig(module, job["clean"], job["corrupt"], *answers, job["steps"]),
        numbers,
    )


def visibility(job: Job) -> Way:
    """Run one backward pass for each target."""
    module, ids = _module(job["folder"]), torch.tensor(job["ids"])
    return Way(lambda: {"influence": plain.visibility(module, ids)})


def embed(job: Job) -> Way:
    """Average the states of padded batches in the order of the texts."""
    module = AutoModel.from_pretrained(job["folder"], dtype=torch.float32).eval()
    tokenizer = _tokenizer(job["folder"])
    return Way(lambda: {"vectors": plain.embed(module, tokenizer, job["texts"])})


def drift(job: Job) -> Way:
    """Compare the hidden states of two models, layer by layer."""
    module, candidate = (_load(job[name]) for name in ("folder", "candidate"))
    ids = torch.tensor(job["ids"])
    return Way(lambda: {"largest": plain.drift(module, candidate, ids)})


def _load(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def probe(job: Job) -> Way:
    """Fit scikit-learn's logistic regression, one fold and layer after another."""
    from labs.bench import probe as probes

    values, classes, _ = probes.states(**job["shape"])
    folds = probes.folds(len(classes))

    def run() -> Numbers:
        score = probes.theirs(values, classes, folds, "logistic", "float32")
        return {"accuracy": score}

    return Way(run)

"""Do the tasks with hiddenscope."""

import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import hiddenscope as hs
from labs.bench.peers.ways import Job, Numbers, Way


@lru_cache(maxsize=1)
def _model(folder: str) -> hs.Model:
    return hs.load(folder, dtype="float32", device="cpu")


def _depth(model: hs.Model) -> int:
    return model.anatomy.stacks[0].depth


def _named(states: Any) -> Numbers:
    return {str(site): states[site] for site in states.sites}


def load(job: Job) -> Way:
    """Load the model with its proof, which is remembered."""

    def run() -> Numbers:
        model = hs.load(job["folder"], dtype="float32", device="cpu")
        return {"embeddings": model.module.get_input_embeddings().weight[:4]}

    return Way(run)


def capture(job: Job) -> Way:
    """Capture every layer and `final`."""
    model = _model(job["folder"])
    return Way(lambda: model.capture(job["ids"]), _named)


def early(job: Job) -> Way:
    """Capture one layer; the pass stops there."""
    model, site = _model(job["folder"]), f"layer.{job['layer']}"
    return Way(lambda: model.capture(job["ids"], site), _named)


def ragged(job: Job) -> Way:
    """Capture `final` of texts of many lengths."""
    model = _model(job["folder"])
    return Way(lambda: model.capture(job["texts"], "final"), _named)


def extract(job: Job) -> Way:
    """Extract every layer and `final` to a store."""
    model, folder = _model(job["folder"]), Path(job["to"], "hiddenscope")

    def run() -> Any:
        shutil.rmtree(folder, ignore_errors=True)
        return hs.extract(model, job["texts"], folder)

    def numbers(store: Any) -> Numbers:
        rows = np.arange(job["first_tokens"])
        return {site: store.rows(site, rows) for site in ("layer.1", "final")}

    return Way(run, numbers)


def lens(job: Job) -> Way:
    """Read every layer through the unembedding; entropy and KL come with it."""
    model = _model(job["folder"])
    sites = f"layer.1-{_depth(model)}"

    def run() -> Any:
        return hs.lens(model, job["ids"], k=job["k"], sites=sites)

    return Way(run, lambda result: {"probability": result.data["probability"]})


def patch(job: Job) -> Way:
    """Sweep every layer and token."""
    model = _model(job["folder"])
    contrast = hs.Contrast(job["clean"], job["corrupt"], job["answer"], job["other"])

    def numbers(result: hs.Result) -> Numbers:
        runs = result.facts["logit_difference"]
        span = runs["clean"] - runs["corrupt"]
        differences = []
        for layer, token in job["cells"]:
            share = float(result.data["effect"].sel(site=f"layer.{layer}")[token])
            differences.append(runs["corrupt"] + share * span)
        return {"difference": differences}

    return Way(lambda: hs.patch(model, contrast, layers=0), numbers)


def heads(job: Job) -> Way:
    """Sweep every head of every layer, all tokens at once."""
    model = _model(job["folder"])
    contrast = hs.Contrast(job["clean"], job["corrupt"], job["answer"], job["other"])

    def numbers(result: hs.Result) -> Numbers:
        runs = result.facts["logit_difference"]
        span = runs["clean"] - runs["corrupt"]
        differences = []
        for layer, head in job["cells"]:
            site = f"layer.{layer}.attn.head.{head}"
            share = float(result.data["effect"].sel(site=site))
            differences.append(runs["corrupt"] + share * span)
        return {"difference": differences}

    return Way(lambda: hs.patch(model, contrast, sites="*.attn.head.*"), numbers)


def edges(job: Job) -> Way:
    """Estimate every edge, and compute none exactly."""
    model = _model(job["folder"])
    contrast = hs.Contrast(job["clean"], job["corrupt"], job["answer"], job["other"])
    method: Any = "gradient" if job["steps"] == 1 else "integrated"

    def numbers(result: hs.Result) -> Numbers:
        facts = result.facts
        return {"differences": np.array([facts["clean"], facts["corrupt"]])}

    return Way(
        lambda: hs.edges(model, contrast, method=method, exact=0, sample=0), numbers
    )


def visibility(job: Job) -> Way:
    """Map what every state sees of every state below it."""
    model = _model(job["folder"])
    sites = f"layer.0-{_depth(model) - 1},final"

    def run() -> Any:
        return hs.visibility(model, job["ids"], sites=sites)

    return Way(run, lambda result: {"influence": result.data["l1"]})


def embed(job: Job) -> Way:
    """Embed texts of many lengths."""
    model = _model(job["folder"])

    def run() -> Numbers:
        return {"vectors": hs.embed(model, job["texts"], pool="mean")}

    return Way(run)


def drift(job: Job) -> Way:
    """Compare two models: where they part, from what on, and beyond which rounding."""
    model = _model(job["folder"])
    candidate = hs.load(job["candidate"], dtype="float32", device="cpu").module

    def run() -> Any:
        return hs.drift(model, candidate, job["ids"])

    def numbers(result: hs.Result) -> Numbers:
        sites = [f"layer.{layer}" for layer in range(_depth(model))]
        errors = result.data["max_abs"].sel(site=[*sites, "final"])
        return {"largest": errors.max("token")}

    return Way(run, numbers)


def probe(job: Job) -> Way:
    """Fit all folds of a layer at once."""
    from labs.bench import probe as probes

    values, classes, _ = probes.states(**job["shape"])
    folds = probes.folds(len(classes))

    def run() -> Numbers:
        return {"accuracy": probes.ours(values, classes, folds, "logistic")}

    return Way(run)

"""Tell edges beside a bare pass and its gradient, and exact ones beside a loop."""

from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.causes.wiring import Wiring
from labs.bench import measure, plain
from labs.bench.measure import Row
from labs.bench.plain import Edge

TOKENS, PATHS = 12, 200
ANSWER, OTHER = 7042, 9145
MOST_OF_A_PASS, LEAST_OF_A_LOOP = 15.0, 10.0

WHAT = f"smollm2, float32, {TOKENS} tokens, prompts that differ from the first token on"


def rows(repeats: int) -> list[Row]:
    """Compare all edges with one gradient, and exact ones with a pass for each."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    generator = torch.Generator().manual_seed(0)
    clean, corrupt = torch.randint(100, 40_000, (2, 1, TOKENS), generator=generator)
    contrast = hs.Contrast(clean[0].tolist(), corrupt[0].tolist(), ANSWER, OTHER)
    edges, names = draw_edges(model, PATHS)
    few: dict[str, Any] = {"exact": 0, "sample": 0}

    def loop() -> list[torch.Tensor]:
        with torch.no_grad():
            return plain.patch_edges(model.module, clean, corrupt, edges)

    def bare() -> None:
        with torch.enable_grad():
            output = model.module(corrupt, use_cache=False, logits_to_keep=1)
            logits = output.logits[0, -1]
            (logits[ANSWER] - logits[OTHER]).backward()
        model.module.zero_grad(set_to_none=True)

    ways = {
        "pass": bare,
        "gradient": lambda: gradient(model.module, corrupt),
        "edges": lambda: hs.edges(model, contrast),
        "estimates": lambda: hs.edges(model, contrast, **few),
        "paths": lambda: hs.edges(model, contrast, method="exact", paths=names),
        "loop": loop,
    }
    costs = measure.interleaved(ways, repeats)
    of_pass = measure.ratios(costs, "pass")
    default = of_pass["edges"]
    estimates = of_pass["estimates"]
    strict = measure.ratios(costs, "gradient")["edges"]
    paths = measure.ratios(costs, "paths")["loop"]
    bare_pass = "a bare forward and backward pass"
    return [
        Row(
            "edges",
            f"{WHAT}: hs.edges, of which 210 are exact too / {bare_pass}",
            default.cpu,
            default.wall,
            MOST_OF_A_PASS,
        ),
        Row(
            "edges",
            f"the same, no edge exact / {bare_pass}",
            estimates.cpu,
            estimates.wall,
        ),
        Row(
            "edges",
            f"the first / {bare_pass} without the gradients of weights",
            strict.cpu,
            strict.wall,
        ),
        Row(
            "edges",
            f"{PATHS} edges drawn at random: a loop of one pass for each / hs.edges with"
            " these paths",
            paths.cpu,
            paths.wall,
            LEAST_OF_A_LOOP,
            at_least=True,
        ),
    ]


def gradient(module: Any, ids: torch.Tensor) -> torch.Tensor:
    """Differentiate the logit difference by the embeddings: one pass each way."""
    with torch.enable_grad():
        embedded = module.get_input_embeddings()(ids).detach().requires_grad_()
        output = module(inputs_embeds=embedded, use_cache=False, logits_to_keep=1)
        logits = output.logits[0, -1]
        difference = logits[ANSWER] - logits[OTHER]
        (slope,) = torch.autograd.grad(difference, [embedded])
    return slope


def draw_edges(model: hs.Model, count: int) -> tuple[list[Edge], list[str]]:
    """Draw edges of a model, and return them with the names that hs.edges has for them."""
    wiring = Wiring.of(model)
    edges, names = [], []
    for row, column in draw_places(wiring, count):
        writer, reader = wiring.writers[row], wiring.readers[column]
        kind, head = "embeddings", 0
        if writer.part == "mlp":
            kind = "mlp"
        elif writer.part:
            kind, head = "head", int(str(writer).rpartition(".")[2])
        layer = writer.layer or 0
        edge = Edge(kind, layer, head, reader.kind, reader.layer, reader.head)
        edges.append(edge)
        names.append(f"{writer} > {reader}")
    return edges, names


def draw_places(wiring: Wiring, count: int) -> list[tuple[int, int]]:
    """Draw edges, as numbers of their writers and readers."""
    places = np.argwhere(wiring.possible)
    drawn = np.random.default_rng(0).choice(places, count, replace=False)
    return [(row, column) for row, column in drawn.tolist()]

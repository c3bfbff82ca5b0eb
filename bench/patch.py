"""A patch sweep of every layer and token, against a loop of one pass for each cell and
against TransformerLens.
"""

from typing import Any

import torch

import hiddenscope as hs
from bench import measure, peers
from bench.measure import Row

LAYERS, TOKENS = 30, 12
BAR = 8.0
TOLERANCE = 1e-4
ANSWERS = {"answer": 7042, "other": 9145}
WHAT = (
    f"smollm2, float32, {LAYERS} layers x {TOKENS} tokens, texts that differ from the"
    " first token on"
)


def rows(repeats: int, *, ask_peers: bool = False) -> list[Row]:
    """What the sweep costs beside a loop, and how much longer TransformerLens takes,
    for the same numbers.

    The loop and TransformerLens make one pass for each cell, so one cell of each layer
    is timed and counted for all of its row; the peer's ratio to the loop is taken in
    its own environment, on the same weights and texts.
    """
    model = hs.load("smollm2", dtype="float32", device="cpu")
    size, generator = model.module.config.vocab_size, torch.Generator().manual_seed(0)
    clean, corrupt = torch.randint(100, size, (2, TOKENS), generator=generator).tolist()
    contrast: dict[str, Any] = {"clean": clean, "corrupt": corrupt, **ANSWERS}
    cells = [(layer, 5 * layer % TOKENS) for layer in range(1, LAYERS + 1)]
    runs = {
        "loop": _loop(model, clean, corrupt, cells),
        "patch": lambda: _patch(model, contrast),
    }
    ratio = measure.ratios(measure.interleaved(runs, repeats), "loop")["patch"]
    cpu, wall = ratio.cpu / TOKENS, ratio.wall / TOKENS
    against_loop = Row(
        "patch", f"{WHAT}: hs.patch / a loop of one pass for each cell", cpu, wall
    )
    what = f"{WHAT}: {peers.PINNED['TransformerLens']}'s generic patching / hs.patch"
    if not ask_peers:
        return [
            against_loop,
            Row(
                "patch", what, bar=BAR, at_least=True, skipped="asked for with PEERS=1"
            ),
        ]
    theirs = peers.ask("patch", repeats, {**contrast, "cells": cells})
    reason = (
        theirs
        if isinstance(theirs, str)
        else _differs(_patch(model, contrast), theirs, cells)
    )
    if reason:
        return [
            against_loop,
            Row("patch", what, bar=BAR, at_least=True, skipped=reason),
        ]
    return [
        against_loop,
        Row(
            "patch",
            what,
            theirs["ratio"][0] / cpu,
            theirs["ratio"][1] / wall,
            BAR,
            at_least=True,
        ),
    ]


def _patch(model: hs.Model, contrast: dict[str, Any]) -> hs.Result:
    return hs.patch(model, hs.Contrast(**contrast), layers=0)


def _loop(
    model: hs.Model, clean: list[int], corrupt: list[int], cells: list[tuple[int, int]]
) -> Any:
    """One whole pass for each cell, with a hook that puts one row in."""
    states = hs.record(model, [clean]).states
    ids, blocks = torch.tensor([corrupt]), model.module.model.layers  # type: ignore[union-attr]

    @torch.no_grad()
    def way() -> list[Any]:
        kept = []
        for layer, token in cells:
            row = states[f"layer.{layer}"][token]

            def put(
                part: Any, args: Any, output: Any, row: Any = row, token: int = token
            ) -> Any:
                output = output.clone()
                output[0, token] = row
                return output

            handle = blocks[layer - 1].register_forward_hook(put)  # type: ignore[index, union-attr]
            kept.append(model.module(input_ids=ids, use_cache=False).logits[0, -1])
            handle.remove()
        return kept

    return way


def _differs(result: hs.Result, theirs: Any, cells: list[tuple[int, int]]) -> str:
    """Why the peers' numbers are not ours, cell by cell, as shares of the difference
    between the runs; or nothing.
    """
    runs = result.facts["logit_difference"]
    effect = result.data["effect"]
    for name in peers.PINNED:
        chosen = cells if name == "TransformerLens" else cells[:: len(cells) // 3]
        for (layer, token), difference in zip(chosen, theirs[name], strict=True):
            share = (difference - runs["corrupt"]) / (runs["clean"] - runs["corrupt"])
            if abs(share - float(effect.sel(site=f"layer.{layer}")[token])) > TOLERANCE:
                return (
                    f"{name} has {share:.6f} at layer {layer}, token {token}, and we"
                    " have not"
                )
    return ""

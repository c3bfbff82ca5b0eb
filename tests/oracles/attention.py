"""Attention weights as transformers reports them, from a copy with eager attention."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.analyses.attention.relations import draw_texts
from tests.oracles.plain import NoTable, Plain, texts_of, weight_of


def attention(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return every number but the p-values."""
    data = result.data
    weights = _Weights(model, data)
    (row,) = texts_of(model, asked["text"])
    pattern = weights.pattern(row)
    positions = data["query_position"].values
    own = pattern[:, :, positions]
    norms = weights.write_norms(row)
    numbers = {"pattern": own}
    if norms is not None:
        numbers["write_norm"] = norms
        numbers["weighted"] = own * norms[:, :, None]
    if "previous" in data:
        later = positions[positions > 0]
        keys = {"previous": later - 1, "first": 0 * later, "same": later}
        for name, places in keys.items():
            numbers[name] = np.full(pattern.shape[:2], np.nan)
            if len(later):
                numbers[name] = pattern[:, :, later, places].mean(-1)
    if "score" in data:
        numbers |= _scores(model, asked, weights, data)
    return numbers


class _Weights:
    def __init__(self, model: hs.Model, data: Any) -> None:
        self.plain = Plain(model.module, eager=True)
        self.sites = [str(site) for site in data["site"].values]
        self.heads = data["head"].values.tolist()
        self.cross = self.sites[0].endswith(".cross")
        stack = ""
        if len(self.plain.shapes) == 2:
            stack = self.sites[0].split(".")[0] + "_"
        self.report = "cross_attentions" if self.cross else f"{stack}attentions"

    def pattern(self, row: Mapping[str, Any]) -> np.ndarray:
        """Return the weights [layer, head, query, key] of one text."""
        reported = self.plain.attentions(row, self.report)
        layers = [int(site.split("layer.")[1].split(".")[0]) for site in self.sites]
        return np.stack([reported[layer - 1][self.heads].numpy() for layer in layers])

    def write_norms(self, row: Mapping[str, Any]) -> np.ndarray | None:
        """Return the norm of what each token writes through each head."""
        if self.cross:
            return None
        found = []
        for site in self.sites:
            shape, _ = self.plain.stack(site)
            made = self.plain.run(row, [f"{site}.v"])[1][f"{site}.v"][0]
            queries, keys = self.plain.heads(shape)
            number = int(site.split("layer.")[1].split(".")[0])
            block = self.plain.blocks(shape)[number - 1]
            weight = weight_of(block.get_submodule(shape.out))
            size = weight.shape[1] // queries
            factor: Any = getattr(block, shape.factor) if shape.factor else 1.0
            if shape.attn not in (shape.out, ""):
                # A norm after attention has a gain; its scale is left out.
                norm: Any = block.get_submodule(shape.attn)
                factor = norm.weight + ("Gemma" in type(norm).__name__)
            for head in self.heads:
                group = head * keys // queries
                value = made[:, self.plain.columns(shape, "v", group)]
                columns = weight[:, head * size : (head + 1) * size]
                found.append((value @ columns.T * factor).norm(dim=-1))
        shape_of = len(self.sites), len(self.heads), -1
        return torch.stack(found).reshape(shape_of).numpy()


def _scores(
    model: hs.Model, asked: Mapping[str, Any], weights: _Weights, data: Any
) -> dict[str, np.ndarray]:
    """Return the mean weight on related tokens of random texts, and that by chance.

    The texts are those that were drawn.
    """
    relations = data["relation"].values.tolist()
    stack = None
    if len(weights.plain.shapes) == 2:
        stack = weights.sites[0].split(".")[0]
    drawn = draw_texts(
        model,
        stack,
        asked.get("draws", 16),
        asked.get("seed", 0),
        causal="induction" in relations,
    )
    if drawn is None:
        raise NoTable("no texts were drawn")
    patterns = []
    for number, ids in enumerate(drawn.inputs.ids):
        row = {"input_ids": [list(ids)]}
        if drawn.inputs.targets is not None:
            row["decoder_input_ids"] = [list(drawn.inputs.targets.ids[number])]
        patterns.append(weights.pattern(row))
    end = drawn.start + 2 * drawn.run
    scores: list[Any] = []
    nulls: list[Any] = []
    for relation in relations:
        begin = max(1, drawn.start)
        if relation == "induction":
            begin = drawn.start + drawn.run
        places = np.arange(begin, end)
        keys = {"previous": places - 1, "first": 0 * places, "same": places}
        keys["induction"] = places - drawn.run + 1
        related = keys[relation]
        of_texts = []
        chances = []
        for pattern in patterns:
            # A sliding window hides from one layer what another sees.
            layers = [_on_related(layer, places, related) for layer in pattern]
            of_texts.append([on for on, _ in layers])
            chances.append([chance for _, chance in layers])
        first, second = of_texts[: drawn.draws], of_texts[drawn.draws :]
        if relation == "induction":
            scores.append(np.mean(second, 0))
            nulls.append(np.mean(first, 0))
        else:
            scores.append(np.mean(first, 0))
            nulls.append(np.mean(chances[: drawn.draws], 0))
    return {"score": np.stack(scores), "null": np.stack(nulls)}


def _on_related(
    weights: np.ndarray, places: np.ndarray, related: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean weight of each head on related tokens, and that by chance."""
    visible = (weights > 0).any(0)
    seen = visible[places, related]
    heads = len(weights)
    if not seen.any():
        return np.full(heads, np.nan), np.full(heads, np.nan)
    on = weights[:, places[seen], related[seen]].mean(-1)
    even = (1 / visible.sum(-1))[places[seen]]
    return on, np.full(heads, even.mean())

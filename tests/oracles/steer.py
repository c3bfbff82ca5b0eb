"""Steering: one pass for each text, site and strength."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from tests.oracles.plain import NoTable, Plain, texts_of

# Every sixth token of a masked language model's texts is masked.
MASKED = 6


def steer(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return every number but the ends of intervals."""
    direction = asked["direction"]
    data = result.data
    plain = Plain(model.module)
    prompts = texts_of(model, asked["prompts"])
    quality = _quality_reads(model, asked.get("quality"))
    vectors = {}
    steered = data["site"].values.tolist()
    layers = [f"layer.{layer}" for layer in range(plain.depth + 1)]
    if direction.upwards and not set(steered) <= set(layers):
        raise NoTable("no oracle of parts that are changed upwards")
    for site in layers if direction.upwards else steered:
        state = plain.run(prompts[0], [site])[1][site]
        vectors[site] = direction.vector_at(hs.Site.parse(site), state.shape[-1])
        if direction.spare_first:
            firsts = [row for row, _, _ in quality] + prompts
            states = [plain.run(row, [site])[1][site][0, 0] for row in firsts]
            mean = torch.stack(states).mean(0)
            along = (vectors[site].double() @ mean) / (mean @ mean)
            vectors[site] = vectors[site] - along * mean
    answers = torch.as_tensor(data["id"].values)
    places = [_answering(model, row) for row in prompts]

    def measure(change: Any) -> tuple[np.ndarray, float]:
        logs = []
        for row, place in zip(prompts, places, strict=True):
            log = plain.run(row, (), change)[0][0, place].log_softmax(-1)
            logs.append(log[answers])
        losses = []
        for row, positions, tokens in quality:
            log = plain.run(row, (), change)[0][0].log_softmax(-1)
            losses += (-log[positions, tokens]).tolist()
        return torch.stack(logs).numpy(), float(np.exp(np.mean(losses)))

    before, usual = measure({})
    shape = data["perplexity"].shape
    after = np.zeros((*shape, *before.shape))
    perplexity = np.zeros(shape)
    sizes = []
    for number, site in enumerate(steered):
        vector = vectors[site]
        changed = [site]
        if direction.upwards:
            changed = layers[layers.index(site) :]
        states = [plain.run(row, [site])[1][site][0] for row in prompts]
        norms = torch.cat(states).norm(dim=-1).numpy()
        sizes.append(float(vector.double().norm()) / np.median(norms))
        for column, strength in enumerate(data["strength"].values.tolist()):
            changes = {}
            for at in changed:
                along = vectors[at].double()
                changes[at] = _change(asked.get("strengths"), along, strength)
            after[number, column], perplexity[number, column] = measure(changes)
    return {
        "probability": np.exp(after),
        "log_odds": after - np.log(-np.expm1(after)),
        "probability_before": np.exp(before),
        "log_odds_before": before - np.log(-np.expm1(before)),
        "perplexity": perplexity,
        "perplexity_before": np.array(usual),
        "perplexity_change": perplexity / usual - 1,
        "size": np.array(sizes),
    }


def _change(
    strengths: Any, vector: Tensor, strength: float
) -> Callable[[Tensor], Tensor]:
    if isinstance(strengths, str):
        size = vector @ vector
        return lambda state: state - (state @ vector / size)[..., None] * vector
    return lambda state: state + strength * vector


def _answering(model: hs.Model, row: Mapping[str, Any]) -> int:
    """Return the position at which a prompt is answered."""
    ids = row.get("decoder_input_ids", row["input_ids"])[0]
    tokenizer: Any = model.tokenizer
    mask = getattr(tokenizer, "mask_token_id", None)
    if mask in ids and not model.encoder_decoder:
        return int(ids.index(mask))
    return len(ids) - 1


def _quality_reads(
    model: hs.Model, texts: Any
) -> list[tuple[dict[str, Any], list[int], list[int]]]:
    """Return the inputs of each text, and the positions and tokens that are read."""
    if texts is None:
        texts = hs.read("plain").texts
    tokenizer: Any = model.tokenizer
    mask = getattr(tokenizer, "mask_token_id", None)
    special = set(getattr(tokenizer, "all_special_ids", ()))
    reads = []
    for number, row in enumerate(texts_of(model, texts)):
        ids = row["input_ids"][0]
        places, tokens = [*range(len(ids) - 1)], ids[1:]
        if "decoder_input_ids" in row:
            half = len(ids) // 2
            tokens = ids[half:]
            places = [*range(len(tokens))]
            start = row["decoder_input_ids"][0][0]
            row = {
                "input_ids": [ids[: max(half, 1)]],
                "decoder_input_ids": [[start, *tokens[:-1]]],
            }
        elif not _is_causal(model):
            words = [place for place, token in enumerate(ids) if token not in special]
            places = words[number % MASKED :: MASKED] or words[:1]
            tokens = [ids[place] for place in places]
            masked = [
                mask if place in places else ids[place] for place in range(len(ids))
            ]
            row = {"input_ids": [masked]}
        reads.append((row, places, tokens))
    return reads


def _is_causal(model: hs.Model) -> bool:
    name = type(model.module).__name__
    return not name.endswith("ForMaskedLM")

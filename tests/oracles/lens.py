"""What every layer predicts: one pass for each site, which ends with its state."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from tests.oracles.plain import NoTable, Plain, texts_of


def lens(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return every number of a lens."""
    if asked.get("lens", "logit") != "logit" or isinstance(
        asked["texts"], hs.Direction
    ):
        raise NoTable("no oracle of fitted lenses and of directions")
    plain = Plain(model.module)
    sites = [str(site) for site in result.data["site"].values]
    prefix = "decoder." if len(plain.shapes) == 2 else ""
    last = f"{prefix}layer.{plain.depth}"
    k = result.data.sizes["rank"]
    read: list[Tensor] = []
    own: list[Tensor] = []
    following: list[int] = []
    for row in texts_of(model, asked["texts"], asked.get("targets")):
        whole, states = plain.run(row, sites)
        logits = []
        for site in sites:
            # A part is read as if it were the last layer.
            place = site if site.endswith("final") else last
            state = states[site]
            logits.append(plain.run(row, (), {place: lambda _, s=state: s})[0][0])
        read.append(torch.stack(logits))
        own.append(whole[0])
        ids = row.get("decoder_input_ids", row["input_ids"])[0]
        following += [*ids[1:], -1]
    return _measures(
        torch.cat(read, 1).log_softmax(-1),
        torch.cat(own).log_softmax(-1),
        np.array(following),
        (sites, plain.depth, k),
        (asked.get("target"), model, result),
    )


def _measures(
    log: Tensor,
    own: Tensor,
    following: np.ndarray,
    shape: tuple[list[str], int, int],
    question: tuple[Any, hs.Model, hs.Result],
) -> dict[str, np.ndarray]:
    sites, depth, k = shape
    target, model, result = question
    found = result.data
    top = log.topk(k)
    kl = (own.exp() * (own - log)).sum(-1).numpy()
    answers = own.argmax(-1)
    agrees = (top.indices[..., 0] == answers).numpy()
    # Of words that are as likely to rounding, any may come first.
    ids = top.indices.numpy().copy()
    theirs = log.gather(-1, torch.as_tensor(found["word_id"].values)).numpy()
    alike = np.abs(theirs - top.values.numpy()) < 1e-4
    ids[alike] = found["word_id"].values[alike]
    numbers = {
        "probability": top.values.exp().numpy(),
        "word_id": ids,
        "entropy": -(log.exp() * log).sum(-1).numpy(),
        "kl": kl,
        "kl_mean": kl.mean(1),
        "agreement": agrees.mean(1),
    }
    if target is not None:
        wanted = following
        if target != "next":
            if isinstance(target, str):
                split = model.tokenizer(target, add_special_tokens=False)
                (target,) = split.input_ids
            wanted = np.full(len(following), target)
        index = torch.as_tensor(wanted)[None, :, None].expand(len(sites), -1, 1)
        theirs = log.gather(-1, index.clamp_min(0))
        # Rounding may put words that are as likely in any order.
        least = (log > theirs + 1e-5).sum(-1).numpy() + 1.0
        most = (log > theirs - 1e-5).sum(-1).numpy()
        rank = np.clip(np.nan_to_num(found["target_rank"].values), least, most)
        probability = theirs[..., 0].exp().numpy()
        numbers["target_rank"] = np.where(wanted >= 0, rank, np.nan)
        numbers["target_probability"] = np.where(wanted >= 0, probability, np.nan)
    if "accuracy" in found:
        followed = following >= 0
        correct = (top.indices[..., 0].numpy() == following)[:, followed]
        numbers["accuracy"] = correct.mean(1)
    return numbers | _settled(agrees, sites, depth, found)


def _settled(
    agrees: np.ndarray, sites: list[str], depth: int, found: Any
) -> dict[str, np.ndarray]:
    """Return from which layer on the answer stays the top token."""
    if "settled" not in found:
        return {}
    layers: dict[int, int] = {}
    for row, site in enumerate(sites):
        name = site.removeprefix("decoder.")
        if name == "final":
            layers[depth + 1] = row
        elif name.count(".") == 1:
            layers[int(name.split(".")[1])] = row
    share = np.full(len(sites), np.nan)
    settled = np.full(agrees.shape[1], -1)
    for layer in sorted(layers, reverse=True):
        above = [known for known in layers if known >= layer]
        # The last layer is always read.
        if not {*range(layer, depth)} <= set(above):
            break
        stays = np.all([agrees[layers[known]] for known in above], axis=0)
        share[layers[layer]] = stays.mean()
        settled[stays] = min(layer, depth)
    return {"settled_share": share, "settled": settled}

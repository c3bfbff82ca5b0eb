"""Findings: what was read, as labelled arrays and as facts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.lens.reading import Read
from hiddenscope.sites import Site
from hiddenscope.states import Tokens

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]

LOOKS: dict[str, dict[str, str]] = {
    "word": {"long_name": "best words"},
    "probability": {"long_name": "probability of the best words"},
    "word_id": {"long_name": "ids of the best words"},
    "entropy": {"long_name": "entropy", "units": "nats"},
    "kl": {"long_name": "KL from the model's answer", "units": "nats", "scale": "log"},
    "target_probability": {"long_name": "probability of {target}", "scale": "log"},
    "target_rank": {"long_name": "rank of {target}", "scale": "log"},
    "agreement": {"long_name": "best word is the model's own"},
    "accuracy": {"long_name": "best word is the true next token"},
    "settled_share": {"long_name": "settled: the best word is the model's own from here on"},
    "kl_mean": {"long_name": "mean KL from the model's answer", "units": "nats", "scale": "log"},
    "settled": {"long_name": "layer from which the best word is the model's own"},
}


@dataclass(frozen=True)
class Found:
    """What was read of the asked sites, and of the model's own answer, `answer` (the best word of each token)."""

    read: Read
    sites: tuple[Site, ...]
    tokens: Tokens
    answer: Ints
    causal: bool

    @classmethod
    def of(
        cls, reads: Sequence[Read], tokens: Tokens, rows: Sequence[Site], asked: tuple[Site, ...], *, causal: bool
    ) -> "Found":
        """Put together what was read of several groups of texts; `rows` may hold the last layer though nobody asked."""
        columns = [np.concatenate([getattr(one, name.name) for one in reads], axis=1) for name in fields(Read)]
        last = max(place for place, site in enumerate(rows) if site.layer is not None)
        kept = [rows.index(site) for site in asked]
        return cls(Read(*(column[kept] for column in columns)), asked, tokens, columns[0][last, :, 0], causal)


def following(tokens: Tokens) -> Ints:
    """The token that comes next in the text of each, -1 where there is none."""
    after = np.append(tokens.ids[1:], -1)
    same = np.append(tokens.text[1:] == tokens.text[:-1], False)
    found: Ints = np.where(same, after, -1)
    return found


def dataset(found: Found, string: Callable[[int], str], target: str | None) -> "xarray.Dataset":
    """What was read as one Dataset; `target` is the name of what was aimed at."""
    import xarray

    read, cells, ranked = found.read, ("site", "token"), ("site", "token", "rank")
    columns: dict[str, tuple[Any, Any]] = {
        "word": (ranked, _strings(read.words, string)),
        "probability": (ranked, read.probability),
        "word_id": (ranked, read.words),
        "entropy": (cells, read.entropy),
        "kl": (cells, read.kl),
    }
    if target is not None:
        columns["target_probability"] = cells, np.exp(read.target)
        columns["target_rank"] = cells, np.where(read.place > 0, read.place, np.nan).astype(np.float32)
    columns |= _along(found)
    looks = {name: {key: said.format(target=target) for key, said in LOOKS[name].items()} for name in columns}
    made = {name: (dims, values, looks[name]) for name, (dims, values) in columns.items()}
    tokens = found.tokens
    coords: dict[str, Any] = {
        "site": [str(site) for site in found.sites],
        "rank": np.arange(1, read.words.shape[2] + 1),
        "text": ("token", tokens.text),
        "position": ("token", tokens.positions),
        "id": ("token", tokens.ids),
        "string": ("token", np.array([*tokens.strings, None], dtype=object)[:-1]),
    }
    stack = found.sites[0].stack
    if stack is not None:
        coords["stack"] = "token", np.array([stack] * len(tokens), dtype=object)
    texts = {} if tokens.texts is None else {"texts" if stack is None else "targets": list(tokens.texts)}
    return xarray.Dataset(made, coords, texts)


def _strings(words: Ints, string: Callable[[int], str]) -> "np.ndarray[Any, Any]":
    """The words as a reader knows them; an id that is nothing to the tokenizer is named as such."""
    known, where = np.unique(words, return_inverse=True)
    said = np.array([*(string(int(word)) or f"(id {word})" for word in known), None], dtype=object)[:-1]
    return said[where.reshape(words.shape)]


def _along(found: Found) -> dict[str, tuple[str, Any]]:
    """Along the sites, over all tokens; and for each token the layer from which its answer is settled."""
    best, nexts = found.read.words[:, :, 0], following(found.tokens)
    same = best == found.answer
    settled = _settled(same)
    share = (settled[None] <= np.arange(len(found.sites))[:, None]).mean(1).astype(np.float32)
    columns: dict[str, tuple[str, Any]] = {
        "agreement": ("site", same.mean(1).astype(np.float32)),
        "settled_share": ("site", share),
        "kl_mean": ("site", found.read.kl.mean(1)),
    }
    if found.causal and (nexts >= 0).any():
        true = best[:, nexts >= 0] == nexts[nexts >= 0]
        columns["accuracy"] = "site", true.mean(1).astype(np.float32)
    numbers = np.array([_number(found.sites, place) for place in range(len(found.sites))] + [-1], dtype=np.int64)
    return columns | {"settled": ("token", numbers[settled])}


def _settled(same: NDArray[np.bool_]) -> Ints:
    """The first site from which on all are the same, for each token; one past the last where the last is not."""
    wrong = ~same[::-1]
    place: Ints = len(same) - np.where(wrong.any(0), wrong.argmax(0), len(same))
    return place


def _number(sites: Sequence[Site], place: int) -> int:
    """The layer of a site; `final` is made of the last."""
    site = sites[place]
    return sites[place - 1].layer or 0 if site.layer is None and place else site.layer or 0


def facts(found: Found, data: "xarray.Dataset", aim: int | None, target: str | None) -> dict[str, Any]:
    """What the lens shows, in words and numbers."""
    sites = [str(site) for site in found.sites]
    told: dict[str, Any] = {"texts": found.tokens.count, "tokens": len(found.tokens)}
    if found.tokens.count == 1:
        told["last token"] = _at(data, sites, len(found.tokens) - 1)
    share = data["settled_share"].to_numpy()
    if (share >= 0.5).any():
        told["half of the answers are settled from"] = sites[int(np.argmax(share >= 0.5))]
    if "accuracy" in data:
        accuracy = data["accuracy"].to_numpy()
        count = int((following(found.tokens) >= 0).sum())
        told["accuracy"] = {"tokens": count, f"at {sites[-1]}": accuracy[-1]}
        if accuracy[-1] > 0:
            told["accuracy"]["half of that from"] = sites[int(np.argmax(accuracy >= accuracy[-1] / 2))]
    if target is not None:
        told["target"] = {"token": target, **({} if aim is None else {"id": aim}), **_aimed(found, data, sites)}
    return told


def _at(data: "xarray.Dataset", sites: list[str], token: int) -> dict[str, Any]:
    """What is said after one token, and from where."""
    here = data.isel(token=token)
    layer = int(here["settled"])
    word, share = here["word"].values[-1, 0], float(here["probability"].values[-1, 0])
    said = {"token": str(here["string"].values), "answer": str(word), "probability": share}
    at = next((site for site in sites if layer >= 0 and site.endswith(f"layer.{layer}")), None)
    return said | ({"settled from": at} if at else {})


def _aimed(found: Found, data: "xarray.Dataset", sites: list[str]) -> dict[str, Any]:
    """Where the target shows: after the last token of one text, else over all tokens."""
    rank, share = data["target_rank"].to_numpy(), data["target_probability"].to_numpy()
    if found.tokens.count > 1 or not np.isfinite(rank[:, -1]).all():
        known = np.isfinite(rank[-1])
        return {"tokens": int(known.sum()), f"median rank at {sites[-1]}": float(np.median(rank[-1][known]))}
    k = data.sizes["rank"]
    facts: dict[str, Any] = {f"rank at {sites[-1]}": int(rank[-1, -1]), "probability there": share[-1, -1]}
    for said, most in (("best", 1), (f"among the {k} best", k)):
        if (rank[:, -1] <= most).any():
            facts[f"first {said} at"] = sites[int(np.argmax(rank[:, -1] <= most))]
    return facts | {"most probable at": sites[int(np.argmax(share[:, -1]))]}

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
    """What was read of the asked sites, and the model's own `answer` after each token, with its probability, `sure`.

    `stays` [site, token]: from this site up the best word of every site that was read is the answer. `known` [site]: no
    layer from there up was left out, so that the answer is settled where it stays.
    """

    read: Read
    sites: tuple[Site, ...]
    tokens: Tokens
    answer: Ints
    sure: Array
    stays: NDArray[np.bool_]
    known: NDArray[np.bool_]
    depth: int
    causal: bool

    @classmethod
    def of(
        cls, reads: Sequence[Read], tokens: Tokens, rows: Sequence[Site], asked: tuple[Site, ...], *, causal: bool
    ) -> "Found":
        """Put together what was read of several groups of texts; `rows` may hold the last layer though nobody asked."""
        whole = Read(*(np.concatenate([getattr(one, name.name) for one in reads], axis=1) for name in fields(Read)))
        layers = [site.layer for site in rows if site.layer is not None]
        last, kept = len(layers) - 1, [rows.index(site) for site in asked]
        answer = whole.words[last, :, 0]
        known = [row > last or layers[-1] - layers[row] == last - row for row in kept]  # none is missing above
        return cls(
            Read(*(getattr(whole, name.name)[kept] for name in fields(Read))),
            asked,
            tokens,
            answer,
            whole.probability[last, :, 0],
            _stays(whole.words[:, :, 0] == answer)[kept],
            np.array(known),
            layers[-1],
            causal=causal,
        )

    @property
    def numbers(self) -> Ints:
        """The layer of each site; `final` is made of the last."""
        return np.array([self.depth if site.layer is None else site.layer for site in self.sites], dtype=np.int64)


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
    said = np.array([*(_word(int(word), string) for word in known), None], dtype=object)[:-1]
    return said[where.reshape(words.shape)]


def _word(word: int, string: Callable[[int], str]) -> str:
    return string(word) or f"(id {word})"


def _along(found: Found) -> dict[str, tuple[str, Any]]:
    """Along the sites, over all tokens; and for each token the layer from which its answer is settled, if known."""
    best, nexts = found.read.words[:, :, 0], following(found.tokens)
    columns: dict[str, tuple[str, Any]] = {
        "agreement": ("site", (best == found.answer).mean(1).astype(np.float32)),
        "kl_mean": ("site", found.read.kl.mean(1)),
    }
    if found.known.any():
        share = np.where(found.known, found.stays.mean(1), np.nan).astype(np.float32)
        columns |= {"settled_share": ("site", share), "settled": ("token", _settled(found))}
    if found.causal and (nexts >= 0).any():
        true = best[:, nexts >= 0] == nexts[nexts >= 0]
        columns["accuracy"] = "site", true.mean(1).astype(np.float32)
    return columns


def _stays(same: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether it is the same from here on, for each row."""
    found: NDArray[np.bool_] = np.logical_and.accumulate(same[::-1])[::-1]
    return found


def _settled(found: Found) -> Ints:
    """The lowest layer among the sites from which on every layer was read and says the answer; -1 where none."""
    settled = found.stays & found.known[:, None]
    lowest: Ints = np.where(settled, found.numbers[:, None], found.depth + 1).min(0)
    lowest[lowest > found.depth] = -1
    return lowest


def facts(
    found: Found, data: "xarray.Dataset", aim: int | None, target: str | None, string: Callable[[int], str]
) -> dict[str, Any]:
    """What the lens shows, in words and numbers."""
    sites = [str(site) for site in found.sites]
    told: dict[str, Any] = {"texts": found.tokens.count, "tokens": len(found.tokens)}
    if found.tokens.count == 1:
        told["last token"] = _at_the_last(found, string)
    if (half := found.known & (found.stays.mean(1) >= 0.5)).any():
        told["half of the answers are settled from"] = sites[int(np.argmax(half))]
    if not found.known.any():
        told["settled"] = "not known: not every layer above these sites was read"
    elif not found.known.all() or found.numbers.min() > 0:
        lowest = sites[int(np.argmax(found.known))]
        told["settled"] = f"known from {lowest} up: below it not every layer was read"
    if "accuracy" in data:
        accuracy = data["accuracy"].to_numpy()
        count = int((following(found.tokens) >= 0).sum())
        told["accuracy"] = {"tokens": count, f"at {sites[-1]}": accuracy[-1]}
        if accuracy[-1] > 0:
            told["accuracy"]["half of that from"] = sites[int(np.argmax(accuracy >= accuracy[-1] / 2))]
    if target is not None:
        told["target"] = {"token": target, **({} if aim is None else {"id": aim}), **_aimed(found, data, sites)}
    return told


def _at_the_last(found: Found, string: Callable[[int], str]) -> dict[str, Any]:
    """What the model says after the last token, and from which site on that is settled, if it is known."""
    word = _word(int(found.answer[-1]), string)
    said = {"token": found.tokens.strings[-1], "answer": word, "probability": float(found.sure[-1])}
    settled = found.stays[:, -1] & found.known
    return said | ({"settled from": str(found.sites[int(np.argmax(settled))])} if settled.any() else {})


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

"""Findings of the lens: its readings as labelled arrays, and the facts drawn from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.lens.reading import Floats, Ints, LensSites, Reading
from hiddenscope.results import Facts
from hiddenscope.sites import Site
from hiddenscope.states import Tokens

if TYPE_CHECKING:
    import xarray

Bools: TypeAlias = NDArray[np.bool_]
Variable: TypeAlias = "tuple[str | tuple[str, ...], np.ndarray[Any, Any]]"

ATTRIBUTES: dict[str, dict[str, str]] = {
    "word": {"long_name": "top tokens"},
    "probability": {"long_name": "probability of the top tokens"},
    "word_id": {"long_name": "ids of the top tokens"},
    "entropy": {"long_name": "entropy", "units": "nats"},
    "kl": {
        "long_name": "KL divergence from the model's own prediction",
        "units": "nats",
        "scale": "log",
    },
    "target_probability": {"long_name": "probability of {target}", "scale": "log"},
    "target_rank": {"long_name": "rank of {target}", "scale": "log"},
    "agreement": {"long_name": "top token is the model's own prediction"},
    "accuracy": {"long_name": "top token is the true next token"},
    "settled_share": {
        "long_name": "settled: top token is the model's own prediction from here on"
    },
    "kl_mean": {
        "long_name": "mean KL divergence from the model's own prediction",
        "units": "nats",
        "scale": "log",
    },
    "settled": {
        "long_name": "layer from which on the top token is the model's own prediction"
    },
}


@dataclass(frozen=True)
class Target:
    """The word whose probability is followed: its `name`, and its id; None where each
    token has its own, the next.
    """

    name: str
    id: int | None


@dataclass(frozen=True)
class Predictions:
    """The reading of the chosen sites, and the model's own `answer` after each token,
    with its probability.

    `stays` [site, token]: the top token of this site, and of every site above it that
    was read, is the answer. `known` [site]: no layer above was left out, so that an
    answer that stays is settled there.
    """

    reading: Reading
    sites: tuple[Site, ...]
    tokens: Tokens
    answer: Ints
    answer_probability: Floats
    stays: Bools
    known: Bools
    depth: int
    causal: bool

    @classmethod
    def of(cls, reading: Reading, sites: LensSites, tokens: Tokens) -> "Predictions":
        """What was read of all sites, the last layer among them, whether it was chosen
        or not.
        """
        layers = [site.layer or 0 for site in sites.layers]
        last, rows = len(layers) - 1, [sites.all.index(site) for site in sites.chosen]
        answer = reading.top_ids[last, :, 0]
        return cls(
            reading.at(rows),
            sites.chosen,
            tokens,
            answer,
            reading.probability[last, :, 0],
            stays_from(reading.top_ids[:, :, 0] == answer)[rows],
            np.array(
                [row > last or layers[-1] - layers[row] == last - row for row in rows]
            ),
            layers[-1],
            sites.causal,
        )

    @property
    def layers(self) -> Ints:
        """The layer of each site; `final` comes from the last."""
        return np.array(
            [self.depth if site.layer is None else site.layer for site in self.sites],
            dtype=np.int64,
        )

    @property
    def settled(self) -> Ints:
        """For each token, the lowest layer at which its answer is known to be settled;
        -1 where there is none.
        """
        settled = self.stays & self.known[:, None]
        lowest: Ints = np.where(settled, self.layers[:, None], self.depth + 1).min(0)
        lowest[lowest > self.depth] = -1
        return lowest


def next_ids(tokens: Tokens) -> Ints:
    """The token that comes next in its text, for each token; -1 for the last of a text."""
    after = np.append(tokens.ids[1:], -1)
    ids: Ints = np.where(
        np.append(tokens.text[1:] == tokens.text[:-1], False), after, -1
    )
    return ids


def stays_from(same: Bools) -> Bools:
    """Whether each row and all rows after it are true."""
    stays: Bools = np.logical_and.accumulate(same[::-1])[::-1]
    return stays


def dataset(
    predictions: Predictions,
    strings: Callable[[list[int]], list[str]],
    target: Target | None,
) -> "xarray.Dataset":
    """Return the predictions as one Dataset; `strings` gives the texts of some words of
    the vocabulary.
    """
    import xarray

    reading, cells, ranked = (
        predictions.reading,
        ("site", "token"),
        ("site", "token", "rank"),
    )
    variables: dict[str, Variable] = {
        "word": (ranked, _words(reading.top_ids, strings)),
        "probability": (ranked, reading.probability),
        "word_id": (ranked, reading.top_ids),
        "entropy": (cells, reading.entropy),
        "kl": (cells, reading.kl),
    }
    if target is not None:
        ranks = np.where(reading.target_rank > 0, reading.target_rank, np.nan).astype(
            np.float32
        )
        variables["target_probability"] = cells, np.exp(reading.target_log_probability)
        variables["target_rank"] = cells, ranks
    variables |= _along(predictions)
    name = "" if target is None else target.name
    attributes = {
        key: {
            attribute: text.format(target=name)
            for attribute, text in ATTRIBUTES[key].items()
        }
        for key in variables
    }
    tokens, stack = predictions.tokens, predictions.sites[0].stack
    columns = {
        "text": tokens.text,
        "position": tokens.positions,
        "id": tokens.ids,
        "string": _objects(tokens.strings),
    }
    if stack is not None:
        columns["stack"] = _objects([stack] * len(tokens))
    # Without `fastpath`, xarray looks at every string, which takes longer than reading
    # a short text on a GPU.
    coords: dict[str, Any] = {
        "site": [str(site) for site in predictions.sites],
        "rank": np.arange(1, reading.top_ids.shape[2] + 1),
        **{
            key: xarray.Variable("token", column, fastpath=True)
            for key, column in columns.items()
        },
    }
    data = {
        key: xarray.Variable(*variables[key], attributes[key], fastpath=True)
        for key in variables
    }
    texts = (
        {}
        if tokens.texts is None
        else {"texts" if stack is None else "targets": list(tokens.texts)}
    )
    return xarray.Dataset(data, coords, texts)


def _along(predictions: Predictions) -> dict[str, Variable]:
    """Shares and means over all tokens, along the sites; and for each token where its
    answer is settled, if known.
    """
    best, following = predictions.reading.top_ids[:, :, 0], next_ids(predictions.tokens)
    variables: dict[str, Variable] = {
        "agreement": ("site", (best == predictions.answer).mean(1).astype(np.float32)),
        "kl_mean": ("site", predictions.reading.kl.mean(1)),
    }
    if predictions.known.any():
        share = np.where(predictions.known, predictions.stays.mean(1), np.nan).astype(
            np.float32
        )
        variables |= {
            "settled_share": ("site", share),
            "settled": ("token", predictions.settled),
        }
    if predictions.causal and (following >= 0).any():
        correct = best[:, following >= 0] == following[following >= 0]
        variables["accuracy"] = "site", correct.mean(1).astype(np.float32)
    return variables


def _words(
    ids: Ints, strings: Callable[[list[int]], list[str]]
) -> "np.ndarray[Any, Any]":
    """Return words of the vocabulary as a reader knows them."""
    distinct, places = np.unique(ids, return_inverse=True)
    numbers = distinct.tolist()
    words = [
        word or _nameless(number)
        for number, word in zip(numbers, strings(numbers), strict=True)
    ]
    return _objects(words)[places.reshape(ids.shape)]


def _nameless(word: int) -> str:
    """How an id that the tokenizer has no text for is shown."""
    return f"(id {word})"


def _objects(strings: Sequence[str]) -> "np.ndarray[Any, Any]":
    array = np.empty(len(strings), dtype=object)
    array[:] = strings
    return array


def facts_of(
    predictions: Predictions,
    data: "xarray.Dataset",
    target: Target | None,
    string: Callable[[int], str],
) -> Facts:
    """What the lens shows: the answer and where it is settled, how often layers are
    right, and where the target is.
    """
    sites = [str(site) for site in predictions.sites]
    half = predictions.known & (predictions.stays.mean(1) >= 0.5)
    facts: dict[str, Any] = {
        "texts": predictions.tokens.count,
        "tokens": len(predictions.tokens),
        "causal": predictions.causal,
        "settled_known_from": _first(sites, predictions.known),
        "half_settled_from": _first(sites, half),
    }
    if predictions.tokens.count == 1:
        settled = predictions.stays[:, -1] & predictions.known
        facts["last_token"] = {
            "token": predictions.tokens.strings[-1],
            "answer": (
                string(int(predictions.answer[-1]))
                or _nameless(int(predictions.answer[-1]))
            ),
            "answer_id": int(predictions.answer[-1]),
            "probability": float(predictions.answer_probability[-1]),
            "settled_from": _first(sites, settled),
        }
    if "accuracy" in data:
        accuracy = data["accuracy"].to_numpy()
        facts["accuracy"] = {
            "tokens": int((next_ids(predictions.tokens) >= 0).sum()),
            "site": sites[-1],
            "value": accuracy[-1],
            "half_from": half_from(sites, accuracy),
        }
    if target is not None:
        facts["target"] = {
            "token": target.name,
            "id": target.id,
            "site": sites[-1],
            **_target(predictions, data),
        }
    return facts


def _target(predictions: Predictions, data: "xarray.Dataset") -> Facts:
    """Where the target comes up: after the last token of a single text, else over all
    tokens.
    """
    sites = [str(site) for site in predictions.sites]
    rank, probability = (
        data["target_rank"].to_numpy(),
        data["target_probability"].to_numpy(),
    )
    if predictions.tokens.count > 1 or not np.isfinite(rank[:, -1]).all():
        counted = np.isfinite(rank[-1])
        return {
            "tokens": int(counted.sum()),
            "median_rank": float(np.median(rank[-1][counted])),
        }
    return {
        "rank": int(rank[-1, -1]),
        "probability": probability[-1, -1],
        "first_best_at": _first(sites, rank[:, -1] == 1),
        "first_in_top_k_at": _first(sites, rank[:, -1] <= data.sizes["rank"]),
        "k": data.sizes["rank"],
        "most_probable_at": sites[int(np.argmax(probability[:, -1]))],
    }


def half_from(sites: Sequence[str], accuracy: Floats) -> str | None:
    """The lowest site from which on the accuracy is at least half of that of the last;
    None where that is 0.

    >>> half_from(["layer.0", "layer.1", "layer.2"], np.array([0.6, 0.1, 1.0]))
    'layer.2'
    """
    return (
        _first(sites, stays_from(accuracy >= accuracy[-1] / 2))
        if accuracy[-1] > 0
        else None
    )


def _first(sites: Sequence[str], where: Bools) -> str | None:
    return sites[int(np.argmax(where))] if where.any() else None

"""Findings of the lens: its readings as labelled arrays, and the facts they show."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.lens.reading import LensSites, Reading
from hiddenscope.results import Facts
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Dims,
    Variables,
    site_names,
    text_array,
    to_dataset,
    token_coords,
)
from hiddenscope.sites import Site
from hiddenscope.states import Tokens
from hiddenscope.states.arrays import Bools, Ints

if TYPE_CHECKING:
    import xarray

_Columns: TypeAlias = dict[str, tuple[Dims, NDArray[Any]]]

CELLS = ("site", "token")
RANKED = ("site", "token", "rank")

ATTRIBUTES: dict[str, Attributes] = {
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
    """The word whose probability is followed.

    `id` is None where each token has a target of its own, the next token.
    """

    name: str
    id: int | None


@dataclass(frozen=True)
class Predictions:
    """The reading of the selected sites, and the model's own `answer` after each token.

    `stays` [site, token]: the top token of this site, and of every site above it that
    was read, is the answer. `known` [site]: no layer above was left out, so that an
    answer that stays is settled there.
    """

    reading: Reading
    sites: tuple[Site, ...]
    tokens: Tokens
    answer: Ints
    answer_probability: NDArray[np.float32]
    stays: Bools
    known: Bools
    depth: int
    causal: bool

    @classmethod
    def of(cls, reading: Reading, sites: LensSites, tokens: Tokens) -> "Predictions":
        """Draw the predictions from a reading of all sites, the last layer included."""
        last = len(sites.entering) - 1
        depth = sites.last.layer or 0
        rows = [sites.all.index(site) for site in sites.selected]
        answer = reading.top_ids[last, :, 0]
        # A part does not hold what the layers below it predict, so that only whole
        # layers can be settled.
        stream = [row for row, site in enumerate(sites.all) if not site.part]
        agrees = reading.predicts(answer)
        stays = np.zeros_like(agrees)
        stays[stream] = stays_from(agrees[stream])
        known = [_is_known(site, sites, depth) for site in sites.selected]
        return cls(
            reading=reading.at(rows),
            sites=sites.selected,
            tokens=tokens,
            answer=answer,
            answer_probability=reading.probability[last, :, 0],
            stays=stays[rows],
            known=np.array(known),
            depth=depth,
            causal=sites.causal,
        )

    @property
    def layers(self) -> Ints:
        """Return the layer of each site; `final` counts as the last."""
        layers = np.full(len(self.sites), self.depth, dtype=np.int64)
        for row, site in enumerate(self.sites):
            if site.layer is not None:
                layers[row] = site.layer
        return layers

    @property
    def whole(self) -> list[int]:
        """Return the rows of whole layers and `final`."""
        return [row for row, site in enumerate(self.sites) if not site.part]

    @property
    def settled(self) -> Ints:
        """Return the lowest layer at which each token's answer is settled, or -1."""
        settled = self.stays & self.known[:, None]
        lowest: Ints = np.where(settled, self.layers[:, None], self.depth + 1).min(0)
        lowest[lowest > self.depth] = -1
        return lowest


def _is_known(site: Site, sites: LensSites, depth: int) -> bool:
    """Tell whether every layer of the stack above a site was read."""
    if site.part:
        return False
    # `final` comes after the last layer.
    if site.layer is None:
        return True
    layers = sites.layers
    return depth - site.layer == len(layers) - 1 - layers.index(site)


def next_ids(tokens: Tokens) -> Ints:
    """Return the token after each token in its text, -1 after the last of a text."""
    following = np.append(tokens.ids[1:], -1)
    same_text = np.append(tokens.text[1:] == tokens.text[:-1], False)
    ids: Ints = np.where(same_text, following, -1)
    return ids


def stays_from(same: Bools) -> Bools:
    """Tell for each row whether it and all rows after it are true."""
    stays: Bools = np.logical_and.accumulate(same[::-1])[::-1]
    return stays


def lens_dataset(
    predictions: Predictions,
    strings: Callable[[list[int]], list[str]],
    target: Target | None,
) -> "xarray.Dataset":
    """Return the predictions as one Dataset; `strings` decodes ids."""
    reading = predictions.reading
    columns: _Columns = {
        "word": (RANKED, _words(reading.top_ids, strings)),
        "probability": (RANKED, reading.probability),
        "word_id": (RANKED, reading.top_ids),
        "entropy": (CELLS, reading.entropy),
        "kl": (CELLS, reading.kl),
    }
    target_name = ""
    if target is not None:
        target_name = target.name
        ranks = np.where(reading.target_rank > 0, reading.target_rank, np.nan)
        probability = np.exp(reading.target_log_probability)
        columns["target_probability"] = CELLS, probability
        columns["target_rank"] = CELLS, ranks.astype(np.float32)
    columns |= _along_sites(predictions)
    variables: Variables = {}
    for name, (dims, values) in columns.items():
        attributes = ATTRIBUTES[name].copy()
        attributes["long_name"] = attributes["long_name"].format(target=target_name)
        variables[name] = dims, values, attributes
    tokens = predictions.tokens
    stack = predictions.sites[0].stack
    coords: Coordinates = {
        "site": site_names(predictions.sites),
        "rank": np.arange(1, reading.top_ids.shape[2] + 1),
        **token_coords([tokens], [] if stack is None else [stack]),
    }
    attrs = {}
    if tokens.texts is not None:
        attrs["texts" if stack is None else "targets"] = list(tokens.texts)
    return to_dataset(variables, coords, attrs)


def _along_sites(predictions: Predictions) -> _Columns:
    """Return shares and means over all tokens, and where each answer is settled."""
    reading = predictions.reading
    agreement = reading.predicts(predictions.answer).mean(1)
    columns: _Columns = {
        "agreement": ("site", agreement.astype(np.float32)),
        "kl_mean": ("site", reading.kl.mean(1)),
    }
    if predictions.known.any():
        share = np.where(predictions.known, predictions.stays.mean(1), np.nan)
        columns["settled_share"] = "site", share.astype(np.float32)
        columns["settled"] = "token", predictions.settled
    following = next_ids(predictions.tokens)
    followed = following >= 0
    if predictions.causal and followed.any():
        correct = reading.predicts(following)[:, followed]
        columns["accuracy"] = "site", correct.mean(1).astype(np.float32)
    return columns


def _words(ids: Ints, strings: Callable[[list[int]], list[str]]) -> NDArray[np.object_]:
    """Decode ids, each distinct one once."""
    distinct, places = np.unique(ids, return_inverse=True)
    distinct_ids = distinct.tolist()
    words = [
        _word(token, string)
        for token, string in zip(distinct_ids, strings(distinct_ids), strict=True)
    ]
    return text_array(words)[places.reshape(ids.shape)]


def _word(token: int, string: str) -> str:
    """Return a word as it is shown, also where the tokenizer has no text for it."""
    return string or f"(id {token})"


def lens_facts(
    predictions: Predictions,
    data: "xarray.Dataset",
    target: Target | None,
    string: Callable[[int], str],
) -> Facts:
    """Return the answer and where it settles, and how often layers are right."""
    sites = site_names(predictions.sites)
    half = predictions.known & (predictions.stays.mean(1) >= 0.5)
    facts: dict[str, Any] = {
        "texts": predictions.tokens.count,
        "tokens": len(predictions.tokens),
        "causal": predictions.causal,
        "parts": len(predictions.whole) < len(predictions.sites),
        "settled_known_from": _first(sites, predictions.known),
        "half_settled_from": _first(sites, half),
    }
    if predictions.tokens.count == 1:
        settled = predictions.stays[:, -1] & predictions.known
        answer = int(predictions.answer[-1])
        facts["last_token"] = {
            "token": predictions.tokens.strings[-1],
            "answer": _word(answer, string(answer)),
            "answer_id": answer,
            "probability": float(predictions.answer_probability[-1]),
            "settled_from": _first(sites, settled),
        }
    whole = predictions.whole
    if "accuracy" in data and whole:
        accuracy = data["accuracy"].to_numpy()[whole]
        whole_sites = [sites[row] for row in whole]
        facts["accuracy"] = {
            "tokens": int((next_ids(predictions.tokens) >= 0).sum()),
            "site": whole_sites[-1],
            "value": accuracy[-1],
            "half_from": half_from(whole_sites, accuracy),
        }
    if target is not None:
        facts["target"] = {
            "token": target.name,
            "id": target.id,
            "site": sites[-1],
            **_target_facts(predictions, data),
        }
    return facts


def _target_facts(predictions: Predictions, data: "xarray.Dataset") -> Facts:
    """Return where the target ranks: after the last token of one text, or overall."""
    rank = data["target_rank"].to_numpy()
    if predictions.tokens.count > 1 or not np.isfinite(rank[:, -1]).all():
        counted = np.isfinite(rank[-1])
        return {
            "tokens": int(counted.sum()),
            "median_rank": float(np.median(rank[-1][counted])),
        }
    sites = site_names(predictions.sites)
    probability = data["target_probability"].to_numpy()
    k = data.sizes["rank"]
    reading = predictions.reading
    tied = reading.tied[:, -1]
    # Where more than k words are alike, none is among the top k.
    tied_beyond = tied & (np.exp(reading.entropy[:, -1]) > k + 0.5)
    # Parts do not come one after another as layers do: for them nothing is the first.
    whole = np.array([not site.part for site in predictions.sites])
    last = probability[:, -1]
    return {
        "rank": int(rank[-1, -1]),
        "probability": probability[-1, -1],
        "first_best_at": _first(sites, whole & (rank[:, -1] == 1) & ~tied),
        "first_in_top_k_at": _first(sites, whole & (rank[:, -1] <= k) & ~tied_beyond),
        "k": k,
        "most_probable_at": _first(sites, (last == last.max()) & ~tied_beyond),
        "highest_probability": float(last.max()),
    }


def half_from(sites: Sequence[str], accuracy: NDArray[np.float32]) -> str | None:
    """Return the lowest site from which on accuracy stays at half the last site's.

    It is None where the accuracy at the last site is 0.

    >>> half_from(["layer.0", "layer.1", "layer.2"], np.array([0.6, 0.1, 1.0]))
    'layer.2'
    """
    if accuracy[-1] == 0:
        return None
    return _first(sites, stays_from(accuracy >= accuracy[-1] / 2))


def _first(sites: Sequence[str], where: Bools) -> str | None:
    """Return the first site at which a condition holds."""
    if not where.any():
        return None
    return sites[int(np.argmax(where))]

"""Labels: what a probe predicts, one for each text or for each token; given, ready-made, or drawn as a control."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.errors import StatesError, TextError
from hiddenscope.linear.crossvalidation import hashed
from hiddenscope.measures.separation import shuffled
from hiddenscope.model import Model
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Readable, Tokens
from hiddenscope.texts import Labelled, read
from hiddenscope.vectors import Token, Vectors, vectors
from hiddenscope.vectors.collection import copies_among, dataset_of

Ints: TypeAlias = NDArray[np.int64]

SHIPPED = ("cities-complete", "cities-incomplete")  # whose tokens are probed where no texts are given
FREQUENT = 9  # previous tokens that are classes of their own
OTHER = "(another)"
ENOUGH = 5  # texts in which a class of a ready label must occur


@dataclass(frozen=True, eq=False)
class Rows:
    """What is probed: vectors with a label for each row, the text of each row, and of tokens their ids.

    `groups` names the text of each row by its content, the same for copies (`texts.copy_key`), so that no text is both
    trained and tested on. `left_out` is the number of tokens without a label.
    """

    vectors: Vectors
    labels: list[Any]
    groups: list[str]
    token_ids: Ints | None
    name: str
    left_out: int = 0


def labelled_rows(
    source: Model | Readable | Pair, data: Any, task: str, sites: SitePatterns, token: Token, truncate: bool
) -> Rows:
    """Vectors and labels from a model and a dataset, or from states and labels."""
    if isinstance(source, Model):
        texts, labels, name = _dataset(data, token)
        rows = vectors(source, texts, sites=sites, token=token, truncate=truncate)
        groups = copies_among(texts)
    else:
        rows, labels, name = vectors(source, sites=sites, token=token), data, "the labels"
        if isinstance(data, Labelled):
            labels, name = data.labels, data.name
        groups = copies_among(_tokens(source, rows))
    if rows.tokens is None:
        return Rows(rows, _listed(labels, rows.values.shape[1], "text"), groups, None, name)
    return _of_tokens(rows, labels, groups, name, task)


def _dataset(data: Any, token: Token) -> tuple[Any, Any, str]:
    """Texts, their labels or the name of ready ones, and a name for the data."""
    if token == "each":
        if isinstance(data, str) and data in READY:
            return [text for name in SHIPPED for text in read(name).texts], data, f"{data} of tokens"
        if isinstance(data, tuple) and len(data) == 2:
            texts, labels = data
            name = f"{labels} of tokens" if isinstance(labels, str) else "the labels"
            if isinstance(texts, Labelled):
                return list(texts.texts), labels, f"{name} of {texts.name}"
            listed = list(texts)
            return (list(read(listed).texts) if listed and isinstance(listed[0], str) else listed), labels, name
        remedy = f"Give (texts, labels) with a list of labels for each text, or (texts, name) with {', '.join(READY)}."
        raise TextError("A probe of each token needs a label for each token", "there is none", remedy)
    dataset = dataset_of(data)
    if dataset.labels is None:
        remedy = 'Name their column, hs.read(path, label="..."), or give (texts, labels).'
        raise TextError(f"Cannot probe {dataset.name}", "its texts have no labels", remedy)
    return dataset.texts, dataset.labels, dataset.name


def _tokens(source: Readable | Pair, rows: Vectors) -> Tokens:
    if isinstance(source, Pair):
        return (source.decoder if rows.sites[0].stack == "decoder" else source.encoder).tokens
    return source.tokens


def _of_tokens(rows: Vectors, labels: Any, texts: list[str], name: str, task: str) -> Rows:
    """A label for each token: a flat list, a list for each text, or ready-made."""
    tokens = rows.tokens
    assert tokens is not None  # a row is a token
    groups = [texts[text] for text in tokens.text]
    if isinstance(labels, str):
        if labels not in READY:
            raise StatesError(
                f"No ready label {labels[:40]!r}", "there are three ready labels", f"Use one of {', '.join(READY)}."
            )
        return _with_label(Rows(rows, READY[labels](tokens, task), groups, tokens.ids, name))
    listed = list(labels.tolist() if hasattr(labels, "tolist") else labels)
    if listed and isinstance(listed[0], Sequence | np.ndarray) and not isinstance(listed[0], str):
        lengths = [len(some) for some in listed]
        if lengths != tokens.lengths.tolist():
            reason = f"there are {len(lengths)} lists for {tokens.count} texts"
            for text, (given, expected) in enumerate(zip(lengths, tokens.lengths, strict=False)):
                if given != expected:
                    reason = f"text {text} has {expected} tokens and {given} labels"
                    break
            raise StatesError(
                "Labels do not fit the tokens", reason, "Give a list for each text, with one label for each token."
            )
        listed = [label for some in listed for label in some]
    return Rows(rows, _listed(listed, len(tokens), "token"), groups, tokens.ids, name)


def _listed(labels: Any, rows: int, unit: str) -> list[Any]:
    problem = f"Labels do not fit the {unit}s"
    if isinstance(labels, str | bytes) or not hasattr(labels, "__len__"):
        reason = f"got {type(labels).__name__}"
        raise StatesError(f"{rows:,} {unit}s need a list of labels", reason, f"Give one for each {unit}.")
    listed = list(labels.tolist() if hasattr(labels, "tolist") else labels)
    if len(listed) != rows:
        reason = f"there are {rows:,} {unit}s and {len(listed):,} labels"
        raise StatesError(problem, reason, f"Give one for each {unit}.")
    for row, label in enumerate(listed):
        if label is None or label != label:
            raise StatesError(problem, f"the label of {unit} {row} is missing", "Leave that one out.")
    return listed


def _with_label(rows: Rows) -> Rows:
    """The rows that have a label; a ready one may leave some out."""
    kept = [row for row, label in enumerate(rows.labels) if label is not None]
    if len(kept) == len(rows.labels):
        return rows
    if not kept:
        raise StatesError(f"Cannot probe {rows.name}", "no token has such a label", "Give longer texts.")
    assert rows.vectors.tokens is not None
    assert rows.token_ids is not None
    vectors = replace(rows.vectors, values=rows.vectors.values[:, kept], tokens=rows.vectors.tokens.select(kept))
    labels, groups = ([column[row] for row in kept] for column in (rows.labels, rows.groups))
    return Rows(vectors, labels, groups, rows.token_ids[kept], rows.name, len(rows.labels) - len(kept))


def position(tokens: Tokens, task: str) -> list[Any]:
    """The position of a token in its text: the number for a regression, else 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on.

    A class that occurs in too few texts joins the one before it.
    """
    if task == "regress":
        return [float(place) for place in tokens.positions]
    levels = [int(place).bit_length() for place in tokens.positions]
    texts = defaultdict(set)
    for level, text in zip(levels, tokens.text, strict=True):
        texts[level].add(int(text))
    last = max([level for level in texts if len(texts[level]) >= ENOUGH], default=max(texts))
    names = {0: "0", 1: "1"} | {k: f"{2 ** (k - 1):,} to {2**k - 1:,}" for k in range(2, last)}
    names[last] = f"from {2 ** (last - 1):,}" if last > 1 else names.get(last, "1")
    return [names[min(level, last)] for level in levels]


def word_start(tokens: Tokens, task: str) -> list[Any]:
    """Whether a token begins a word: at the start of the text, with white space in it first, or after white space."""
    if tokens.texts is None:
        reason = "only ids were given, and no texts to find words in"
        raise StatesError("No starts of words", reason, "Give texts.")
    labels: list[Any] = []
    for text, (start, end) in zip(tokens.text, tokens.spans, strict=True):
        string = tokens.texts[text]
        before = string[max(0, start - 1) : start]
        begins = start == 0 or string[start : start + 1].isspace() or before.isspace()
        label: Any = float(begins) if task == "regress" else "begins a word" if begins else "goes on"
        labels.append(None if start < 0 or start == end else label)
    return labels


def previous_token(tokens: Tokens, task: str) -> list[Any]:
    """The token before: the most frequent ones are classes, all others are one more class.

    A token whose neighbour is not here, at the start of a text or of a window or where tokens were left out, has none.
    """
    if task == "regress":
        raise StatesError("Cannot regress the previous token", "it is a class", 'Use task="classify".')
    follows = (np.diff(tokens.text) == 0) & (np.diff(tokens.positions) == 1)
    neighbours = zip(tokens.ids[:-1].tolist(), follows, strict=True)
    before = [None, *(token if near else None for token, near in neighbours)][: len(tokens)]
    counts = Counter(token for token in before if token is not None)
    texts = defaultdict(set)
    for token, text in zip(before, tokens.text, strict=True):
        texts[token].add(int(text))
    strings = dict(zip(tokens.ids.tolist(), tokens.strings, strict=True))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = [token for token in ranked if len(texts[token]) >= ENOUGH][:FREQUENT]
    names = {token: f"{strings[token]!r}" for token in chosen}
    return [None if token is None else names.get(token, OTHER) for token in before]


READY: Mapping[str, Callable[[Tokens, str], list[Any]]] = {
    "position": position,
    "word-start": word_start,
    "previous-token": previous_token,
}


def control(
    targets: torch.Tensor, groups: Sequence[str], folds: Ints, token_ids: Ints | None, seed: int
) -> torch.Tensor:
    """Targets that mean nothing, with the frequencies of the true ones (Hewitt and Liang 2019).

    Tokens get one target drawn for each token id. Texts get the true targets shuffled within their fold, which so keeps
    its share of every class: otherwise a class that is rare in a fold is frequent outside it, and a probe that learns
    that is wrong more often than by chance. Copies of a text have one target among the true ones, and so they have
    here. The same rows in another order have the same control.
    """
    if token_ids is None:
        order = np.array(sorted(range(len(groups)), key=lambda row: (groups[row], float(targets[row]))))
        names = np.array(groups, dtype=object)[order]
        rows, drawn = torch.from_numpy(order), torch.empty_like(targets)
        drawn[rows] = shuffled(targets[rows], 1, seed, names, folds[order])[1]
        return drawn
    ranked = targets.sort().values
    kinds, which = np.unique(token_ids, return_inverse=True)
    places = [hashed(f"type {kind}", seed) * len(ranked) >> 64 for kind in kinds]
    return ranked[torch.tensor(places)[torch.from_numpy(which.reshape(-1))]]

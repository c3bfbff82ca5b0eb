"""Labels: what a probe predicts, one for each text or for each token; given,
ready-made, or drawn as a control.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.errors import StatesError, TextError
from hiddenscope.linear.crossvalidation import hashed
from hiddenscope.measures.permutations import permuted, same_labelling
from hiddenscope.model import Model
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable, Tokens
from hiddenscope.texts import Belonging, Labelled, belonging, listed, read
from hiddenscope.vectors import Vectors, vectors
from hiddenscope.vectors.dataset import Dataset, dataset_of, strings_of

Ints: TypeAlias = NDArray[np.int64]

# Whose tokens are probed where no texts are given.
SHIPPED = (
    "cities-complete",
    "cities-incomplete",
)
FREQUENT = 9  # previous tokens that are classes of their own
OTHER = "(another)"
ENOUGH = 5  # texts in which a class of a ready label must occur
ATTEMPTS, NEXT_SEED = 20, 1_000_003  # at control labels that are not the true ones


@dataclass(frozen=True, eq=False)
class Rows:
    """What is probed: vectors with a label for each row, and of tokens their ids.

    `texts` and `groups` name the text of each row and its group, as `belonging` has
    them. `left_out` is the number of tokens without a label.
    """

    vectors: Vectors
    labels: list[Any]
    groups: list[str]
    texts: list[str]
    token_ids: Ints | None
    name: str
    left_out: int = 0
    belonging: Belonging | None = None

    @property
    def unit(self) -> str:
        """What is taken as independent of others, in words."""
        return (
            "group of texts"
            if self.belonging is not None and self.belonging.grouped
            else "text"
        )

    def some(self, rows: Sequence[int]) -> "Rows":
        """Some of the rows."""
        tokens = (
            None if self.vectors.tokens is None else self.vectors.tokens.select(rows)
        )
        return replace(
            self,
            vectors=replace(
                self.vectors, values=self.vectors.values[:, rows], tokens=tokens
            ),
            labels=[self.labels[row] for row in rows],
            groups=[self.groups[row] for row in rows],
            texts=[self.texts[row] for row in rows],
            token_ids=None if self.token_ids is None else self.token_ids[rows],
        )


def labelled_rows(
    source: Model | Readable | Pair,
    data: Any,
    task: str,
    sites: SitePatterns,
    pool: Pooling | None,
    truncate: bool,
) -> Rows:
    """Vectors and labels from a model and a dataset, or from states and labels."""
    texts: Any
    if isinstance(source, Model):
        dataset = _dataset(data, by_token=pool is None)
        texts = dataset.texts
        rows = vectors(source, texts, sites=sites, pool=pool, truncate=truncate)
    else:
        rows = vectors(source, sites=sites, pool=pool)
        texts = _tokens(source, rows)
        dataset = Dataset(texts, data, "the labels")
        if isinstance(data, Labelled):
            dataset = Dataset(texts, data.labels, data.name, data.groups)
    return _with_groups(_with_labels(rows, dataset, task), dataset, texts)


def _with_labels(rows: Vectors, dataset: Dataset, task: str) -> Rows:
    """A label for each row; the texts and groups are not known yet."""
    if rows.tokens is not None:
        return _of_tokens(rows, dataset.labels, dataset.name, task)
    return Rows(
        rows,
        _listed(dataset.labels, rows.values.shape[1], "text"),
        [],
        [],
        None,
        dataset.name,
    )


def _with_groups(rows: Rows, dataset: Dataset, texts: Any) -> Rows:
    """Find which texts belong together, and keep each text once: a copy with the same
    labels tells nothing new.
    """
    strings = strings_of(texts)
    tokens = rows.vectors.tokens
    text_of = list(range(len(strings))) if tokens is None else tokens.text.tolist()
    labels: list[list[Any]] = [[] for _ in strings]
    for text, label in zip(text_of, rows.labels, strict=True):
        labels[text].append(label)
    found = belonging(strings, labels, dataset.groups)
    named = replace(
        rows,
        groups=[found.groups[text] for text in text_of],
        texts=[found.texts[text] for text in text_of],
        belonging=found,
    )
    if not found.copies:
        return named
    return named.some([row for row, text in enumerate(text_of) if found.first[text]])


def _dataset(data: Any, by_token: bool) -> Dataset:
    """Texts, their labels or the name of ready ones, their groups, and a name for the
    data.
    """
    if by_token:
        if isinstance(data, str) and data in READY:
            shipped = [text for name in SHIPPED for text in read(name).texts]
            return Dataset(shipped, data, f"{data} of tokens")
        if isinstance(data, tuple) and len(data) == 2:
            texts, labels = data
            name = f"{labels} of tokens" if isinstance(labels, str) else "the labels"
            if isinstance(texts, Labelled):
                return Dataset(
                    list(texts.texts), labels, f"{name} of {texts.name}", texts.groups
                )
            rows = listed(texts)
            if rows and isinstance(rows[0], str):
                rows = list(read(rows).texts)
            return Dataset(rows, labels, name)
        remedy = (
            "Give (texts, labels) with a list of labels for each text, or (texts,"
            f" name) with {', '.join(READY)}."
        )
        raise TextError(
            "A probe of each token needs a label for each token",
            "there is none",
            remedy,
        )
    dataset = dataset_of(data)
    if dataset.labels is None:
        remedy = (
            'Name their column, hs.read(path, label="..."), or give (texts, labels).'
        )
        raise TextError(
            f"Cannot probe {dataset.name}", "its texts have no labels", remedy
        )
    return dataset


def _tokens(source: Readable | Pair, rows: Vectors) -> Tokens:
    if isinstance(source, Pair):
        return (
            source.decoder if rows.sites[0].stack == "decoder" else source.encoder
        ).tokens
    return source.tokens


def _of_tokens(rows: Vectors, labels: Any, name: str, task: str) -> Rows:
    """A label for each token: a flat list, a list for each text, or ready-made."""
    tokens = rows.tokens
    assert tokens is not None  # a row is a token
    if isinstance(labels, str):
        if labels not in READY:
            raise StatesError(
                f"No ready label {labels[:40]!r}",
                "there are three ready labels",
                f"Use one of {', '.join(READY)}.",
            )
        return _with_label(
            Rows(rows, READY[labels](tokens, task), [], [], tokens.ids, name)
        )
    values = listed(labels.tolist() if hasattr(labels, "tolist") else labels)
    if (
        values
        and isinstance(values[0], Sequence | np.ndarray)
        and not isinstance(values[0], str)
    ):
        lengths = [len(some) for some in values]
        if lengths != tokens.lengths.tolist():
            reason = f"there are {len(lengths)} lists for {tokens.count} texts"
            for text, (given, expected) in enumerate(
                zip(lengths, tokens.lengths, strict=False)
            ):
                if given != expected:
                    reason = f"text {text} has {expected} tokens and {given} labels"
                    break
            raise StatesError(
                "Labels do not fit the tokens",
                reason,
                "Give a list for each text, with one label for each token.",
            )
        values = [label for some in values for label in some]
    return Rows(rows, _listed(values, len(tokens), "token"), [], [], tokens.ids, name)


def _listed(labels: Any, rows: int, unit: str) -> list[Any]:
    problem = f"Labels do not fit the {unit}s"
    if isinstance(labels, str | bytes) or not hasattr(labels, "__len__"):
        reason = f"got {type(labels).__name__}"
        raise StatesError(
            f"{rows:,} {unit}s need a list of labels",
            reason,
            f"Give one for each {unit}.",
        )
    values = listed(labels.tolist() if hasattr(labels, "tolist") else labels)
    if len(values) != rows:
        reason = f"there are {rows:,} {unit}s and {len(values):,} labels"
        raise StatesError(problem, reason, f"Give one for each {unit}.")
    for row, label in enumerate(values):
        if label is None or label != label:
            raise StatesError(
                problem, f"the label of {unit} {row} is missing", "Leave that one out."
            )
    return values


def _with_label(rows: Rows) -> Rows:
    """The rows that have a label; a ready one may leave some out."""
    kept = [row for row, label in enumerate(rows.labels) if label is not None]
    if len(kept) == len(rows.labels):
        return rows
    if not kept:
        raise StatesError(
            f"Cannot probe {rows.name}",
            "no token has such a label",
            "Give longer texts.",
        )
    labelled = replace(
        rows, groups=[""] * len(rows.labels), texts=[""] * len(rows.labels)
    ).some(kept)
    return replace(labelled, left_out=len(rows.labels) - len(kept))


def position(tokens: Tokens, task: str) -> list[Any]:
    """The position of a token in its text: the number for a regression, else 0, 1, 2 to
    3, 4 to 7, 8 to 15 and so on.

    A class that occurs in too few texts joins the one before it.
    """
    if task == "regress":
        return [float(place) for place in tokens.positions]
    levels = [int(place).bit_length() for place in tokens.positions]
    texts = defaultdict(set)
    for level, text in zip(levels, tokens.text, strict=True):
        texts[level].add(int(text))
    last = max(
        [level for level in texts if len(texts[level]) >= ENOUGH], default=max(texts)
    )
    names = {0: "0", 1: "1"} | {
        k: f"{2 ** (k - 1):,} to {2**k - 1:,}" for k in range(2, last)
    }
    names[last] = f"from {2 ** (last - 1):,}" if last > 1 else names.get(last, "1")
    return [names[min(level, last)] for level in levels]


def word_start(tokens: Tokens, task: str) -> list[Any]:
    """Whether a token begins a word: at the start of the text, with white space in it
    first, or after white space.
    """
    if tokens.texts is None:
        reason = "only ids were given, and no texts to find words in"
        raise StatesError("No starts of words", reason, "Give texts.")
    labels: list[Any] = []
    for text, (start, end) in zip(tokens.text, tokens.spans, strict=True):
        string = tokens.texts[text]
        before = string[max(0, start - 1) : start]
        begins = start == 0 or string[start : start + 1].isspace() or before.isspace()
        label: Any = (
            float(begins)
            if task == "regress"
            else "begins a word"
            if begins
            else "goes on"
        )
        labels.append(None if start < 0 or start == end else label)
    return labels


def previous_token(tokens: Tokens, task: str) -> list[Any]:
    """The token before: the most frequent ones are classes, all others are one more
    class.

    A token whose neighbour is not here, at the start of a text or of a window or where
    tokens were left out, has none.
    """
    if task == "regress":
        raise StatesError(
            "Cannot regress the previous token", "it is a class", 'Use task="classify".'
        )
    follows = (np.diff(tokens.text) == 0) & (np.diff(tokens.positions) == 1)
    neighbours = zip(tokens.ids[:-1].tolist(), follows, strict=True)
    before = [None, *(token if near else None for token, near in neighbours)][
        : len(tokens)
    ]
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
    targets: torch.Tensor, rows: Rows, folds: Ints, seed: int
) -> torch.Tensor | None:
    """Targets that mean nothing, with the frequencies of the true ones (Hewitt and
    Liang 2019).

    Tokens get one target drawn for each token id. Texts get the true targets permuted
    within their fold, which so keeps its share of every class: otherwise a class that
    is rare in a fold is frequent outside it, and a probe that learns that is wrong more
    often than by chance. Texts that belong together do so here too
    (`measures.permutations`). The same rows in another order have the same control.
    None where only the true targets come of it.
    """
    for attempt in range(ATTEMPTS):
        drawn = _drawn_control(targets, rows, folds, seed + attempt * NEXT_SEED)
        if not same_labelling(targets, drawn):
            return drawn
    return None


def _drawn_control(
    targets: torch.Tensor, rows: Rows, folds: Ints, seed: int
) -> torch.Tensor:
    if rows.token_ids is None:
        labellings = permuted(
            targets, 1, seed, rows.groups, folds, rows.texts
        ).labellings
        return labellings[-1]
    ranked = targets.sort().values
    kinds, which = np.unique(rows.token_ids, return_inverse=True)
    places = [hashed(f"type {kind}", seed) * len(ranked) >> 64 for kind in kinds]
    return ranked[torch.tensor(places)[torch.from_numpy(which.reshape(-1))]]

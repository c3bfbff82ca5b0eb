"""Labels: what a probe predicts, one per text or per token.

They are given by the user, ready-made (`READY`), or drawn as a control.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from hiddenscope.errors import StatesError, TextError
from hiddenscope.linear.crossvalidation import stable_hash
from hiddenscope.measures.permutations import permuted, same_labelling
from hiddenscope.model import Model
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable, Tokens
from hiddenscope.states.arrays import Ints
from hiddenscope.states.pool import Pool
from hiddenscope.states.pooling import SINKLESS, score_pooling
from hiddenscope.texts import Belonging, Labelled, as_list, read
from hiddenscope.vectors import Vectors, vectors
from hiddenscope.vectors.dataset import (
    Dataset,
    dataset_of,
    labels_of_states,
    refuse_missing,
    texts_of_rows,
    without_labels,
)

ReadyLabel: TypeAlias = str | float | None

# Datasets whose tokens are probed where no texts are given.
SHIPPED = ("cities-complete", "cities-incomplete")
# Previous tokens that are classes of their own, and the class of all others.
FREQUENT = 9
OTHER = "(another)"
# Texts in which a class of a ready-made label must occur.
MIN_TEXTS = 5
# How often control labels are drawn until they differ from the true ones, and how far
# the seeds of two such attempts are apart: other controls use the seeds between them.
ATTEMPTS = 20
SEED_STEP = 1_000_003


@dataclass(frozen=True, eq=False)
class Rows(Vectors):
    """What is probed: vectors with a label for each row.

    `text_names` and `groups` name the text of each row and its group, as `belonging`
    has them. `left_out` is the number of tokens without a label. `scored` has states
    `[site, token, width]` of each text, if the scores of its tokens are pooled.
    """

    labels: list[Any]
    name: str
    groups: list[str]
    text_names: list[str]
    left_out: int
    belonging: Belonging
    scored: list[torch.Tensor] | None = None

    @property
    def unit(self) -> str:
        """Return what is taken as independent of others, in words."""
        return "group of texts" if self.belonging.grouped else "text"

    @property
    def keys(self) -> set[str]:
        """Return the keys of all texts, but of vectors whose texts are not known."""
        keys = {name.partition("\0")[0] for name in self.text_names}
        return {key for key in keys if not key.startswith("[-")}

    def select(self, rows: Sequence[int]) -> "Rows":
        """Return some of the rows."""
        return replace(
            self,
            values=self.values[:, rows],
            tokens=None if self.tokens is None else self.tokens.select(rows),
            labels=[self.labels[row] for row in rows],
            groups=[self.groups[row] for row in rows],
            text_names=[self.text_names[row] for row in rows],
            scored=self.scored and [self.scored[row] for row in rows],
        )


def labelled_rows(
    source: Model | Readable | Pair,
    data: Any,
    task: str,
    sites: SitePatterns,
    pool: Pooling | None,
) -> Rows:
    """Read vectors and labels from a model and a dataset, or from states and labels.

    A copy of a text with the same labels says nothing new, and is left out.
    """
    pools_scores = score_pooling(pool) is not None
    vector_pool = None if pools_scores else pool
    if isinstance(source, Model):
        dataset = _token_dataset(data) if pool is None else _text_dataset(data)
        rows = vectors(source, dataset.texts, sites=sites, pool=vector_pool)
    else:
        dataset = Dataset(None, data, "the labels")
        # Of tokens a string names ready labels; of texts it is a path.
        if pool is not None or not isinstance(data, str):
            dataset = labels_of_states(source, data)
        rows = vectors(source, sites=sites, pool=vector_pool)
        if isinstance(source, Pair):
            is_decoder = rows.sites[0].stack == "decoder"
            source = source.decoder if is_decoder else source.encoder
        dataset = replace(dataset, texts=source.tokens)
    scored = None
    if pools_scores and rows.tokens is not None:
        lengths = rows.tokens.lengths
        scored = list(torch.split(rows.values, lengths.tolist(), 1))
        rows = replace(rows, values=Pool(lengths, SINKLESS)(rows.values), tokens=None)
    if rows.tokens is None:
        labels = _checked_labels(dataset.labels, rows.values.shape[1], "text")
    else:
        labels = _token_labels(rows.tokens, dataset.labels, task)
    # Ready-made labels may leave some tokens out.
    labelled = [row for row, label in enumerate(labels) if label is not None]
    if not labelled:
        raise StatesError(
            f"Cannot probe {dataset.name}",
            "no token has such a label",
            "Give longer texts.",
        )
    text_of, belonging = texts_of_rows(rows, dataset, labels)
    whole = Rows(
        **vars(rows),
        labels=labels,
        name=dataset.name,
        groups=[belonging.groups[text] for text in text_of],
        text_names=[belonging.texts[text] for text in text_of],
        left_out=len(labels) - len(labelled),
        belonging=belonging,
        scored=scored,
    )
    first = [row for row in labelled if belonging.first[text_of[row]]]
    return whole if len(first) == len(labels) else whole.select(first)


def _text_dataset(data: object) -> Dataset:
    """Return texts with one label each."""
    dataset = dataset_of(data)
    if dataset.labels is None:
        raise without_labels(dataset, f"Cannot probe {dataset.name}")
    return dataset


def _token_dataset(data: object) -> Dataset:
    """Return texts with a label for each token, or with the name of ready-made ones."""
    if isinstance(data, str) and data in READY:
        shipped: list[str] = []
        for name in SHIPPED:
            shipped += read(name).texts
        return Dataset(shipped, data, f"{data} of tokens")
    if not isinstance(data, tuple) or len(data) != 2:
        remedy = (
            "Give (texts, labels) with a list of labels for each text, or (texts,"
            f" name) with {', '.join(READY)}."
        )
        raise TextError(
            "A probe of each token needs a label for each token",
            "there is none",
            remedy,
        )
    texts, labels = data
    name = f"{labels} of tokens" if isinstance(labels, str) else "the labels"
    if isinstance(texts, Labelled):
        name = f"{name} of {texts.name}"
        return Dataset(list(texts.texts), labels, name, texts.groups)
    rows = as_list(texts)
    if rows and isinstance(rows[0], str):
        rows = list(read(rows).texts)
    return Dataset(rows, labels, name)


def _token_labels(tokens: Tokens, labels: Any, task: str) -> list[Any]:
    """Label each token, from a flat list, a list per text, or a ready-made label."""
    if isinstance(labels, str):
        if labels not in READY:
            raise StatesError(
                f"No ready label {labels[:40]!r}",
                "there are three ready labels",
                f"Use one of {', '.join(READY)}.",
            )
        return READY[labels](tokens, task)
    values = _listed(labels)
    is_flat = not values or isinstance(values[0], str)
    if is_flat or not isinstance(values[0], Sequence | np.ndarray):
        return _checked_labels(values, len(tokens), "token")
    # One list of labels per text, which must be as long as the text.
    lengths = [len(of_text) for of_text in values]
    if lengths != tokens.lengths.tolist():
        reason = f"there are {len(lengths)} lists for {tokens.count} texts"
        pairs = zip(lengths, tokens.lengths, strict=False)
        for text, (length, expected) in enumerate(pairs):
            if length != expected:
                reason = f"text {text} has {expected} tokens and {length} labels"
                break
        raise StatesError(
            "Labels do not fit the tokens",
            reason,
            "Give a list for each text, with one label for each token.",
        )
    flat: list[Any] = []
    for of_text in values:
        flat += list(of_text)
    return _checked_labels(flat, len(tokens), "token")


def _listed(labels: Any) -> list[Any]:
    return as_list(labels.tolist() if hasattr(labels, "tolist") else labels)


def _checked_labels(labels: object, rows: int, unit: str) -> list[Any]:
    """Return a list with one label per row, none of them missing."""
    problem = f"Labels do not fit the {unit}s"
    if isinstance(labels, str | bytes) or not hasattr(labels, "__len__"):
        raise StatesError(
            f"{rows:,} {unit}s need a list of labels",
            f"got {type(labels).__name__}",
            f"Give one for each {unit}.",
        )
    values = _listed(labels)
    if len(values) != rows:
        reason = f"there are {rows:,} {unit}s and {len(values):,} labels"
        raise StatesError(problem, reason, f"Give one for each {unit}.")
    refuse_missing(values, problem, unit)
    return values


def position(tokens: Tokens, task: str) -> list[ReadyLabel]:
    """Return the position of each token: the number itself for a regression.

    Classes are 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on. The last class is open: it
    takes in what occurs in too few texts for a class of its own.
    """
    if task == "regress":
        return [float(place) for place in tokens.positions]
    levels = [int(place).bit_length() for place in tokens.positions]
    texts = _text_counts(levels, tokens)
    frequent = [level for level in texts if texts[level] >= MIN_TEXTS]
    last = max(frequent, default=max(texts))
    names = {0: "0", 1: "1"}
    for level in range(2, last + 1):
        names[level] = f"{2 ** (level - 1):,} to {2**level - 1:,}"
    if last > 1:
        names[last] = f"from {2 ** (last - 1):,}"
    return [names[min(level, last)] for level in levels]


def _text_counts(values: Sequence[int | None], tokens: Tokens) -> Counter[Any]:
    """Return the number of texts in which each value occurs."""
    pairs = set(zip(values, tokens.text.tolist(), strict=True))
    return Counter(value for value, _ in pairs)


def word_start(tokens: Tokens, task: str) -> list[ReadyLabel]:
    """Return whether each token begins a word.

    It does at the start of a text, if it begins with white space, or after white space.
    Tokens that cover no characters have no label.
    """
    if tokens.texts is None:
        reason = "only ids were given, and no texts to find words in"
        raise StatesError("No starts of words", reason, "Give texts.")
    begins: ReadyLabel = "begins a word"
    continues: ReadyLabel = "goes on"
    if task == "regress":
        begins, continues = 1.0, 0.0
    labels: list[ReadyLabel] = []
    for text, (start, end) in zip(tokens.text, tokens.spans, strict=True):
        if start < 0 or start == end:
            labels.append(None)
            continue
        around = tokens.texts[text][max(0, start - 1) : start + 1]
        if start == 0 or any(character.isspace() for character in around):
            labels.append(begins)
        else:
            labels.append(continues)
    return labels


def previous_token(tokens: Tokens, task: str) -> list[ReadyLabel]:
    """Return the token before: the most frequent ones are classes, others share one.

    A token has no label where its neighbour is missing: at the start of a text or of a
    window, or where tokens were left out.
    """
    if task == "regress":
        raise StatesError(
            "Cannot regress the previous token", "it is a class", 'Use task="classify".'
        )
    previous: list[int | None] = [None] * len(tokens)
    adjacent = (np.diff(tokens.text) == 0) & (np.diff(tokens.positions) == 1)
    for row in np.flatnonzero(adjacent).tolist():
        previous[row + 1] = int(tokens.ids[row])
    counts = Counter(token for token in previous if token is not None)
    texts = _text_counts(previous, tokens)
    strings = dict(zip(tokens.ids.tolist(), tokens.strings, strict=True))
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    frequent = [token for token in ranked if texts[token] >= MIN_TEXTS]
    names: dict[int | None, str | None] = {None: None}
    for token in frequent[:FREQUENT]:
        names[token] = f"{strings[token]!r}"
    return [names.get(token, OTHER) for token in previous]


READY: Mapping[str, Callable[[Tokens, str], list[ReadyLabel]]] = {
    "position": position,
    "word-start": word_start,
    "previous-token": previous_token,
}


def control(
    targets: torch.Tensor, rows: Rows, folds: Ints, seed: int
) -> torch.Tensor | None:
    """Draw meaningless targets as frequent as the true ones (Hewitt and Liang 2019).

    Tokens get one target drawn for each token id. Texts get the true targets permuted
    within their fold, which keeps its share of every class: otherwise a class that is
    rare in a fold is frequent outside it, and a probe that learns that is wrong more
    often than by chance. The control does not depend on the order of the rows. Return
    None if only the true targets come of it.
    """
    ordered = targets.sort().values
    for attempt in range(ATTEMPTS):
        attempt_seed = seed + attempt * SEED_STEP
        if rows.tokens is None:
            permutations = permuted(
                targets, 1, attempt_seed, rows.groups, folds, rows.text_names
            )
            drawn = permutations.labellings[-1]
        else:
            token_types, type_of = np.unique(rows.tokens.ids, return_inverse=True)
            places = []
            for token_type in token_types:
                # A hash below 2**64 becomes an index below the number of rows.
                hashed = stable_hash(f"type {token_type}", attempt_seed)
                places.append(hashed * len(ordered) >> 64)
            drawn = ordered[torch.tensor(places)[torch.from_numpy(type_of.reshape(-1))]]
        if not same_labelling(targets, drawn):
            return drawn
    return None

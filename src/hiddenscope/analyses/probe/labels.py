"""Labels: what a probe is to read off, one a text or one a token; given, ready-made, or drawn as a control."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.errors import StatesError, TextError
from hiddenscope.linear.crossvalidation import hashed
from hiddenscope.model import Model
from hiddenscope.states import Pair, Readable, Tokens
from hiddenscope.texts import read
from hiddenscope.vectors import Token, Vectors, vectors

Ints: TypeAlias = NDArray[np.int64]

AT_HAND = ("cities-complete", "cities-incomplete")  # whose tokens are probed where no texts are given
FREQUENT = 9  # how many previous tokens are classes of their own
OTHER = "(another)"
ENOUGH = 5  # texts in which a class of a ready label is to be found


@dataclass(frozen=True, eq=False)
class Given:
    """What is probed: vectors with a label a row, what each row belongs to and, of tokens, what each is.

    `groups` names the text of each row by what it says, so that no text is both learnt from and tested on.
    """

    vectors: Vectors
    labels: list[Any]
    groups: list[str]
    types: Ints | None
    name: str
    left_out: str = ""


def given(
    source: Any, data: Any, task: str, sites: Any, token: Token, text: str | None, label: str | None, truncate: bool
) -> Given:
    """Vectors and labels from a model and a dataset, or from states and labels."""
    if isinstance(source, Model):
        texts, labels, name = _dataset(data, token, text, label)
        made = vectors(source, texts, sites=sites, token=token, truncate=truncate)
        groups = [str(one) for one in texts]
    else:
        if text is not None or label is not None:
            reason = "states have no columns"
            raise StatesError("A probe of states", reason, "Leave text= and label= out, and give the labels.")
        made, labels, name = vectors(source, sites=sites, token=token), data, "the labels given"
        groups = _texts(_tokens(source, made))
    if made.tokens is None:
        return Given(made, _listed(labels, made.values.shape[1], "text"), groups, None, name)
    return _each(made, labels, groups, name, task)


def _dataset(data: Any, token: Token, text: str | None, label: str | None) -> tuple[Sequence[Any], Any, str]:
    """Texts, labels (or the name of ready ones), and what they are called."""
    if token == "each":
        if isinstance(data, str) and data in READY:
            return [one for name in AT_HAND for one in read(name).texts], data, f"{data} of tokens"
        if label in READY:
            found = read(data, text=text)
            return found.texts, label, f"{label} of tokens of {found.name}"
        if isinstance(data, tuple) and len(data) == 2:
            texts = list(data[0])
            name = f"{data[1]} of tokens" if isinstance(data[1], str) else "the labels given"
            return (read(texts).texts if texts and isinstance(texts[0], str) else texts), data[1], name
        remedy = f"Give (texts, labels), with a list of labels a text, or one of {', '.join(READY)}."
        raise TextError("A probe of each token", "there is no label a token", remedy)
    if isinstance(data, tuple) and len(data) == 2 and len(data[0]) and not isinstance(data[0][0], str):
        return list(data[0]), data[1], "the labels given"  # texts as ids, which no file holds
    found = read(data, text=text, label=label)
    if found.labels is None:
        remedy = 'Name their column: label="...", or give (texts, labels).'
        raise TextError(f"A probe of {found.name}", "its texts have no labels", remedy)
    return found.texts, found.labels, found.name


def _tokens(source: Readable | Pair, made: Vectors) -> Tokens:
    if isinstance(source, Pair):
        return (source.decoder if made.sites[0].stack == "decoder" else source.encoder).tokens
    return source.tokens


def _texts(tokens: Tokens) -> list[str]:
    """What each text says, or the ids it is made of."""
    if tokens.texts is not None:
        return list(tokens.texts)
    return [str(tokens.ids[tokens.rows(text)].tolist()) for text in range(tokens.count)]


def _each(made: Vectors, labels: Any, groups: list[str], name: str, task: str) -> Given:
    """A label a token: given flat or as a list a text, or ready-made."""
    tokens = made.tokens
    assert tokens is not None  # a row is a token
    own = [groups[text] for text in tokens.text]
    if isinstance(labels, str):
        if labels not in READY:
            raise StatesError(f"No ready label {labels[:40]!r}", "there are three", f"Ask for {', '.join(READY)}.")
        return _kept(Given(made, READY[labels](tokens, task), own, tokens.ids, name))
    listed = list(labels.tolist() if hasattr(labels, "tolist") else labels)
    nested = bool(listed) and isinstance(listed[0], Sequence | np.ndarray) and not isinstance(listed[0], str)
    if nested:
        lengths = [len(one) for one in listed]
        if lengths != tokens.lengths.tolist():
            wrong = next((k for k, (a, b) in enumerate(zip(lengths, tokens.lengths, strict=False)) if a != b), None)
            reason = f"there are {len(lengths)} lists for {tokens.count} texts"
            if wrong is not None:
                reason = f"text {wrong} has {tokens.lengths[wrong]} tokens, and {lengths[wrong]} labels"
            raise StatesError("A label a token", reason, "Give a list a text, with one label a token of it.")
        listed = [one for some in listed for one in some]
    return Given(made, _listed(listed, len(tokens), "token"), own, tokens.ids, name)


def _listed(labels: Any, rows: int, what: str) -> list[Any]:
    if isinstance(labels, str | bytes) or not hasattr(labels, "__len__"):
        reason = f"the labels are {type(labels).__name__}"
        raise StatesError(f"Labels of {rows:,} {what}s", reason, f"Give one a {what}, in a list or an array.")
    listed = list(labels.tolist() if hasattr(labels, "tolist") else labels)
    if len(listed) != rows:
        raise StatesError(f"Labels of {rows:,} {what}s", f"there are {len(listed):,}", f"Give one a {what}.")
    for row, one in enumerate(listed):
        if one is None or one != one:
            raise StatesError(f"Labels of {rows:,} {what}s", f"that of {what} {row} is missing", "Leave it out.")
    return listed


def _kept(found: Given) -> Given:
    """The rows that have a label; a ready one may leave some out."""
    rows = [row for row, one in enumerate(found.labels) if one is not None]
    if len(rows) == len(found.labels):
        return found
    if not rows:
        raise StatesError(f"A probe of {found.name}", "no token has such a label", "Give longer texts.")
    assert found.vectors.tokens is not None
    assert found.types is not None
    some = replace(found.vectors, values=found.vectors.values[:, rows], tokens=found.vectors.tokens.select(rows))
    labels, groups = ([part[row] for row in rows] for part in (found.labels, found.groups))
    out = f"{len(found.labels) - len(rows):,} of {len(found.labels):,} tokens, which have no such label"
    return Given(some, labels, groups, found.types[rows], found.name, out)


def position(tokens: Tokens, task: str) -> list[Any]:
    """Where a token stands in its text: the number for a regression, else 0, 1, 2-3, 4-7, 8-15 and so on.

    A class that stands in too few texts joins the one before it.
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
    """Whether a token begins a word: it begins the text, holds white space first, or stands after white space."""
    if tokens.texts is None:
        reason = "only ids were given, and no texts to find words in"
        raise StatesError("The starts of words", reason, "Give texts.")
    made: list[Any] = []
    for text, (start, end) in zip(tokens.text, tokens.spans, strict=True):
        said = tokens.texts[text]
        before = said[max(0, start - 1) : start]
        begins = start == 0 or said[start : start + 1].isspace() or before.isspace()
        made.append(None if start < 0 or start == end else float(begins) if task == "regress" else _word(begins))
    return made


def _word(begins: bool) -> str:
    return "begins a word" if begins else "goes on"


def previous_token(tokens: Tokens, task: str) -> list[Any]:
    """Which token came before: the most frequent ones are classes, all others are one class more."""
    if task == "regress":
        raise StatesError("The previous token as a number", "it is a class", 'Ask for task="classify".')
    before = [
        None if row == 0 or tokens.text[row - 1] != tokens.text[row] else int(tokens.ids[row - 1])
        for row in range(len(tokens))
    ]
    counts = Counter(one for one in before if one is not None)
    texts = defaultdict(set)
    for one, text in zip(before, tokens.text, strict=True):
        texts[one].add(int(text))
    strings = dict(zip(tokens.ids.tolist(), tokens.strings, strict=True))
    ranked = sorted(counts, key=lambda one: (-counts[one], one))
    chosen = [one for one in ranked if len(texts[one]) >= ENOUGH][:FREQUENT]
    names = {one: f"{strings[one]!r}" for one in chosen}
    return [None if one is None else names.get(one, OTHER) for one in before]


READY: Mapping[str, Callable[[Tokens, str], list[Any]]] = {
    "position": position,
    "word-start": word_start,
    "previous-token": previous_token,
}


def control(targets: torch.Tensor, groups: Sequence[str], folds: Ints, types: Ints | None, seed: int) -> torch.Tensor:
    """Targets that say nothing, as often as the true ones: shuffled among texts, or one drawn for each type of token.

    Texts are shuffled within each fold, which so keeps its share of every class: otherwise a class that is rare in a
    fold is frequent outside it, and what is learnt there is wrong more often than by chance. The same rows in another
    order have the same control.
    """
    ranked = targets.sort().values
    if types is None:
        random, made = np.random.default_rng(seed), torch.empty_like(targets)
        for fold in range(int(folds.max()) + 1):
            rows = np.flatnonzero(folds == fold).tolist()
            order = torch.tensor(sorted(rows, key=lambda row: (groups[row], float(targets[row]))))
            made[order] = targets[order][torch.from_numpy(random.permutation(len(rows)))]
        return made
    kinds, which = np.unique(types, return_inverse=True)
    places = [hashed(f"type {kind}", seed) * len(ranked) >> 64 for kind in kinds]
    return ranked[torch.tensor(places)[torch.from_numpy(which.reshape(-1))]]

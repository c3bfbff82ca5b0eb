"""Datasets: what a caller may give as texts, or as labelled texts.

>>> dataset_of(([[5, 6], [7]], ["a", "b"])).labels
['a', 'b']
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiddenscope import texts as reader
from hiddenscope.errors import StatesError, TextError
from hiddenscope.passes import Inputs
from hiddenscope.states import Pair, Readable, Tokens
from hiddenscope.texts import Belonging, Labelled, belonging
from hiddenscope.vectors.vectors import Vectors


@dataclass(frozen=True)
class Dataset:
    """Texts (strings, ids or Inputs) and their name, labels and groups if any."""

    texts: Any
    labels: Any
    name: str
    groups: tuple[Any, ...] | None = None
    header: str = ""


def dataset_of(data: Any) -> Dataset:
    """Read a dataset from whatever `hs.read` takes, or from `(texts, labels)`.

    Of such a pair, the texts may be ids or Inputs; with Inputs, what `hs.read` gave may
    stand for the labels.
    """
    if isinstance(data, tuple) and len(data) == 2:
        texts, labels = data
        if isinstance(texts, Inputs) and isinstance(labels, Labelled):
            return replace(dataset_of(labels), texts=texts)
        if isinstance(texts, Inputs):
            return Dataset(texts, labels, "the texts")
        if isinstance(texts, range) or (len(texts) and not isinstance(texts[0], str)):
            return Dataset(reader.as_list(texts), labels, "the texts")
    labelled = data if isinstance(data, Labelled) else reader.read(data)
    return Dataset(**vars(labelled) | {"texts": list(labelled.texts)})


def without_labels(dataset: Dataset, problem: str) -> TextError:
    """Return the error for texts that must have labels, with the columns they have."""
    reason = "its texts have no labels"
    remedy = "Give (texts, labels), or a file with a column of labels."
    if dataset.header:
        reason += f", and its columns are {dataset.header}"
        remedy = 'Name the one with the labels: hs.read(path, label="...").'
    return TextError(problem, reason, remedy)


def texts_of(data: Any) -> Any:
    """Read texts from a path, an open file, a frame or a Hugging Face dataset.

    Strings, ids and Inputs are returned as they are.

    >>> texts_of(["a cat", "a dog"])
    ['a cat', 'a dog']
    """
    if isinstance(data, Labelled):
        return list(data.texts)
    if isinstance(data, Inputs):
        return data
    if isinstance(data, str):
        is_table = reader.names_a_file(data) and os.path.isfile(data)
    else:
        is_table = _is_table(data)
    if is_table:
        return list(reader.read(data).texts)
    return data


def _is_table(data: Any) -> bool:
    """Tell a path, an open file, a frame and a Hugging Face dataset from a list."""
    marks = ("read", "columns", "column_names")
    return isinstance(data, str | os.PathLike) or any(
        hasattr(data, name) for name in marks
    )


def strings_of(texts: Any) -> Sequence[Any]:
    """Return each text in a form that can be compared: its string, or its ids."""
    if isinstance(texts, Tokens):
        return texts.contents
    if isinstance(texts, Inputs):
        return texts.texts or texts.ids
    return list(texts)


def texts_of_rows(
    rows: Vectors, dataset: Dataset, labels: Sequence[Any]
) -> tuple[list[int], Belonging]:
    """Return the text of each row, and which texts belong together.

    `labels` has one for each row; None does not count.
    """
    strings = strings_of(dataset.texts)
    text_of = list(range(len(strings)))
    if rows.tokens is not None:
        text_of = rows.tokens.text.tolist()
    by_text: list[list[Any]] = [[] for _ in strings]
    for text, label in zip(text_of, labels, strict=True):
        if label is not None:
            by_text[text].append(label)
    return text_of, belonging(strings, by_text, dataset.groups)


def refuse_missing(labels: Iterable[Any], problem: str, unit: str) -> None:
    """Raise StatesError if one of the labels is missing."""
    for number, label in enumerate(labels):
        # A NaN, as frames have it for a missing label, differs from itself.
        if label is None or label != label:
            reason = f"the label of {unit} {number} is missing"
            raise StatesError(problem, reason, "Leave that one out.")


def labels_of_states(states: Readable | Pair, data: Any) -> Dataset:
    """Return the texts of states with their labels and groups, in their order.

    Labels in a list are taken as they are. Those of labelled texts, or of what
    `hs.read` makes such texts of, must be of the same texts: as many, and equal as far
    as the states have kept them. A store may hold only some texts of a corpus; these
    are found by their numbers.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model, tiny_tokenizer
    >>> states = load((tiny_model("gpt2"), tiny_tokenizer())).capture(["a b", "c d"])
    >>> labels_of_states(states, Labelled(("a b", "c d"), (0, 1), "letters")).labels
    (0, 1)
    """
    readable = states.encoder if isinstance(states, Pair) else states
    tokens = readable.tokens
    if _is_table(data):
        data = reader.read(data)
    if not isinstance(data, Labelled):
        return Dataset(tokens, data, "the labels")
    numbers: Sequence[int] = range(tokens.count)
    # The numbers of its texts in the corpus, which only a store knows.
    stored = getattr(readable, "texts", None)
    if stored is not None and len(data) != tokens.count:
        numbers = [int(number) for number in stored]
    # Refuse a file of other texts: its labels would not belong to these states.
    problem = f"The texts of {data.name[:80]} are not those of the states"
    remedy = "Give the file that they were made of."
    needed = 1 + max(numbers, default=-1)
    if needed > len(data) or (tokens.texts is None and needed < len(data)):
        reason = f"it has {len(data):,} texts, and the states are of {needed:,}"
        raise TextError(problem, reason, remedy)
    for number, text in zip(numbers, tokens.texts or (), strict=False):
        if data.texts[number] != text:
            raise TextError(problem, f"text {number:,} differs", remedy)
    columns = []
    for column in (data.labels, data.groups):
        if column is not None:
            column = tuple(column[number] for number in numbers)
        columns.append(column)
    labels, groups = columns
    return Dataset(tokens, labels, data.name, groups)

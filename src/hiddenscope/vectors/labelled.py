"""Labels of states: read from the labelled texts that the states were made of, and from
no others.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from hiddenscope.errors import TextError
from hiddenscope.states import Pair
from hiddenscope.texts import Labelled


def labels_of_states(states: Any, data: Labelled) -> Labelled:
    """Choose the labels and groups of the texts of states, one for each, in their
    order.

    A store may hold some texts of a corpus only; those are found by their numbers.
    Texts that were kept are compared.

    >>> from hiddenscope.model import load
    >>> from hiddenscope.testing import tiny_model, tiny_tokenizer
    >>> states = load((tiny_model("gpt2"), tiny_tokenizer())).capture(["a b", "c d"])
    >>> labels_of_states(states, Labelled(("a b", "c d"), (0, 1), "letters")).labels
    (0, 1)
    """
    if data.labels is None:
        raise TextError(
            f"No labels in {data.name[:80]}",
            "it has texts alone",
            "Name the column of its labels.",
        )
    part = states.encoder if isinstance(states, Pair) else states
    numbers = _numbers(part)
    _check_texts(data, numbers, part.tokens.texts)
    texts = tuple(data.texts[number] for number in numbers)
    labels = tuple(data.labels[number] for number in numbers)
    groups = (
        None
        if data.groups is None
        else tuple(data.groups[number] for number in numbers)
    )
    return Labelled(texts, labels, data.name, groups)


def _numbers(part: Any) -> list[int]:
    """The numbers of the texts in the corpus; a store that is not complete lacks some."""
    numbers = getattr(part, "texts", None)
    return (
        list(range(part.tokens.count))
        if numbers is None
        else [int(number) for number in numbers]
    )


def _check_texts(
    data: Labelled, numbers: Sequence[int], texts: Iterable[str] | None
) -> None:
    """Refuse a file of other texts: its labels would be those of others."""
    problem = f"The texts of {data.name[:80]} are not those of the states"
    remedy = "Give the file that they were made of."
    if numbers and numbers[-1] >= len(data):
        reason = f"it has {len(data):,} texts, and the states text {numbers[-1]:,}"
        raise TextError(problem, reason, remedy)
    for number, text in zip(numbers, texts or (), strict=texts is not None):
        if data.texts[number] != text:
            raise TextError(problem, f"text {number:,} differs", remedy)

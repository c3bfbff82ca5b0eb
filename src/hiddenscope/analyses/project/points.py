"""Points: the vectors of a dataset in a model, with their classes; and whether the
model predicts the labels itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hiddenscope.errors import PassError, StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, Pooling, Readable, Source, Tokens
from hiddenscope.texts import Belonging, Labelled, belonging, listed
from hiddenscope.vectors import Vectors, vectors
from hiddenscope.vectors.dataset import Dataset, dataset_of, strings_of

AT_ONCE = 64  # texts whose logits are computed at a time


@dataclass(frozen=True)
class Classes:
    """The class of every point: `codes` index `names`, which are in the order of their
    first point.
    """

    names: tuple[str, ...]
    codes: Tensor

    @classmethod
    def of(cls, labels: Sequence[Any]) -> "Classes":
        """From one label for each point."""
        strings = [_as_string(label) for label in labels]
        names = tuple(dict.fromkeys(strings))
        indices = {name: index for index, name in enumerate(names)}
        if len(names) == len(strings) > 1:
            reason = (
                f"all {len(strings):,} labels are different, so no class has two points"
            )
            raise StatesError(
                "No classes", reason, "Give labels that several points share, or none."
            )
        return cls(names, torch.tensor([indices[string] for string in strings]))

    @property
    def counts(self) -> dict[str, int]:
        """The number of points of each class."""
        return dict(zip(self.names, torch.bincount(self.codes).tolist(), strict=True))

    @property
    def labels(self) -> list[str]:
        """The name of every point's class."""
        return [self.names[code] for code in self.codes.tolist()]


@dataclass(frozen=True, eq=False)
class Points:
    """The vectors `[site, point, width]` of one dataset in one model, and what is known
    of each point.

    `text_of` is the number of each point's text, and `belonging` says which texts
    belong together.
    """

    model: str
    dataset: str
    sites: tuple[Site, ...]
    values: Tensor
    classes: Classes | None
    texts: tuple[str, ...] | None
    tokens: Tokens | None
    text_of: Sequence[int]
    belonging: Belonging
    source: Source | Mapping[str, Any]

    def __len__(self) -> int:
        return self.values.shape[1]

    @property
    def scored(self) -> list[int]:
        """The points that count: a text that came before with the same label tells
        nothing new.
        """
        return [
            row for row, text in enumerate(self.text_of) if self.belonging.first[text]
        ]

    def names(self, rows: Sequence[int]) -> tuple[list[str], list[str]]:
        """The group and the text of some points."""
        texts = [self.text_of[row] for row in rows]
        return [self.belonging.groups[text] for text in texts], [
            self.belonging.texts[text] for text in texts
        ]

    @property
    def strings(self) -> list[str]:
        """What stands for a point in words: its text, or its token."""
        if self.tokens is not None:
            return list(self.tokens.strings)
        return (
            list(self.texts)
            if self.texts is not None
            else [f"text {row}" for row in range(len(self))]
        )


def _as_string(label: Any) -> str:
    if label is None or (isinstance(label, float) and label != label):
        raise StatesError(
            "A label is missing",
            "every point needs one",
            "Give one for every point, or none at all.",
        )
    if hasattr(label, "item"):
        label = label.item()
    return (
        str(int(label))
        if isinstance(label, float) and label.is_integer()
        else str(label)
    )


def datasets_of(data: Any) -> dict[str, Dataset]:
    """One dataset, or several in a mapping of names."""
    if isinstance(data, Mapping):
        if not data:
            raise TextError("No datasets", "the mapping is empty", "Give at least one.")
        return {str(name): dataset_of(one) for name, one in data.items()}
    dataset = dataset_of(data)
    return {dataset.name: dataset}


def points_of_models(
    models: Sequence[Model],
    datasets: Mapping[str, Dataset],
    sites: SitePatterns,
    pool: Pooling | None,
    truncate: bool,
) -> Iterator[Points]:
    """The points of every dataset in every model."""
    names = [model.name for model in models]
    for number, model in enumerate(models):
        name = (
            f"{model.name} ({names[:number].count(model.name) + 1})"
            if model.name in names[:number]
            else model.name
        )
        for dataset_name, dataset in datasets.items():
            rows = vectors(
                model, dataset.texts, sites=sites, pool=pool, truncate=truncate
            )
            yield _points(rows, (name, dataset_name), dataset)


def points_of_states(
    source: Readable | Pair, labels: Any, sites: SitePatterns, pool: Pooling | None
) -> Points:
    """The points of states, with one label for each text or for each token."""
    groups = None
    if isinstance(labels, Labelled):
        labels, groups = labels.labels, labels.groups
    values = None if labels is None else _listed(labels)
    if isinstance(source, Pair):
        tokens = (source.decoder if "decoder" in str(sites) else source.encoder).tokens
    else:
        tokens = source.tokens
    if values is not None and len(values) == len(tokens) != tokens.count:
        pool = None  # one label for each token means that tokens are the points
    rows = vectors(source, sites=sites, pool=pool)
    model = rows.source.model if isinstance(rows.source, Source) else "states"
    return _points(rows, (model, ""), Dataset(tokens, values, "", groups))


def _listed(labels: Any) -> list[Any]:
    if isinstance(labels, str | bytes | Mapping) or not hasattr(labels, "__len__"):
        reason = f"{type(labels).__name__} was given"
        raise StatesError(
            "States need a list of labels",
            reason,
            "Give a list with one label for each text or token.",
        )
    return listed(labels)


def _points(rows: Vectors, names: tuple[str, str], dataset: Dataset) -> Points:
    """Points of a model and a dataset with these names; labels are per text or token,
    groups per text.
    """
    count, labels = rows.values.shape[1], dataset.labels
    if (
        labels is not None
        and rows.tokens is not None
        and len(labels) == rows.tokens.count != count
    ):
        labels = [labels[text] for text in rows.tokens.text]
    if labels is not None and len(labels) != count:
        reason = (
            f"there are {len(labels):,} labels for {count:,}"
            f" {'texts' if rows.tokens is None else 'tokens'}"
        )
        raise StatesError(
            "Labels do not fit the points",
            reason,
            "Give one label for each text, or for each token.",
        )
    for site, values in zip(rows.sites, rows.values, strict=True):
        if not bool(values.isfinite().all()):
            row = int((~values.isfinite()).any(1).nonzero()[0])
            raise StatesError(
                f"No points at {site}",
                f"row {row} has a NaN or an infinity",
                "Leave that one out.",
            )
    classes = None if labels is None else Classes.of(labels)
    strings = strings_of(dataset.texts)
    text_of = (
        list(range(len(strings))) if rows.tokens is None else rows.tokens.text.tolist()
    )
    by_text: list[list[str]] = [[] for _ in strings]
    for text, label in zip(
        text_of, classes.labels if classes else [""] * count, strict=True
    ):
        by_text[text].append(label)
    found = belonging(strings, by_text, dataset.groups)
    return Points(
        *names,
        rows.sites,
        rows.values,
        classes,
        rows.texts,
        rows.tokens,
        text_of,
        found,
        rows.source,
    )


def label_predictions(model: Model, dataset: Dataset, points: Points) -> int | None:
    """The number of texts whose label is the token that the model predicts next; None
    if that cannot be asked.

    It can be asked of a causal model with a head whose tokenizer has every label as one
    token. The last layer at the last token of each text is among the points already,
    and the model's own norm and head make logits of it.
    """
    anatomy, labels = model.anatomy, dataset.labels
    if (
        labels is None
        or points.texts is None
        or anatomy.head is None
        or len(anatomy.stacks) > 1
    ):
        return None
    tokens = {label: _single_token(model, label) for label in dict.fromkeys(labels)}
    if None in tokens.values() or not anatomy.stacks[0].causal:
        return None
    try:
        (last,) = anatomy.select("layer.-1")
        unembedding = Unembedding(model, last)
        rows = _last_states(model, points, dataset, last)
        predicted: list[int] = [
            token
            for some in torch.split(rows, AT_ONCE)
            for token in (
                unembedding.logits(unembedding.head_inputs(some)).argmax(-1).tolist()
            )
        ]
    except PassError:  # this model cannot be entered at its last layer
        return None
    return sum(
        bool(token == tokens[label])
        for token, label in zip(predicted, labels, strict=True)
    )


def _last_states(model: Model, points: Points, dataset: Dataset, last: Site) -> Tensor:
    """The last layer at the last token of each text, in the model's dtype."""
    if last in points.sites:
        values = points.values[points.sites.index(last)]
    else:
        values = vectors(
            model, dataset.texts, sites=last, pool="last", truncate=True
        ).values[0]
    return values.to(model.device, model.dtype)


def _single_token(model: Model, label: Any) -> int | None:
    """The one token that a label is after a space, as in the middle of a sentence."""
    if not isinstance(label, str) or not label.strip() or model.tokenizer is None:
        return None
    try:
        with model.lock:
            return model.text_encoder.single(
                label if label.startswith(" ") else f" {label}", "label"
            )
    except TextError:
        return None

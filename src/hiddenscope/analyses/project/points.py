"""Points: the vectors of a dataset in a model, with their classes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hiddenscope.errors import PassError, StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results.sentences import distinct
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Pooling, Readable, Source
from hiddenscope.texts import Belonging, Labelled, as_list
from hiddenscope.vectors import Vectors, vectors
from hiddenscope.vectors.dataset import (
    Dataset,
    dataset_of,
    labels_of_states,
    texts_of_rows,
)

# Texts whose logits are computed at a time.
AT_ONCE = 64
# Permutations, up to this many points.
PERMUTATIONS = {500: 999, 5_000: 199}
MIN_PERMUTATIONS = 99


@dataclass(frozen=True)
class Classes:
    """The class of every point: `codes` index `names`, in order of first occurrence."""

    names: tuple[str, ...]
    codes: Tensor

    @classmethod
    def of(cls, labels: Sequence[Any]) -> "Classes":
        """Read one label for each point."""
        strings = list(map(_as_string, labels))
        indices: dict[str, int] = {}
        codes = [indices.setdefault(string, len(indices)) for string in strings]
        if len(indices) == len(strings) > 1:
            reason = (
                f"all {len(strings):,} labels are different, so no class has two points"
            )
            raise StatesError(
                "No classes", reason, "Give labels that several points share, or none."
            )
        return cls(tuple(indices), torch.tensor(codes))

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of points of each class."""
        return dict(zip(self.names, torch.bincount(self.codes).tolist(), strict=True))

    @property
    def labels(self) -> list[str]:
        """Return the name of every point's class."""
        return [self.names[code] for code in self.codes.tolist()]


@dataclass(frozen=True, eq=False)
class Points(Vectors):
    """The vectors `[site, point, width]` of one dataset in one model.

    A point is a text, or a token if there are `tokens`. `text_of` is the number of each
    point's text, and `belonging` says which texts belong together; `named_groups` are
    the groups of texts as the data name them. `predicted` is the number of texts whose
    label the model predicts, if that is known.
    """

    model: str
    dataset: str
    classes: Classes | None
    text_of: Sequence[int]
    belonging: Belonging
    named_groups: Sequence[Any] | None = None
    predicted: int | None = None

    def __len__(self) -> int:
        return self.values.shape[1]

    @property
    def scored(self) -> list[int]:
        """Return the points that count: copies of a text say nothing new."""
        first = self.belonging.first
        return [row for row, text in enumerate(self.text_of) if first[text]]

    def names(self, rows: Sequence[int]) -> tuple[list[str], list[str]]:
        """Return the names of the groups and of the texts of some points."""
        texts = [self.text_of[row] for row in rows]
        group_names = [self.belonging.groups[text] for text in texts]
        text_names = [self.belonging.texts[text] for text in texts]
        return group_names, text_names

    @property
    def strings(self) -> list[str]:
        """Return each point in words: its token, or its text."""
        if self.tokens is not None:
            return list(self.tokens.strings)
        if self.texts is not None:
            return list(self.texts)
        return [f"text {row}" for row in range(len(self))]


def permutation_count(points: int) -> int:
    """Return how often this many points are permuted."""
    counts = [count for most, count in PERMUTATIONS.items() if points <= most]
    return counts[0] if counts else MIN_PERMUTATIONS


def _as_string(label: Any) -> str:
    if label is None or (isinstance(label, float) and label != label):
        raise StatesError(
            "A label is missing",
            "every point needs one",
            "Give one for every point, or none at all.",
        )
    if hasattr(label, "item"):
        label = label.item()
    # 1.0 and 1 name the same class.
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    return str(label)


def datasets_of(data: Any) -> dict[str, Dataset]:
    """Read one dataset, or several: a mapping of names, or a list of what `hs.read`
    gave.
    """
    is_list = isinstance(data, list | tuple) and len(data) > 0
    if is_list and all(isinstance(texts, Labelled) for texts in data):
        names = distinct([texts.name for texts in data])
        data = dict(zip(names, data, strict=True))
    if isinstance(data, Mapping):
        if not data:
            raise TextError("No datasets", "the mapping is empty", "Give at least one.")
        return {str(name): dataset_of(texts) for name, texts in data.items()}
    dataset = dataset_of(data)
    return {dataset.name: dataset}


def points_of_models(
    models: Sequence[Model],
    datasets: Mapping[str, Dataset],
    sites: SitePatterns,
    pool: Pooling | None,
    truncate: bool,
) -> Iterator[Points]:
    """Yield the points of every dataset in every model."""
    counts: Counter[str] = Counter()
    for model in models:
        counts[model.name] += 1
        name = model.name
        if counts[name] > 1:
            name = f"{name} ({counts[name]})"
        for dataset_name, dataset in datasets.items():
            rows = vectors(
                model, dataset.texts, sites=sites, pool=pool, truncate=truncate
            )
            points = _points(rows, (name, dataset_name), dataset)
            if pool == "last":
                predicted = count_label_predictions(model, dataset, points)
                points = replace(points, predicted=predicted)
            yield points


def points_of_states(
    source: Readable | Pair, labels: Any, sites: SitePatterns, pool: Pooling | None
) -> Points:
    """Return the points of states, with one label for each text or for each token."""
    dataset = labels_of_states(source, labels)
    values = dataset.labels
    if values is not None:
        if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
            raise StatesError(
                "States need a list of labels",
                f"{type(values).__name__} was given",
                "Give a list with one label for each text or token.",
            )
        values = as_list(values)
    if isinstance(source, Pair):
        part = source.decoder if "decoder" in str(sites) else source.encoder
        tokens = part.tokens
    else:
        tokens = source.tokens
    if values is not None and len(values) == len(tokens) != tokens.count:
        # One label for each token means that tokens are the points.
        pool = None
    rows = vectors(source, sites=sites, pool=pool)
    model = rows.source.model if isinstance(rows.source, Source) else "states"
    return _points(rows, (model, ""), replace(dataset, texts=tokens, labels=values))


def _points(rows: Vectors, names: tuple[str, str], dataset: Dataset) -> Points:
    """Label the vectors of a model and a dataset with these names."""
    count, tokens = rows.values.shape[1], rows.tokens
    labels = [""] * count
    if dataset.labels is not None:
        labels = dataset.labels
        # One label for each text, or for each point.
        if tokens is not None and len(labels) == tokens.count != count:
            labels = [labels[text] for text in tokens.text]
    if len(labels) != count:
        unit = "texts" if tokens is None else "tokens"
        raise StatesError(
            "Labels do not fit the points",
            f"there are {len(labels):,} labels for {count:,} {unit}",
            "Give one label for each text, or for each token.",
        )
    for site, values in zip(rows.sites, rows.values, strict=True):
        if not values.isfinite().all():
            row = int((~values.isfinite()).any(1).nonzero()[0])
            raise StatesError(
                f"No points at {site}",
                f"row {row} has a NaN or an infinity",
                "Leave that one out.",
            )
    classes = None
    if dataset.labels is not None:
        classes = Classes.of(labels)
        labels = classes.labels
    text_of, belonging = texts_of_rows(rows, dataset, labels)
    model, dataset_name = names
    return Points(
        **vars(rows),
        model=model,
        dataset=dataset_name,
        classes=classes,
        text_of=text_of,
        belonging=belonging,
        named_groups=dataset.groups,
    )


def count_label_predictions(
    model: Model, dataset: Dataset, points: Points
) -> int | None:
    """Count the texts whose label is the token that the model predicts next.

    It is None unless the model is causal with a head, and its tokenizer has every label
    as one token. The last layer at the last token of each text is mostly among the
    points already, and the model's own norm and head make logits of it.
    """
    anatomy, labels = model.anatomy, dataset.labels
    if labels is None or points.texts is None or anatomy.head is None:
        return None
    if len(anatomy.stacks) > 1 or not anatomy.stacks[0].causal:
        return None
    token_of = {label: _single_token(model, label) for label in dict.fromkeys(labels)}
    if None in token_of.values():
        return None
    predicted: list[int] = []
    try:
        (last,) = anatomy.select("layer.-1")
        unembedding = Unembedding(model)
        if last in points.sites:
            rows = points.values[points.sites.index(last)]
        else:
            (rows,) = vectors(
                model, dataset.texts, sites=last, pool="last", truncate=True
            ).values
        rows = rows.to(model.device, model.dtype)
        for logits in unembedding.blocks(rows, last, AT_ONCE):
            predicted += logits.argmax(-1).tolist()
    except PassError:
        # This model cannot be entered at its last layer.
        return None
    pairs = zip(predicted, labels, strict=True)
    return sum(token == token_of[label] for token, label in pairs)


def _single_token(model: Model, label: object) -> int | None:
    """Return the one token of a label after a space, as in the middle of a sentence."""
    if not isinstance(label, str) or not label.strip() or model.tokenizer is None:
        return None
    word = label if label.startswith(" ") else f" {label}"
    try:
        with model.lock:
            return model.text_encoder.single(word, "label")
    except TextError:
        return None

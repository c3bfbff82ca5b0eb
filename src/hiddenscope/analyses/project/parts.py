"""Parts: the points of one dataset in one model, with their classes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope import texts as reader
from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Readable, Source, Tokens
from hiddenscope.vectors import Token, Vectors, vectors


@dataclass(frozen=True)
class Classes:
    """The class of every point: `codes` count into `names`, in the order in which they first appear."""

    names: tuple[str, ...]
    codes: Tensor

    @classmethod
    def of(cls, labels: Sequence[Any]) -> "Classes":
        """From one label a point."""
        said = [_said(label) for label in labels]
        names = tuple(dict.fromkeys(said))
        places = {name: place for place, name in enumerate(names)}
        if len(names) == len(said) > 1:
            reason = f"all {len(said):,} labels are different, so that no class has two points"
            raise StatesError("Classes of points", reason, "Give labels that several points share, or none.")
        return cls(names, torch.tensor([places[name] for name in said]))

    @property
    def counts(self) -> dict[str, int]:
        """How many points each class has."""
        return dict(zip(self.names, torch.bincount(self.codes).tolist(), strict=True))

    @property
    def labels(self) -> list[str]:
        """The name of every point's class."""
        return [self.names[code] for code in self.codes.tolist()]


@dataclass(frozen=True, eq=False)
class Part:
    """The vectors of one dataset in one model, and what is known of their rows."""

    model: str
    dataset: str
    sites: tuple[Site, ...]
    values: Tensor
    classes: Classes | None
    texts: tuple[str, ...] | None
    tokens: Tokens | None
    source: Source | Mapping[str, Any]

    @property
    def name(self) -> str:
        """Both names, for facts."""
        return f"{self.model}, {self.dataset}" if self.dataset else self.model


def _said(label: Any) -> str:
    if label is None or (isinstance(label, float) and label != label):
        raise StatesError("Classes of points", "one label is missing", "Give one for every point, or none at all.")
    if hasattr(label, "item"):
        label = label.item()
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label)


def datasets(data: Any, text: str | None, label: str | None) -> dict[str, reader.Labelled]:
    """What was given as one or, in a mapping of names, as several datasets."""
    if isinstance(data, Mapping):
        if not data:
            raise TextError("Datasets by name", "there are none", "Give at least one.")
        return {str(name): reader.read(one, text=text, label=label) for name, one in data.items()}
    if isinstance(data, reader.Labelled):
        return {data.name: data}
    found = reader.read(data, text=text, label=label)
    return {found.name: found}


def of_models(
    models: Sequence[Model], data: Mapping[str, reader.Labelled], sites: Any, token: Token, truncate: bool
) -> Iterator[Part]:
    """The parts of every model and dataset, one after another."""
    names = [model.name for model in models]
    for number, model in enumerate(models):
        name = f"{model.name} ({names[:number].count(model.name) + 1})" if model.name in names[:number] else model.name
        for dataset, said in data.items():
            found = vectors(model, list(said.texts), sites=sites, token=token, truncate=truncate)
            yield _part(found, name, dataset, said.labels)


def of_states(source: Readable | Pair, labels: Any, sites: Any, token: Token) -> Part:
    """The part that states are, with labels one a text or one a token."""
    listed = None if labels is None else _listed(labels)
    tokens = (
        (source.decoder if "decoder" in str(sites) else source.encoder).tokens
        if isinstance(source, Pair)
        else source.tokens
    )
    if listed is not None and len(listed) == len(tokens) != tokens.count:
        token = "each"  # one label a token says that tokens are meant
    found = vectors(source, sites=sites, token=token)
    told = found.source.model if isinstance(found.source, Source) else "states"
    return _part(found, told, "", listed)


def _listed(labels: Any) -> list[Any]:
    if isinstance(labels, str | bytes | Mapping) or not hasattr(labels, "__len__"):
        reason = f"{type(labels).__name__} was given"
        raise StatesError("Labels of states", reason, "Give a list with one label a text, or one a token.")
    return list(labels)


def _part(found: Vectors, model: str, dataset: str, labels: Sequence[Any] | None) -> Part:
    count = found.values.shape[1]
    if labels is not None and found.tokens is not None and len(labels) == found.tokens.count != count:
        labels = [labels[text] for text in found.tokens.text]
    if labels is not None and len(labels) != count:
        found_ = f"there are {len(labels):,} labels for {count:,} {'texts' if found.tokens is None else 'tokens'}"
        raise StatesError("Labels of points", found_, "Give one label a text, or one a token.")
    for site, values in zip(found.sites, found.values, strict=True):
        if not bool(values.isfinite().all()):
            row = int((~values.isfinite()).any(1).nonzero()[0])
            raise StatesError(f"Points at {site}", f"row {row} holds a NaN or an infinity", "Leave that one out.")
    classes = None if labels is None else Classes.of(labels)
    return Part(model, dataset, found.sites, found.values, classes, found.texts, found.tokens, found.source)


def strings(part: Part) -> list[str]:
    """What a reader sees of each row: the text, or the token in its text."""
    if part.tokens is not None:
        return list(part.tokens.strings)
    count = part.values.shape[1]
    return list(part.texts) if part.texts is not None else [f"text {row}" for row in np.arange(count)]

"""Readings: directions of any kind as dictionaries that read one site each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.direction import Direction
from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import ArgumentError, SiteError, StatesError
from hiddenscope.linear.probe import Probe
from hiddenscope.model import Model
from hiddenscope.sites import Site
from hiddenscope.states import Readable

Directions: TypeAlias = (
    Direction
    | Dictionary
    | Probe
    | str
    | Sequence[Direction | Dictionary | Probe | str]
)


# Returns a model or states, and the sites that a pattern names there.
Select: TypeAlias = Callable[[Any], tuple[Model | Readable, tuple[Site, ...]]]


@dataclass(frozen=True, eq=False)
class Reading:
    """Directions that read one site, and how strongly each acts in a state.

    Some `columns` of a dictionary's activations, or all of them, are the directions'.
    """

    site: Site
    names: tuple[str, ...]
    dictionary: Dictionary
    columns: list[int] | None = None

    @property
    def sparse(self) -> bool:
        """Tell whether an activation is 0 where the direction does not act."""
        return self.dictionary.encoding.gate != "linear"

    def activations(self, states: Tensor) -> Tensor:
        """Return the activations [token, direction] of states [token, width]."""
        values = self.dictionary.activations(states)
        return values if self.columns is None else values[:, self.columns]


def readings_of(directions: Any, features: Any, select: Select) -> list[Reading]:
    """Return what reads each site; linear directions at one site are one reading."""
    items = directions if isinstance(directions, list | tuple) else [directions]
    readings = []
    linear: dict[Site, list[tuple[str, Tensor, float]]] = {}
    for number, item in enumerate(items):
        if isinstance(item, Dictionary):
            _, (site,) = select(item.reads)
            columns = None
            if features is not None:
                some = np.ravel(features).tolist()
                columns = [item[feature].facts["feature"] for feature in some]
            numbers = range(len(item)) if columns is None else columns
            noun = item[0].facts["origin"]
            names = tuple(f"{noun} {feature}" for feature in numbers)
            readings.append(Reading(site, names, item, columns))
            continue
        for site, name, vector, offset in _linear(item, f"direction {number}", select):
            width = _width(select, site)
            if len(vector) != width:
                raise StatesError(
                    f"Cannot look for examples at {site}",
                    f"its states are {width:,} wide, and {name} is for {len(vector):,}",
                    "Give a direction of the same model and site.",
                )
            linear.setdefault(site, []).append((name, vector, offset))
    for site, rows in linear.items():
        names, vectors, offsets = zip(*rows, strict=True)
        weights, bias = torch.stack(vectors).float(), torch.tensor(offsets).float()
        dictionary = Dictionary(
            weights,
            weights.T.contiguous(),
            bias,
            weights.new_zeros(weights.shape[1]),
            str(site),
            str(site),
            Encoding("linear"),
        )
        readings.append(Reading(site, names, dictionary))
    is_empty = not any(reading.names for reading in readings)
    if is_empty or (features is not None and linear):
        raise ArgumentError(
            "No directions to look for",
            "the list is empty, or features are chosen of what is no dictionary",
            "Give directions; with `features`, a Dictionary.",
        )
    return readings


def _width(select: Select, site: Site) -> int:
    opened, _ = select(str(site))
    if isinstance(opened, Model):
        return opened.anatomy.width(site)
    return next(opened.blocks(site)).shape[1]


def _linear(
    item: Any, name: str, select: Select
) -> Iterator[tuple[Site, str, Tensor, float]]:
    """Yield the site, the name, the weights and the offset of each linear reading."""
    if isinstance(item, str | Site):
        neuron = item if isinstance(item, Site) else Site.parse(item)
        if neuron.kind != "mlp.neuron" or neuron.index is None:
            raise SiteError(
                f"{str(item)[:60]!r} is not a direction",
                "of the sites, only a neuron is",
                "Give a neuron, such as 'layer.3.mlp.neuron.7'.",
            )
        _, (site,) = select(str(Site(neuron.layer, "mlp.neurons", neuron.stack)))
        width = max(_width(select, site), neuron.index + 1)
        yield site, str(neuron), one_hot(torch.tensor(neuron.index), width), 0.0
    elif isinstance(item, Probe) and hasattr(item, "coef_") and item.site:
        # The activation is the decision value: a probe's threshold is 0.
        _, (site,) = select(item.site)
        weights = torch.as_tensor(item.coef_).reshape(-1, item.n_features_in_)
        offsets = torch.as_tensor(item.intercept_).reshape(-1).tolist()
        classes = list(getattr(item, "classes_", [item.site]))[-len(weights) :]
        for label, row, offset in zip(classes, weights, offsets, strict=True):
            yield site, f"probe for {label}", row, offset
    elif isinstance(item, Direction) and (item.sites or "" not in item.vectors):
        if "feature" in item.facts:
            # Its activation is that of its dictionary; this is a product with it.
            name = f"{item.title} as a direction"
        for key, vector in item.vectors.items():
            _, sites = select(key or item.sites or ())
            several = len(sites) * len(item.vectors) > 1
            for site in sites:
                full_name = f"{name} at {site}" if several else name
                yield site, full_name, vector / vector.norm(), 0.0
    else:
        reason = "is no direction"
        if isinstance(item, Direction | Probe):
            reason = "does not say at which site it lies, or is not fitted"
        raise ArgumentError(
            "Cannot look for examples",
            f"this {type(item).__name__} {reason}",
            "Give Direction.of(vector, sites='layer.3'), a fitted probe with a site, a"
            " Dictionary, or the name of a neuron.",
        )

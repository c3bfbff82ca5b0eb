"""The effects of all edges as labelled arrays, with what is known of their error."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hiddenscope import progress
from hiddenscope.analyses.edges.story import EdgesReport
from hiddenscope.causes.contrast import Contrast
from hiddenscope.causes.encoding import AskedContrasts, ask_contrasts
from hiddenscope.causes.estimate import Effects, Method
from hiddenscope.causes.measures import Into
from hiddenscope.causes.rewire import check_restored
from hiddenscope.causes.strongest import (
    SHARE,
    edges_at,
    largest,
    preferring_other,
    strongest_edges,
)
from hiddenscope.causes.wiring import Wiring
from hiddenscope.errors import SiteError
from hiddenscope.measures.grouped import estimate, standard_error
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.results import Result
from hiddenscope.results.dataset import Attributes, Variables, to_dataset
from hiddenscope.results.report import Estimate
from hiddenscope.sites import Site, names_neurons
from hiddenscope.states.arrays import Floats, Ints

if TYPE_CHECKING:
    import xarray

ARROW = " > "
# Estimates this small beside the largest may be rounding.
ROUNDING = 1e-4


class Sample(NamedTuple):
    """Edges [edge, (writer, reader)] drawn at random, and the weight of each draw.

    An edge is drawn again as likely as before, half of the times the likelier the
    larger its estimate; a draw weighs as many edges as it stands for.
    """

    edges: Ints
    weights: Floats


def list_edges(
    model: ModelLike,
    contrasts: Contrast | Sequence[Contrast],
    *,
    into: Into,
    method: Method,
    exact: int,
    paths: Sequence[str],
    sample: int,
) -> Result:
    """Return the effects of all edges, and the exact ones of some."""
    model = as_model(model)
    asked = ask_contrasts(model, contrasts, one_form=False)
    paths = [paths] if isinstance(paths, str) else paths
    wiring = Wiring.of(model, _neurons(model, paths))
    named = _named(wiring, paths)
    if method == "exact":
        exact = sample = 0
    # Few runs are held at a time: what all parts write is more than a pass keeps.
    runs = _Runs(model, wiring, asked, into)
    count = len(asked.encodings)
    values = np.full((count, *wiring.possible.shape), np.nan)
    restored = 0.0
    with progress.track("Ranking edges", total=count) as advance:
        for number in range(count):
            effects = runs.effects(number)
            off = check_restored(model, effects.stepper, effects.runs)
            restored = max(restored, off)
            # Whoever names paths wants the exact effects of these alone.
            if method != "exact" or not paths:
                values[number] = effects.of_all(method, advance)
    strongest = largest(values.mean(0), exact)
    drawn = _draw(values.mean(0), wiring, sample)
    edges = np.unique(np.concatenate([named, strongest, drawn.edges]), axis=0)
    found = np.empty((count, len(edges)))
    with progress.track("Exact effects", total=found.size) as advance:
        # From the last, which is still at hand.
        for number in reversed(range(count)):
            effects = runs.effects(number)
            found[number] = effects.exact(edges.tolist(), advance)
    exactly = np.full(wiring.possible.shape, np.nan)
    # What an edge into the logits does is no estimate.
    known = slice(None) if method == "exact" else slice(-1, None)
    exactly[:, known] = values[..., known].mean(0)
    exactly[tuple(edges.T)] = found.mean(0)
    if method == "exact" and paths:
        values[:, *edges.T] = found
    data = _dataset(wiring, values, exactly, asked)
    # Means of absolute values say nothing of the sign.
    compared = np.abs(exactly) if method == "dropped" else exactly
    logit_differences = [*runs.logit_differences.values()]
    clean, corrupt = np.mean(logit_differences, axis=0)
    report = EdgesReport(
        contrasts=count,
        groups=asked.group_count,
        copies=asked.copies,
        into=into,
        method=method,
        answers=[encoded.answers(model) for encoded in asked.encodings],
        clean=float(clean),
        corrupt=float(corrupt),
        writers=wiring.summed,
        readers=len(wiring.readers),
        edges=int(wiring.possible[: wiring.summed].sum()),
        strongest=strongest_edges(data),
        named=edges_at(data, named) or None,
        error=_error(values.mean(0), compared, drawn),
        error_strongest=_error_of(values.mean(0), compared, strongest),
        sampled=len(drawn.edges),
        restored=restored,
        notes=[
            *dict.fromkeys(asked.notes()),
            *preferring_other([clean for clean, _ in logit_differences]),
        ],
    )
    return Result("edges", data, report, model.source(None))


class _Runs:
    """The runs of every contrast, of which the last that was asked for is kept."""

    def __init__(
        self, model: Model, wiring: Wiring, asked: AskedContrasts, into: Into
    ) -> None:
        self.model = model
        self.wiring = wiring
        self.asked = asked
        self.into = into
        self.logit_differences: dict[int, list[float]] = {}
        self._last: tuple[int, Effects] | None = None

    def effects(self, number: int) -> Effects:
        """Run a contrast, unless it was the last."""
        if self._last is None or self._last[0] != number:
            encoded = self.asked.encodings[number]
            self._last = None
            effects = Effects(self.model, self.wiring, encoded, self.into)
            self.logit_differences[number] = effects.measures.runs["logit_difference"]
            self._last = number, effects
        return self._last[1]


def _neurons(model: Model, paths: Sequence[str]) -> tuple[Site, ...]:
    """Return the neurons that write in named edges."""
    sites: set[Site] = set()
    for path in paths:
        writer = path.partition(ARROW)[0].strip()
        if names_neurons(writer):
            sites.update(model.anatomy.select(writer))
    return tuple(sorted(sites))


def _named(wiring: Wiring, paths: Sequence[str]) -> Ints:
    """Return the edges that are named [edge, (writer, reader)]; refuse unknown ones."""
    found = set()
    for path in paths:
        writer, arrow, reader = (part.strip() for part in path.partition(ARROW))
        matches = [
            _matching(wiring.writers, writer),
            _matching(wiring.readers, reader),
        ]
        some = {edge for edge in product(*matches) if wiring.possible[edge]}
        if not some:
            reason = "no writer is named so"
            if not arrow:
                reason = "it names no reader"
            elif matches[0]:
                reason = "no reader is named so"
                if matches[1]:
                    reason = "the reader comes before the writer"
            raise SiteError(
                f"No edge {path!r:.80}",
                reason,
                "Give a writer and a reader, as 'layer.1.mlp > layer.2.attn.q.0'.",
            )
        found |= some
    return np.array(sorted(found), dtype=int).reshape(-1, 2)


def _matching(parts: Sequence[object], pattern: str) -> list[int]:
    numbers = []
    for number, part in enumerate(parts):
        if fnmatchcase(str(part), pattern):
            numbers.append(number)
    return numbers


def _draw(effects: Floats, wiring: Wiring, count: int, seed: int = 0) -> Sample:
    """Draw edges at random of those whose effect is estimated.

    Those into the logits are known, and those of neurons are among those of MLPs. Half
    of the draws do not ask the estimate (a defensive mixture, Hesterberg 1995): what it
    takes for nothing, as where a head is saturated, would never be drawn.
    """
    drawable = wiring.possible.astype(float)
    drawable[wiring.summed :] = drawable[:, -1] = 0
    if not count or not drawable.any():
        return Sample(np.empty((0, 2), dtype=int), np.empty(0))
    shares = drawable / drawable.sum()
    sizes = np.nan_to_num(np.abs(effects)) * drawable
    # Another device rounds otherwise, and is to draw the same edges.
    sizes = np.sqrt(np.where(sizes > ROUNDING * sizes.max(), sizes, 0.0))
    if sizes.any():
        shares = (shares + sizes / sizes.sum()) / 2
    shares = shares.ravel()
    drawn = np.random.default_rng(seed).choice(len(shares), size=count, p=shares)
    edges = np.stack(np.unravel_index(drawn, effects.shape), axis=1)
    return Sample(edges, 1 / shares[drawn])


def _error(effects: Floats, exactly: Floats, drawn: Sample) -> Estimate | None:
    """Return how far estimates are off, as a share of the exact effects."""
    if not len(drawn.edges):
        return None
    places = tuple(drawn.edges.T)
    off = np.abs(effects[places] - exactly[places]) * drawn.weights
    sizes = np.abs(exactly[places]) * drawn.weights
    if not sizes.any():
        return None
    draws = np.arange(len(off))
    # An edge that does nothing has no share of its own.
    with np.errstate(divide="ignore", invalid="ignore"):
        return estimate(off[:, None], draws, sizes[:, None])[0]


def _error_of(effects: Floats, exactly: Floats, edges: Ints) -> float | None:
    """Return how far estimates of some edges are off, but for those into the logits."""
    some = edges[edges[:, 1] < effects.shape[1] - 1]
    places = tuple(some.T)
    total = float(np.abs(exactly[places]).sum())
    if total == 0:
        return None
    return float(np.abs(effects[places] - exactly[places]).sum()) / total


def _dataset(
    wiring: Wiring, values: Floats, exactly: Floats, asked: AskedContrasts
) -> "xarray.Dataset":
    """Return the mean effects over the contrasts, with their standard error."""
    dims = "writer", "reader"
    variables: Variables = {
        "effect": (dims, values.mean(0), {"long_name": "effect", **SHARE}),
        "exact": (dims, exactly, {"long_name": "exact effect", **SHARE}),
    }
    error = standard_error(values, asked.groups)
    if error is not None:
        attributes: Attributes = {"long_name": "standard error of the effect"}
        variables["effect_error"] = dims, error, {**attributes, "units": SHARE["units"]}
    coords = {
        "writer": [str(site) for site in wiring.writers],
        "reader": [str(reader) for reader in wiring.readers],
    }
    data = to_dataset(variables, coords)
    data.attrs |= asked.texts()
    return data

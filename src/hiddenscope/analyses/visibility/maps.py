"""Maps: what is measured of a Jacobian, and the map of one text, in which every target
meets every source.

The vectors of every target go through the model together, from the top down, and their
products with the Jacobian are met at every source on the way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs
from hiddenscope.passes.jacobian import Tape, tape
from hiddenscope.sites import Site

MeasureName: TypeAlias = Literal["l1", "frobenius", "relative", "logit"]
Numbers: TypeAlias = NDArray[np.float64]
Advance: TypeAlias = Callable[[float], None]

EXACT_WIDTH = (
    # Up to this width the Frobenius norm is exact unless probes are given.
    128
)
DEFAULT_PROBES = 16
# About how many rows [token, width] go through a block together.
ROWS = {
    "cpu": 1024,
    "cuda": 65_536,
}
ROW_WIDTH = (
    # The width of such a row, for logits, which are as wide as the vocabulary.
    768
)


@dataclass(frozen=True)
class InfluenceMeasure:
    """One measure of a Jacobian: its name, and how many probes estimate it; 0 where it
    is exact.
    """

    name: str
    probes: int = 0
    seed: int = 0

    @classmethod
    def of(cls, name: str, probes: Any, seed: int, width: int) -> "InfluenceMeasure":
        """The measure, checked. A Frobenius norm is exact for narrow states, and with
        as many probes as the width.
        """
        if name not in get_args(MeasureName):
            choices = ", ".join(get_args(MeasureName))
            raise StatesError(
                f"No measure {str(name)[:40]!r}",
                f"the measures are {choices}",
                "Choose one of these.",
            )
        if name in ("l1", "logit"):
            if probes is not None:
                reason = "it is exact with one vector for each target"
                raise StatesError(
                    f"Cannot use probes for {name}",
                    reason,
                    "Leave `probes` out, or choose frobenius.",
                )
            return cls(name)
        if probes is None:
            probes = width if width <= EXACT_WIDTH else DEFAULT_PROBES
        if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
            problem = f"probes must be an integer >= 2, got {str(probes)[:40]}"
            raise StatesError(
                problem,
                "an interval needs at least two",
                f"Give 2 to {width}, which is exact.",
            )
        return cls(name, 0 if probes >= width else probes, seed)

    def count(self, width: int) -> int:
        """How many vectors each target takes."""
        return 1 if self.name in ("l1", "logit") else self.probes or width

    def vectors(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """The vectors at some states [token, width]: [token, vector, width]."""
        if self.name == "l1":
            return scale_free_gradient(states)[:, None]
        tokens, width = states.shape
        if not self.probes:
            units: Tensor = torch.eye(width, dtype=states.dtype, device=states.device)
            return units.expand(tokens, width, width)
        drawn: Tensor = torch.randn(
            tokens, self.probes, width, generator=generator, dtype=torch.float64
        )
        lengths = torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)
        # On a sphere: exact where the Jacobian is a rotation.
        drawn *= width**0.5 / lengths
        return drawn.to(dtype=states.dtype, device=states.device)

    def size(self, products: Tensor) -> Tensor:
        """What is summed over the vectors of a target: [vector, token] of products
        [vector, token, width].
        """
        wide = torch.float64 if products.dtype == torch.float64 else torch.float32
        norms = torch.linalg.vector_norm(
            products, 1 if self.name == "l1" else 2, dim=-1, dtype=wide
        ).double()
        sizes: Tensor = norms if self.name == "l1" else norms.square()
        return sizes

    def values(self, sums: Numbers, squares: Numbers) -> tuple[Numbers, Numbers | None]:
        """The measure, and half of its 95% interval where it is estimated."""
        if self.name == "l1":
            return sums, None
        if not self.probes:
            return np.sqrt(sums), None
        mean = sums / self.probes
        variance = np.maximum(squares / self.probes - mean**2, 0) / (self.probes - 1)
        norm = np.sqrt(mean)
        with np.errstate(invalid="ignore", divide="ignore"):
            half = student_quantile(self.probes) * np.sqrt(variance) / (2 * norm)
        return norm, np.where(norm > 0, half, 0.0)


def scale_free_gradient(states: Tensor) -> Tensor:
    """The gradient of |h|₁/|h|₂ with respect to h, for rows of states: it is orthogonal
    to h.
    """
    wide = states if states.dtype == torch.float64 else states.float()
    length = wide.norm(dim=-1, keepdim=True)
    gradient: Tensor = (
        wide.sign() / length - wide.abs().sum(-1, keepdim=True) * wide / length**3
    )
    return gradient.to(states.dtype)


def student_quantile(probes: int) -> float:
    """How many standard errors hold 95%.

    Squared norms of few probes are skewed to the right, the more so the fewer
    directions a Jacobian has, and Student's own quantile would hold too little: it is
    taken with a quarter of the degrees of freedom.
    """
    from scipy.stats import t

    return float(t.ppf(0.975, max(1.0, (probes - 1) / 4)))


@dataclass
class Axes:
    """The two axes of a map: its sites, and its tokens, stack after stack."""

    sites: tuple[Site, ...]
    lengths: Mapping[str | None, int]
    starts: dict[str | None, int] = field(init=False)

    def __post_init__(self) -> None:
        ends = np.cumsum([0, *self.lengths.values()]).tolist()
        self.starts = dict(zip(self.lengths, ends, strict=False))

    @property
    def tokens(self) -> int:
        """How many tokens there are in all stacks."""
        return sum(self.lengths.values())

    def columns(self, stack: str | None) -> slice:
        """Where the tokens of a stack are."""
        return slice(self.starts[stack], self.starts[stack] + self.lengths[stack])

    def rows(self, stack: str | None) -> list[int]:
        """Where the sites of a stack are."""
        return [row for row, site in enumerate(self.sites) if site.stack == stack]

    @property
    def filled(self) -> NDArray[np.bool_]:
        """Which cells [site, token] hold a state: those of a site's own stack."""
        cells = np.zeros((len(self.sites), self.tokens), dtype=bool)
        for row, site in enumerate(self.sites):
            cells[row, self.columns(site.stack)] = True
        return cells


class _Sums:
    """The sizes of the products at each source, [source site, target, source token],
    summed over vectors in float64.
    """

    def __init__(self, axes: Axes, targets: int, *, squares: bool) -> None:
        self.axes = axes
        shape = len(axes.sites), targets, axes.tokens
        self.first = torch.zeros(shape, dtype=torch.float64)
        self.second = torch.zeros(shape, dtype=torch.float64) if squares else None
        self._rows = {site: row for row, site in enumerate(axes.sites)}

    def add(self, site: Site, sizes: Tensor, targets: Tensor) -> None:
        """Add the sizes [vector, token] of products at a source, each vector to its
        target.
        """
        sizes, start = sizes.cpu(), self.axes.starts[site.stack]
        columns = slice(start, start + sizes.shape[1])
        self.first[self._rows[site], :, columns].index_add_(0, targets, sizes)
        if self.second is not None:
            self.second[self._rows[site], :, columns].index_add_(
                0, targets, sizes.square()
            )

    def arrays(self, *shape: int) -> tuple[Numbers, Numbers]:
        """The sums and the sums of squares as [*shape, source site, source token]; the
        shape is that of the targets.
        """
        both = (self.first, self.first if self.second is None else self.second)
        first, second = (
            one.transpose(0, 1).reshape(*shape, *one.shape[::2]).numpy() for one in both
        )
        return first, second


def influence_on_states(
    model: Model,
    text: Inputs,
    axes: Axes,
    measure: InfluenceMeasure,
    generator: torch.Generator,
    advance: Advance,
) -> tuple[Numbers, Numbers | None]:
    """One text's map [site, token, source site, source token], and half the 95%
    interval where it is estimated.
    """
    sums = _Sums(axes, len(axes.sites) * axes.tokens, squares=measure.probes > 0)
    norms = np.ones((len(axes.sites), axes.tokens))
    for name, length in axes.lengths.items():
        sites = [site for site in axes.sites if site.stack == name]
        if not sites:
            continue
        sources = [site for site in axes.sites if not site > sites[-1]]
        vectors = sum(measure.count(model.anatomy.width(site)) for site in sites)
        for start, end in _spans(model, sites[0], length, vectors):
            run = tape(model, first_tokens(text, name, end), sources)
            for seeds, targets in _chunks(
                model, run, axes, sites, (start, end), measure, generator
            ):
                for site, products in run.pull(seeds):
                    sums.add(site, measure.size(products), targets[: len(products)])
            for site in sites:
                columns = slice(axes.starts[name] + start, axes.starts[name] + end)
                norms[axes.sites.index(site), columns] = (
                    run.values(site)[start:end].double().norm(dim=-1).cpu()
                )
            advance(len(sites) * (end - start))
    values, half = measure.values(*sums.arrays(len(axes.sites), axes.tokens))
    if measure.name == "relative":
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = norms[None, None] / norms[:, :, None, None]
        values, half = values * scale, None if half is None else half * scale
    return _check_finite(values, axes), half


def influence_on_log_probability(
    model: Model,
    text: Inputs,
    predicted: Sequence[int],
    axes: Axes,
    measure: InfluenceMeasure,
    advance: Advance,
) -> Numbers:
    """One text's map [token, source site, source token]: of the log-probability of one
    token at each place.
    """
    name = list(axes.lengths)[-1]
    length = axes.lengths[name]
    sums = _Sums(axes, length, squares=False)
    rows = ROWS.get(model.device.type, ROWS["cpu"])
    for start, end in _spans(model, Site(0, "", name), length, 1):
        run = tape(model, first_tokens(text, name, end), axes.sites, logits=True)
        assert run.logits is not None
        ids = torch.tensor(predicted[:end], device=run.logits.device)
        with autograd.restored(), torch.enable_grad():
            logits = (
                run.logits if run.logits.dtype == torch.float64 else run.logits.float()
            )
            log_probabilities = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        several = max(1, rows * ROW_WIDTH // logits.shape[1])
        units = torch.eye(
            end, dtype=log_probabilities.dtype, device=log_probabilities.device
        )
        for first in range(start, end, several):
            targets = torch.arange(first, min(end, first + several))
            for site, products in run.pull(
                {}, (log_probabilities, units[targets.to(units.device)])
            ):
                sums.add(site, measure.size(products), targets[: len(products)])
        advance(end - start)
    return _check_finite(np.sqrt(sums.arrays(length)[0]), axes)


def first_tokens(inputs: Inputs, stack: str | None, length: int) -> Inputs:
    """The texts with the first tokens only of what one stack works on; the other
    stack's texts stay whole.
    """
    if stack == "decoder" and inputs.targets is not None:
        return inputs.with_targets(first_tokens(inputs.targets, None, length))
    spans = inputs.spans and tuple(row[:length] for row in inputs.spans)
    return Inputs(
        tuple(ids[:length] for ids in inputs.ids), inputs.texts, spans, inputs.targets
    )


def _spans(
    model: Model, site: Site, length: int, vectors: int
) -> list[tuple[int, int]]:
    """Runs of target tokens, each with its own pass over the text up to its end, if the
    stack is causal.

    A run is as long as fills the rows that go through a block together: a longer one
    would compute more than it sees.
    """
    switch = model.batching.rope_switch
    if not model.anatomy.stack(site).causal or (switch is not None and length > switch):
        return [(0, length)]
    rows = ROWS.get(model.device.type, ROWS["cpu"])
    count = min(length, max(1, round(vectors * length**2 / rows)))
    return list(pairwise(round(length * part / count) for part in range(count + 1)))


def _chunks(
    model: Model,
    run: Tape,
    axes: Axes,
    sites: Sequence[Site],
    span: tuple[int, int],
    measure: InfluenceMeasure,
    generator: torch.Generator,
) -> Iterator[tuple[dict[Site, Tensor], Tensor]]:
    """The vectors of all targets of a span, as many at a time as go through together,
    with the target of each.
    """
    start, end = span
    most = max(1, 2 * ROWS.get(model.device.type, ROWS["cpu"]) // end)
    seeds: dict[Site, list[Tensor]] = {}
    targets: list[int] = []
    for site in sorted(sites, reverse=True):
        states = run.values(site)
        row = axes.sites.index(site) * axes.tokens + axes.starts[site.stack]
        for token, vectors in enumerate(
            measure.vectors(states[start:end], generator), start
        ):
            for part in vectors.split(most):
                if len(targets) + len(part) > most and targets:
                    yield (
                        {one: torch.cat(parts) for one, parts in seeds.items()},
                        torch.tensor(targets),
                    )
                    seeds, targets = {}, []
                seed = states.new_zeros((len(part), *states.shape))
                seed[:, token] = part
                seeds.setdefault(site, []).append(seed)
                targets += [row + token] * len(part)
    yield {one: torch.cat(parts) for one, parts in seeds.items()}, torch.tensor(targets)


def _check_finite(values: Numbers, axes: Axes) -> Numbers:
    """The values, none of which may be a NaN or an infinity."""
    if np.isfinite(values).all():
        return values
    place = np.argwhere(~np.isfinite(values))[0]
    reason = (
        f"that of {axes.sites[place[-2]]} at token {place[-1]} is"
        f" {values[tuple(place)]}"
    )
    raise NotFinite(
        "An influence is not finite",
        reason,
        "Look at the states with profile(), or choose other sites.",
    )

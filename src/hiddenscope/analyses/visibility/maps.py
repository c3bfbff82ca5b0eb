"""Maps of influence: a measure of the Jacobian between every pair of states of a text.

The vectors of every target go through the model together, from the top down, and their
products with the Jacobian are met at every source on the way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.visibility.random_weights import RandomModel
from hiddenscope.analyses.visibility.sampling import DrawnTarget
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs
from hiddenscope.passes.jacobian import Tape, tape
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats

MeasureName: TypeAlias = Literal["l1", "frobenius", "relative", "logit"]

# Up to this width the Frobenius norm is exact unless probes are given.
EXACT_WIDTH = 128
DEFAULT_PROBES = 16
# About how many rows [token, width] go through a block together.
ROWS = {"cpu": 1024, "cuda": 65_536}
# The width of such a row, for logits, which are as wide as the vocabulary.
ROW_WIDTH = 768


@dataclass(frozen=True)
class InfluenceMeasure:
    """A measure of a Jacobian, and how many probes estimate it; 0 where it is exact."""

    name: str
    probes: int = 0
    seed: int = 0

    @classmethod
    def of(cls, name: str, probes: object, seed: int, width: int) -> "InfluenceMeasure":
        """Return a checked measure.

        A Frobenius norm is exact for narrow states, and with as many probes as the
        width.
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
                raise StatesError(
                    f"Cannot use probes for {name}",
                    "it is exact with one vector for each target",
                    "Leave `probes` out, or choose frobenius.",
                )
            return cls(name)
        if probes is None:
            probes = width if width <= EXACT_WIDTH else DEFAULT_PROBES
        if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
            raise StatesError(
                f"probes must be an integer >= 2, got {str(probes)[:40]}",
                "an interval needs at least two",
                f"Give 2 to {width}, which is exact.",
            )
        return cls(name, 0 if probes >= width else probes, seed)

    def count(self, width: int) -> int:
        """Return how many vectors each target takes."""
        if self.name in ("l1", "logit"):
            return 1
        return self.probes or width

    def vectors(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Return the vectors [token, vector, width] of states [token, width]."""
        if self.name == "l1":
            return scale_free_gradient(states)[:, None]
        tokens, width = states.shape
        if not self.probes:
            units: Tensor = torch.eye(width, dtype=states.dtype, device=states.device)
            return units.expand(tokens, width, width)
        probes: Tensor = torch.randn(
            tokens, self.probes, width, generator=generator, dtype=torch.float64
        )
        # Probes on a sphere are exact where the Jacobian is a rotation.
        lengths = torch.linalg.vector_norm(probes, dim=-1, keepdim=True)
        probes *= width**0.5 / lengths
        return probes.to(dtype=states.dtype, device=states.device)

    def size(self, products: Tensor) -> Tensor:
        """Return what is summed over the vectors of a target.

        It is [vector, token] of products [vector, token, width].
        """
        wide = torch.promote_types(products.dtype, torch.float32)
        order = 1 if self.name == "l1" else 2
        norms: Tensor = torch.linalg.vector_norm(products, order, dim=-1, dtype=wide)
        norms = norms.double()
        return norms if order == 1 else norms.square()

    def values(self, sums: Floats, squares: Floats) -> tuple[Floats, Floats | None]:
        """Return the measure, and half of its 95% interval where it is estimated."""
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
    """Return the gradient of |h|₁/|h|₂ for rows of states; it is orthogonal to h."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    length = wide.norm(dim=-1, keepdim=True)
    absolute_sum = wide.abs().sum(-1, keepdim=True)
    gradient: Tensor = wide.sign() / length - absolute_sum * wide / length**3
    return gradient.to(states.dtype)


def student_quantile(probes: int) -> float:
    """Return how many standard errors hold 95%.

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
        """Return the number of tokens in all stacks."""
        return sum(self.lengths.values())

    def columns(self, stack: str | None) -> slice:
        """Return where the tokens of a stack are."""
        start = self.starts[stack]
        return slice(start, start + self.lengths[stack])

    def rows(self, stack: str | None) -> list[int]:
        """Return where the sites of a stack are."""
        return [row for row, site in enumerate(self.sites) if site.stack == stack]

    @property
    def filled(self) -> NDArray[np.bool_]:
        """Mark the cells [site, token] that hold a state: those of the site's stack."""
        cells = np.zeros((len(self.sites), self.tokens), dtype=bool)
        for row, site in enumerate(self.sites):
            cells[row, self.columns(site.stack)] = True
        return cells


class _Sums:
    """Sums of product sizes, [source site, target, source token], in float64."""

    def __init__(self, axes: Axes, targets: int, *, squares: bool) -> None:
        self.axes = axes
        shape = len(axes.sites), targets, axes.tokens
        self.first = torch.zeros(shape, dtype=torch.float64)
        self.second = torch.zeros(shape, dtype=torch.float64) if squares else None
        self._rows = {site: row for row, site in enumerate(axes.sites)}

    def add(self, site: Site, sizes: Tensor, targets: Tensor) -> None:
        """Add the sizes [vector, token] at a source, each vector to its target."""
        sizes = sizes.cpu()
        # A vector whose target lies below the source has no product there.
        targets = targets[: len(sizes)]
        start = self.axes.starts[site.stack]
        row, columns = self._rows[site], slice(start, start + sizes.shape[1])
        self.first[row, :, columns].index_add_(0, targets, sizes)
        if self.second is not None:
            self.second[row, :, columns].index_add_(0, targets, sizes.square())

    def arrays(self, *shape: int) -> tuple[Floats, Floats]:
        """Return the sums and the sums of squares.

        Both are [*shape, source site, source token]; the shape is that of the targets.
        """
        second = self.first if self.second is None else self.second
        return _by_target(self.first, shape), _by_target(second, shape)


def _by_target(sums: Tensor, shape: tuple[int, ...]) -> Floats:
    sites, _, tokens = sums.shape
    array: Floats = sums.transpose(0, 1).reshape(*shape, sites, tokens).numpy()
    return array


def influence_on_states(
    model: Model,
    text: Inputs,
    axes: Axes,
    measure: InfluenceMeasure,
    generator: torch.Generator,
    advance: Callable[[float], None],
) -> tuple[Floats, Floats | None]:
    """Return one text's map, and half the 95% interval where it is estimated.

    The map is [site, token, source site, source token].
    """
    sums = _Sums(axes, len(axes.sites) * axes.tokens, squares=measure.probes > 0)
    norms = np.ones((len(axes.sites), axes.tokens))
    for name, length in axes.lengths.items():
        rows = axes.rows(name)
        if not rows:
            continue
        sites = [axes.sites[row] for row in rows]
        sources = [site for site in axes.sites if not site > sites[-1]]
        vectors = sum(measure.count(model.anatomy.width(site)) for site in sites)
        for start, end in _spans(model, sites[0], length, vectors):
            run = tape(model, cut_texts(text, name, end), sources)
            for seeds, targets in _chunks(
                model, run, axes, sites, (start, end), measure, generator
            ):
                for site, products in run.pull(seeds):
                    sums.add(site, measure.size(products), targets)
            columns = slice(axes.starts[name] + start, axes.starts[name] + end)
            for row, site in zip(rows, sites, strict=True):
                states = run.values(site)[start:end].double()
                norms[row, columns] = states.norm(dim=-1).cpu()
            advance(len(sites) * (end - start))
    values, half = measure.values(*sums.arrays(len(axes.sites), axes.tokens))
    if measure.name == "relative":
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = norms[None, None] / norms[:, :, None, None]
        values = values * scale
        half = None if half is None else half * scale
    _check_finite(values, axes)
    return values, half


def influence_on_targets(
    model: Model | RandomModel,
    text: Inputs,
    axes: Axes,
    targets: Sequence[DrawnTarget],
    measure: InfluenceMeasure,
    generator: torch.Generator,
) -> Floats:
    """Return the influence on some states of a text, [target, source site, token]."""
    sums = _Sums(axes, len(targets), squares=measure.probes > 0)
    # The pass is made once; all vectors go backward through it together.
    run = tape(model, text, axes.sites)
    norms = [run.values(site).double().norm(dim=-1) for site in axes.sites]
    for seeds, numbers in _sampled_chunks(
        model, run, axes, targets, measure, generator
    ):
        for site, products in run.pull(seeds):
            sums.add(site, measure.size(products), numbers)
    values, _ = measure.values(*sums.arrays(len(targets)))
    if measure.name == "relative":
        # The norm of a target is the same for all its sources.
        values = values * torch.stack(norms).cpu().numpy()
    _check_finite(values, axes)
    return values


def _sampled_chunks(
    model: Model | RandomModel,
    run: Tape,
    axes: Axes,
    targets: Sequence[DrawnTarget],
    measure: InfluenceMeasure,
    generator: torch.Generator,
) -> Iterator[tuple[dict[Site, Tensor], Tensor]]:
    """Yield the vectors of the targets with the number of each, from the top down."""
    most = max(1, 2 * _rows(model) // axes.tokens)
    order = sorted(
        range(len(targets)), key=lambda number: axes.sites[targets[number].row]
    )
    seeds: dict[Site, list[Tensor]] = {}
    numbers: list[int] = []
    for number in reversed(order):
        row, token = targets[number]
        site = axes.sites[row]
        states = run.values(site)
        (vectors,) = measure.vectors(states[token : token + 1], generator)
        for part in vectors.split(most):
            if numbers and len(numbers) + len(part) > most:
                yield _joined(seeds), torch.tensor(numbers)
                seeds, numbers = {}, []
            seed = states.new_zeros((len(part), *states.shape))
            seed[:, token] = part
            seeds.setdefault(site, []).append(seed)
            numbers += [number] * len(part)
    yield _joined(seeds), torch.tensor(numbers)


def influence_on_log_probability(
    model: Model,
    text: Inputs,
    predicted: Sequence[int],
    axes: Axes,
    measure: InfluenceMeasure,
    advance: Callable[[float], None],
) -> Floats:
    """Return one text's map [token, source site, source token].

    It is of the log-probability of one predicted token at each place.
    """
    name = list(axes.lengths)[-1]
    length = axes.lengths[name]
    sums = _Sums(axes, length, squares=False)
    for start, end in _spans(model, Site(0, "", name), length, 1):
        run = tape(model, cut_texts(text, name, end), axes.sites, logits=True)
        assert run.logits is not None
        ids = torch.tensor(predicted[:end], device=run.logits.device)
        wide = torch.promote_types(run.logits.dtype, torch.float32)
        with autograd.restored(), torch.enable_grad():
            logits = run.logits.to(wide)
            log_probabilities = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        units = torch.eye(end, dtype=wide, device=logits.device)
        most = max(1, _rows(model) * ROW_WIDTH // logits.shape[1])
        for first in range(start, end, most):
            targets = torch.arange(first, min(end, first + most))
            vectors = units[targets.to(units.device)]
            for site, products in run.pull({}, (log_probabilities, vectors)):
                sums.add(site, measure.size(products), targets)
        advance(end - start)
    squares, _ = sums.arrays(length)
    values: Floats = np.sqrt(squares)
    _check_finite(values, axes)
    return values


def cut_texts(inputs: Inputs, stack: str | None, length: int) -> Inputs:
    """Cut the texts of one stack; the texts of the other stay whole."""
    if stack == "decoder" and inputs.targets is not None:
        return inputs.with_targets(cut_texts(inputs.targets, None, length))
    ids = tuple(text[:length] for text in inputs.ids)
    spans = inputs.spans and tuple(row[:length] for row in inputs.spans)
    return Inputs(ids, inputs.texts, spans, inputs.targets)


def _rows(model: Model | RandomModel) -> int:
    return ROWS.get(model.device.type, ROWS["cpu"])


def _spans(
    model: Model, site: Site, length: int, vectors: int
) -> list[tuple[int, int]]:
    """Cut the target tokens of a causal stack into runs with a pass of their own.

    The pass of a run ends where the run ends. A run is as long as fills the rows that
    go through a block together: a longer one would compute more than it sees.
    """
    # Beyond this length LongRoPE scales positions, so the start of a text run without
    # the rest would have other states.
    switch = model.batching.rope_switch
    if not model.anatomy.stack(site).causal or (switch is not None and length > switch):
        return [(0, length)]
    count = min(length, max(1, round(vectors * length**2 / _rows(model))))
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
    """Yield the vectors of all targets of a span with the target of each.

    As many are yielded at a time as go through the model together.
    """
    start, end = span
    most = max(1, 2 * _rows(model) // end)
    seeds: dict[Site, list[Tensor]] = {}
    targets: list[int] = []
    for site in sorted(sites, reverse=True):
        states = run.values(site)
        first_target = axes.sites.index(site) * axes.tokens + axes.starts[site.stack]
        vectors = measure.vectors(states[start:end], generator)
        for token, of_token in enumerate(vectors, start):
            for part in of_token.split(most):
                if targets and len(targets) + len(part) > most:
                    yield _joined(seeds), torch.tensor(targets)
                    seeds, targets = {}, []
                seed = states.new_zeros((len(part), *states.shape))
                seed[:, token] = part
                seeds.setdefault(site, []).append(seed)
                targets += [first_target + token] * len(part)
    yield _joined(seeds), torch.tensor(targets)


def _joined(seeds: Mapping[Site, Sequence[Tensor]]) -> dict[Site, Tensor]:
    return {site: torch.cat(list(parts)) for site, parts in seeds.items()}


def _check_finite(values: Floats, axes: Axes) -> None:
    """Refuse a map that holds a NaN or an infinity."""
    if np.isfinite(values).all():
        return
    place = np.argwhere(~np.isfinite(values))[0]
    site, token = axes.sites[place[-2]], place[-1]
    raise NotFinite(
        "An influence is not finite",
        f"that of {site} at token {token} is {values[tuple(place)]}",
        "Look at the states with profile(), or choose other sites.",
    )

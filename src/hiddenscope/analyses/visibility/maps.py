"""Maps of influence: a measure of the Jacobian between every pair of states of a text.

The vectors of every target go through the model together, from the top down, and their
products with the Jacobian are met at every source on the way.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.analyses.visibility.random_weights import RandomModel
from hiddenscope.analyses.visibility.sampling import DrawnTarget
from hiddenscope.analyses.visibility.seeds import Seed, batched
from hiddenscope.arguments import integer
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
# Measures that take one vector for each target.
ONE_VECTOR = ("l1", "logit")
# About how many rows [token, width] go through a block together.
ROW_BUDGET = {"cpu": 1024, "cuda": 65_536}
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
        names = get_args(MeasureName)
        if name not in names:
            choices = ", ".join(names)
            raise StatesError(
                f"No measure {str(name)[:40]!r}",
                f"the measures are {choices}",
                "Choose one of these.",
            )
        if name in ONE_VECTOR:
            if probes is not None:
                raise StatesError(
                    f"Cannot use probes for {name}",
                    "it is exact with one vector for each target",
                    "Leave `probes` out, or choose frobenius.",
                )
            return cls(name)
        if probes is None:
            probes = width if width <= EXACT_WIDTH else DEFAULT_PROBES
        # An interval needs two.
        probes = integer(probes, "probes", 2)
        if probes >= width:
            probes = 0
        return cls(name, probes, seed)

    @property
    def estimated(self) -> bool:
        """Tell whether probes estimate the measure."""
        return self.probes > 0

    def count(self, width: int) -> int:
        """Return how many vectors each target takes."""
        if self.name in ONE_VECTOR:
            return 1
        return self.probes or width

    def vectors(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """Return the vectors [token, vector, width] of states [token, width]."""
        if self.name == "l1":
            return scale_free_gradient(states)[:, None]
        tokens, width = states.shape
        if not self.estimated:
            units: Tensor = torch.eye(width, dtype=states.dtype, device=states.device)
            return units.expand(tokens, width, width)
        shape = tokens, self.probes, width
        probes = torch.randn(shape, generator=generator, dtype=torch.float64)
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
        if not self.estimated:
            return np.sqrt(sums), None
        mean = sums / self.probes
        spread = squares / self.probes - mean**2
        # Rounding can bring the difference of equal squares below 0.
        variance = np.maximum(spread, 0) / (self.probes - 1)
        norm = np.sqrt(mean)
        quantile = widened_quantile(self.probes)
        with np.errstate(invalid="ignore", divide="ignore"):
            half = quantile * np.sqrt(variance) / (2 * norm)
        return norm, np.where(norm > 0, half, 0.0)


def scale_free_gradient(states: Tensor) -> Tensor:
    """Return the gradient of |h|₁/|h|₂ for rows of states; it is orthogonal to h."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    length = wide.norm(dim=-1, keepdim=True)
    absolute_sum = wide.abs().sum(-1, keepdim=True)
    gradient: Tensor = wide.sign() / length - absolute_sum * wide / length**3
    return gradient.to(states.dtype)


def widened_quantile(probes: int) -> float:
    """Return how many standard errors hold 95%.

    Squared norms of few probes are skewed to the right, the more so the fewer
    directions a Jacobian has, and Student's own quantile would hold too little. With a
    quarter of the degrees of freedom intervals hold what they state in the simulations
    of docs/calibration.md.
    """
    from scipy.stats import t

    freedom = max(1.0, (probes - 1) / 4)
    return float(t.ppf(0.975, freedom))


@dataclass
class Axes:
    """The two axes of a map: its sites, and its tokens, stack after stack."""

    sites: tuple[Site, ...]
    lengths: Mapping[str | None, int]
    starts: dict[str | None, int] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = {}
        start = 0
        for stack, length in self.lengths.items():
            self.starts[stack] = start
            start += length

    @property
    def tokens(self) -> int:
        """Return the number of tokens in all stacks."""
        return sum(self.lengths.values())

    @property
    def cells(self) -> tuple[int, int]:
        """Return the numbers of sites and tokens."""
        return len(self.sites), self.tokens

    @property
    def last_stack(self) -> str | None:
        """Return the name of the last stack, whose states predict tokens."""
        *_, last = self.lengths
        return last

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
        filled = np.zeros(self.cells, dtype=bool)
        for row, site in enumerate(self.sites):
            columns = self.columns(site.stack)
            filled[row, columns] = True
        return filled


@dataclass(frozen=True, eq=False)
class Measurement:
    """A measure of the influences in a model, on the axes of a map."""

    model: Model | RandomModel
    axes: Axes
    measure: InfluenceMeasure
    generator: torch.Generator

    @property
    def row_budget(self) -> int:
        """Return how many rows [token, width] go through a block together."""
        return ROW_BUDGET.get(self.model.device.type, ROW_BUDGET["cpu"])

    def vectors(self, states: Tensor) -> Tensor:
        """Return the vectors [token, vector, width] of states [token, width]."""
        return self.measure.vectors(states, self.generator)


class _Sums:
    """Sums of product sizes, [source site, target, source token], in float64."""

    def __init__(self, axes: Axes, targets: int, *, squares: bool) -> None:
        self.axes = axes
        shape = len(axes.sites), targets, axes.tokens
        self.first = torch.zeros(shape, dtype=torch.float64)
        self.second: Tensor | None = None
        if squares:
            self.second = torch.zeros(shape, dtype=torch.float64)
        self._rows = {site: row for row, site in enumerate(axes.sites)}

    def add(self, site: Site, sizes: Tensor, targets: Tensor) -> None:
        """Add the sizes [vector, token] at a source, each vector to its target."""
        sizes = sizes.cpu()
        count, tokens = sizes.shape
        # Vectors come from the top target down, so those that reach this source are the
        # first; a target below the source has no product there.
        targets = targets[:count]
        row = self._rows[site]
        start = self.axes.starts[site.stack]
        columns = slice(start, start + tokens)
        self.first[row, :, columns].index_add_(0, targets, sizes)
        if self.second is not None:
            squares = sizes.square()
            self.second[row, :, columns].index_add_(0, targets, squares)

    def arrays(self, *shape: int) -> tuple[Floats, Floats]:
        """Return the sums and the sums of squares.

        Both are [*shape, source site, source token]; the shape is that of the targets.
        """
        second = self.first if self.second is None else self.second
        return _by_target(self.first, shape), _by_target(second, shape)


def _by_target(sums: Tensor, shape: tuple[int, ...]) -> Floats:
    sites, _, tokens = sums.shape
    by_target = sums.transpose(0, 1)
    array: Floats = by_target.reshape(*shape, sites, tokens).numpy()
    return array


def influence_on_states(
    measurement: Measurement, text: Inputs, advance: Callable[[float], None]
) -> tuple[Floats, Floats | None]:
    """Return one text's map, and half the 95% interval where it is estimated.

    The map is [site, token, source site, source token].
    """
    axes, measure = measurement.axes, measurement.measure
    sums = _Sums(axes, len(axes.sites) * axes.tokens, squares=measure.estimated)
    norms = np.ones(axes.cells)
    for stack in axes.lengths:
        for span in _spans(measurement, stack):
            _add_span(measurement, text, span, sums, norms)
            advance(len(span.sites) * len(span.tokens))
    values, half = measure.values(*sums.arrays(*axes.cells))
    if measure.name == "relative":
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = norms[None, None] / norms[:, :, None, None]
        values = values * scale
        half = None if half is None else half * scale
    _check_finite(values, axes)
    return values, half


def _add_span(
    measurement: Measurement, text: Inputs, span: "_Span", sums: _Sums, norms: Floats
) -> None:
    """Add the influences on the states of a span, and put their norms."""
    axes, measure = measurement.axes, measurement.measure
    sources = [site for site in axes.sites if not site > span.sites[-1]]
    text = cut_texts(text, span.stack, span.tokens.stop)
    run = tape(measurement.model, text, sources)
    seeds = _span_seeds(measurement, run, span)
    most = _most_vectors(measurement, span.tokens.stop)
    for batch in batched(run, seeds, most):
        for site, products in run.pull(batch.vectors):
            sums.add(site, measure.size(products), batch.targets)
    first = axes.starts[span.stack]
    columns = slice(first + span.tokens.start, first + span.tokens.stop)
    for site in span.sites:
        states = run.values(site)[span.tokens.start :].double()
        row = axes.sites.index(site)
        norms[row, columns] = states.norm(dim=-1).cpu()


def _most_vectors(measurement: Measurement, tokens: int) -> int:
    """Return how many vectors go backward together through a pass of so many tokens."""
    # Their targets lie at many sites, so about half of them have begun at a block.
    return max(1, 2 * measurement.row_budget // tokens)


def _span_seeds(measurement: Measurement, run: Tape, span: "_Span") -> Iterator[Seed]:
    """Yield the vectors of all states of a span, from the top down."""
    axes = measurement.axes
    for site in sorted(span.sites, reverse=True):
        states = run.values(site)[span.tokens.start :]
        row = axes.sites.index(site)
        # Targets are numbered row after row of the map.
        first = row * axes.tokens + axes.starts[span.stack]
        vectors = measurement.vectors(states)
        for token, of_token in zip(span.tokens, vectors, strict=True):
            yield Seed(first + token, site, token, of_token)


def influence_on_targets(
    measurement: Measurement, text: Inputs, targets: Sequence[DrawnTarget]
) -> Floats:
    """Return the influence on some states of a text, [target, source site, token].

    A relative influence is not divided by the norm of its target: callers take shares
    of each target, in which that norm cancels.
    """
    axes, measure = measurement.axes, measurement.measure
    sums = _Sums(axes, len(targets), squares=measure.estimated)
    # The pass is made once; all vectors go backward through it together.
    run = tape(measurement.model, text, axes.sites)
    seeds = _target_seeds(measurement, run, targets)
    most = _most_vectors(measurement, axes.tokens)
    for batch in batched(run, seeds, most):
        for site, products in run.pull(batch.vectors):
            sums.add(site, measure.size(products), batch.targets)
    values, _ = measure.values(*sums.arrays(len(targets)))
    if measure.name == "relative":
        values = values * _norms(run, axes)
    _check_finite(values, axes)
    return values


def _norms(run: Tape, axes: Axes) -> Floats:
    """Return the norms of all states, [site, token]."""
    norms = []
    for site in axes.sites:
        states = run.values(site).double()
        norms.append(states.norm(dim=-1))
    stacked: Floats = torch.stack(norms).cpu().numpy()
    return stacked


def _target_seeds(
    measurement: Measurement, run: Tape, targets: Sequence[DrawnTarget]
) -> Iterator[Seed]:
    """Yield the vectors of drawn targets, from the top down."""
    sites = [measurement.axes.sites[target.row] for target in targets]
    order = sorted(range(len(targets)), key=sites.__getitem__)
    for number in reversed(order):
        token = targets[number].token
        states = run.values(sites[number])
        (vectors,) = measurement.vectors(states[token : token + 1])
        yield Seed(number, sites[number], token, vectors)


def influence_on_log_probability(
    measurement: Measurement,
    text: Inputs,
    predicted: Sequence[int],
    advance: Callable[[float], None],
) -> Floats:
    """Return one text's map [token, source site, source token].

    It is of the log-probability of one predicted token at each place.
    """
    axes = measurement.axes
    stack = axes.last_stack
    length = axes.lengths[stack]
    sums = _Sums(axes, length, squares=False)
    for tokens in _ranges(measurement, Site(0, "", stack), length, 1):
        part = cut_texts(text, stack, tokens.stop)
        run = tape(measurement.model, part, axes.sites, logits=True)
        outputs = _log_probabilities(run, predicted[: tokens.stop])
        _add_outputs(measurement, run, outputs, tokens, sums)
        advance(len(tokens))
    squares, _ = sums.arrays(length)
    values: Floats = np.sqrt(squares)
    _check_finite(values, axes)
    return values


def _log_probabilities(run: Tape, predicted: Sequence[int]) -> Tensor:
    """Return the log-probability of the token predicted at each place."""
    assert run.logits is not None
    wide = torch.promote_types(run.logits.dtype, torch.float32)
    ids = torch.tensor(predicted, device=run.logits.device)
    with autograd.restored(), torch.enable_grad():
        log_probabilities = run.logits.to(wide).log_softmax(-1)
        of_predicted = log_probabilities.gather(-1, ids[:, None])
        return of_predicted[:, 0]


def _add_outputs(
    measurement: Measurement, run: Tape, outputs: Tensor, tokens: range, sums: _Sums
) -> None:
    """Add the influences on the outputs [token] of a pass at some tokens."""
    assert run.logits is not None
    units = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
    vocabulary = run.logits.shape[1]
    most = max(1, measurement.row_budget * ROW_WIDTH // vocabulary)
    for start in range(0, len(tokens), most):
        targets = torch.tensor(tokens[start : start + most])
        vectors = units[targets.to(units.device)]
        for site, products in run.pull({}, (outputs, vectors)):
            sums.add(site, measurement.measure.size(products), targets)


def cut_texts(inputs: Inputs, stack: str | None, length: int) -> Inputs:
    """Cut the texts of one stack; the texts of the other stay whole."""
    if stack == "decoder" and inputs.targets is not None:
        targets = cut_texts(inputs.targets, None, length)
        return inputs.with_targets(targets)
    ids = tuple(text[:length] for text in inputs.ids)
    spans = inputs.spans
    if spans:
        spans = tuple(row[:length] for row in spans)
    return Inputs(ids, inputs.texts, spans, inputs.targets)


class _Span(NamedTuple):
    """The sites of a stack, and a piece of its tokens that has a pass of its own."""

    stack: str | None
    sites: list[Site]
    tokens: range


def _spans(measurement: Measurement, stack: str | None) -> Iterator[_Span]:
    """Yield the spans of a stack; none where it has no sites."""
    axes, anatomy = measurement.axes, measurement.model.anatomy
    sites = [axes.sites[row] for row in axes.rows(stack)]
    if not sites:
        return
    widths = map(anatomy.width, sites)
    vectors = sum(map(measurement.measure.count, widths))
    for tokens in _ranges(measurement, sites[0], axes.lengths[stack], vectors):
        yield _Span(stack, sites, tokens)


def _ranges(
    measurement: Measurement, site: Site, length: int, vectors: int
) -> Iterator[range]:
    """Cut the target tokens of a causal stack into pieces with a pass of their own.

    The pass of a piece ends with it, so no product is computed for later tokens. All
    vectors together take `vectors * length**2` rows, and each piece gets as many as go
    through a block together.
    """
    model = measurement.model
    # Beyond this length LongRoPE scales positions, so the start of a text run without
    # the rest would have other states.
    switch = model.batching.rope_switch
    is_long = switch is not None and length > switch
    count = 1
    if model.anatomy.stack(site).causal and not is_long:
        passes = round(vectors * length**2 / measurement.row_budget)
        count = min(length, max(1, passes))
    ends = [round(length * part / count) for part in range(count + 1)]
    return itertools.starmap(range, itertools.pairwise(ends))


def _check_finite(values: Floats, axes: Axes) -> None:
    """Refuse a map that holds a NaN or an infinity."""
    finite = np.isfinite(values)
    if finite.all():
        return
    place = np.argwhere(~finite)[0]
    *_, row, token = place
    value = values[tuple(place)]
    raise NotFinite(
        "An influence is not finite",
        f"that of {axes.sites[row]} at token {token} is {value}",
        "Look at the states with profile(), or choose other sites.",
    )

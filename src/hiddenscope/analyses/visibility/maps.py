"""Maps of influence: a measure of the Jacobian between every pair of states of a text.

The vectors of every target go through the model together, from the top down, and their
products with the Jacobian are met at every source on the way.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.analyses.visibility.sampling import DrawnTarget
from hiddenscope.analyses.visibility.story import INTERVENTIONS, MeasureName
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs
from hiddenscope.passes.jacobian import Tape, tape
from hiddenscope.progress import Advance
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Bools, Floats

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

    name: MeasureName
    probes: int = 0
    seed: int = 0

    @classmethod
    def of(
        cls, name: MeasureName, probes: int | None, seed: int, width: int
    ) -> "InfluenceMeasure":
        """Return a measure of states of this width.

        A Frobenius norm is exact for narrow states, and with as many probes as the
        width.
        """
        if name in ONE_VECTOR or name in INTERVENTIONS:
            if probes is not None:
                reason = "it is exact with one vector for each target"
                if name in INTERVENTIONS:
                    reason = "it replaces states, and is exact"
                raise StatesError(
                    f"Cannot use probes for {name}",
                    reason,
                    "Leave `probes` out, or choose frobenius.",
                )
            return cls(name)
        if probes is None:
            probes = width if width <= EXACT_WIDTH else DEFAULT_PROBES
        return cls(name, probes if probes < width else 0, seed)

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
            # The gradient of |h|₁/|h|₂, which is orthogonal to h.
            wide = states.to(torch.promote_types(states.dtype, torch.float32))
            length = wide.norm(dim=-1, keepdim=True)
            absolute_sum = wide.abs().sum(-1, keepdim=True)
            gradient: Tensor = wide.sign() / length - absolute_sum * wide / length**3
            return gradient.to(states.dtype)[:, None]
        tokens, width = states.shape
        if not self.estimated:
            units = torch.eye(width, dtype=states.dtype, device=states.device)
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
        return norms.double() ** order

    def values(self, sums: Floats, squares: Floats) -> tuple[Floats, Floats]:
        """Return the measure, and half of its 95% interval: 0 where it is exact.

        Squared norms of few probes are skewed to the right, the more so the fewer
        directions a Jacobian has, and Student's own quantile would hold too little.
        With a quarter of the degrees of freedom intervals hold what they state in the
        simulations of docs/calibration.md.
        """
        exact = np.zeros(())
        if self.name == "l1":
            return sums, exact
        if not self.estimated:
            return np.sqrt(sums), exact
        from scipy.stats import t

        mean = sums / self.probes
        spread = squares / self.probes - mean**2
        # Rounding can bring the difference of equal squares below 0.
        variance = np.maximum(spread, 0) / (self.probes - 1)
        norm = np.sqrt(mean)
        quantile = float(t.ppf(0.975, max(1.0, (self.probes - 1) / 4)))
        with np.errstate(invalid="ignore", divide="ignore"):
            half = quantile * np.sqrt(variance) / (2 * norm)
        return norm, np.where(norm > 0, half, 0.0)


class Axes(NamedTuple):
    """The two axes of a map: its sites, and its tokens, stack after stack."""

    sites: tuple[Site, ...]
    lengths: Mapping[str | None, int]

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
        return [*self.lengths][-1]

    def columns(self, stack: str | None) -> slice:
        """Return where the tokens of a stack are."""
        before = [*self.lengths].index(stack)
        start = sum([*self.lengths.values()][:before])
        return slice(start, start + self.lengths[stack])

    def rows(self, stack: str | None) -> list[int]:
        """Return where the sites of a stack are."""
        return [row for row, site in enumerate(self.sites) if site.stack == stack]

    @property
    def filled(self) -> Bools:
        """Mark the cells [site, token] that hold a state: those of the site's stack."""
        filled = np.zeros(self.cells, dtype=bool)
        for row, site in enumerate(self.sites):
            filled[row, self.columns(site.stack)] = True
        return filled


class Measurement(NamedTuple):
    """A measure of the influences in a model, on the axes of a map."""

    model: Model
    axes: Axes
    measure: InfluenceMeasure
    generator: torch.Generator

    @property
    def row_budget(self) -> int:
        """Return how many rows [token, width] go through a block together."""
        return ROW_BUDGET.get(self.model.device.type, ROW_BUDGET["cpu"])


class Seed(NamedTuple):
    """The vectors [vector, width] of one target, and where in a text they start."""

    target: int
    site: Site
    token: int
    vectors: Tensor


class _Sums:
    """Sums of product sizes, [source site, target, source token], in float64.

    With `squares` there are also sums of their squares.
    """

    def __init__(self, axes: Axes, targets: int, *, squares: bool) -> None:
        self.axes = axes
        shape = 1 + squares, len(axes.sites), targets, axes.tokens
        self.powers = torch.zeros(shape, dtype=torch.float64)

    def add(self, site: Site, sizes: Tensor, targets: Tensor) -> None:
        """Add the sizes [vector, token] at a source, each vector to its target."""
        sizes = sizes.cpu()
        count, tokens = sizes.shape
        row = self.axes.sites.index(site)
        start = self.axes.columns(site.stack).start
        for power, sums in enumerate(self.powers, 1):
            # Vectors come from the top target down, so those that reach this source are
            # the first; a target below the source has no product there.
            sums[row, :, start : start + tokens].index_add_(
                0, targets[:count], sizes**power
            )

    def add_products(
        self, measurement: Measurement, run: Tape, seeds: Iterable[Seed], tokens: int
    ) -> None:
        """Add the products of all seeds, which come from the top down."""
        # Their targets lie at many sites, so about half of them have begun at a block.
        most = max(1, 2 * measurement.row_budget // tokens)
        for batch in _batches(seeds, most):
            starts: dict[Site, list[Tensor]] = {}
            targets = []
            for seed in batch:
                states = run.values(seed.site)
                start = states.new_zeros((len(seed.vectors), *states.shape))
                start[:, seed.token] = seed.vectors
                starts.setdefault(seed.site, []).append(start)
                targets += [seed.target] * len(seed.vectors)
            vectors = {site: torch.cat(parts) for site, parts in starts.items()}
            for site, products in run.pull(vectors):
                sizes = measurement.measure.size(products)
                self.add(site, sizes, torch.tensor(targets))

    def values(
        self, measure: InfluenceMeasure, *shape: int, scale: Floats | float = 1.0
    ) -> tuple[Floats, Floats]:
        """Return the measure and half of its interval, both times a scale.

        Both are [*shape, source site, source token]; the shape is that of the targets.
        """
        _, sites, _, tokens = self.powers.shape
        by_target = self.powers.transpose(1, 2).reshape(-1, *shape, sites, tokens)
        arrays = by_target.numpy()
        values, half = measure.values(arrays[0], arrays[-1])
        values *= scale
        finite = np.isfinite(values)
        if not finite.all():
            *place, row, token = np.argwhere(~finite)[0]
            value = values[(*place, row, token)]
            raise NotFinite(
                "An influence is not finite",
                f"that of {self.axes.sites[row]} at token {token} is {value}",
                "Look at the states with profile(), or choose other sites.",
            )
        return values, half * scale


def _batches(seeds: Iterable[Seed], most: int) -> Iterator[list[Seed]]:
    """Yield batches of at most `most` vectors; a target with more is split."""
    batch: list[Seed] = []
    size = 0
    for seed in seeds:
        for vectors in torch.split(seed.vectors, most):
            if size + len(vectors) > most:
                yield batch
                batch, size = [], 0
            batch.append(seed._replace(vectors=vectors))
            size += len(vectors)
    yield batch


def influence_on_states(
    measurement: Measurement, text: Inputs, advance: Advance
) -> tuple[Floats, Floats]:
    """Return one text's map, and half the 95% interval where it is estimated.

    The map is [site, token, source site, source token].
    """
    axes, measure, model = measurement.axes, measurement.measure, measurement.model
    sums = _Sums(axes, len(axes.sites) * axes.tokens, squares=measure.estimated)
    norms = np.ones(axes.cells)

    def seeds(run: Tape, rows: list[int], first: int, tokens: range) -> Iterator[Seed]:
        """Yield the vectors of the states of some tokens, and put their norms."""
        for row in sorted(rows, key=axes.sites.__getitem__, reverse=True):
            site = axes.sites[row]
            states = run.values(site)[tokens.start :]
            columns = slice(first + tokens.start, first + tokens.stop)
            norms[row, columns] = states.double().norm(dim=-1).cpu()
            vectors = measure.vectors(states, measurement.generator)
            for token, of_token in zip(tokens, vectors, strict=True):
                # Targets are numbered row after row of the map.
                yield Seed(row * axes.tokens + first + token, site, token, of_token)

    for stack in axes.lengths:
        rows = axes.rows(stack)
        if not rows:
            continue
        last = axes.sites[rows[-1]]
        sources = [site for site in axes.sites if not site > last]
        widths = [model.anatomy.width(axes.sites[row]) for row in rows]
        for tokens in _pieces(measurement, stack, sum(map(measure.count, widths))):
            run = tape(model, cut_texts(text, stack, tokens.stop), sources)
            of_piece = seeds(run, rows, axes.columns(stack).start, tokens)
            sums.add_products(measurement, run, of_piece, tokens.stop)
            advance(len(rows) * len(tokens))
    if measure.name != "relative":
        return sums.values(measure, *axes.cells)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = norms / norms[:, :, None, None]
    return sums.values(measure, *axes.cells, scale=scale)


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

    def seeds() -> Iterator[Seed]:
        sites = [axes.sites[target.row] for target in targets]
        order = sorted(range(len(targets)), key=sites.__getitem__)
        for number in reversed(order):
            token = targets[number].token
            state = run.values(sites[number])[token : token + 1]
            (vectors,) = measure.vectors(state, measurement.generator)
            yield Seed(number, sites[number], token, vectors)

    sums.add_products(measurement, run, seeds(), axes.tokens)
    scale: Floats | float = 1.0
    if measure.name == "relative":
        norms = [run.values(site).double().norm(dim=-1) for site in axes.sites]
        scale = torch.stack(norms).cpu().numpy()
    return sums.values(measure, len(targets), scale=scale)[0]


def influence_on_log_probability(
    measurement: Measurement,
    text: Inputs,
    predicted: Sequence[int],
    advance: Advance,
) -> tuple[Floats, Floats]:
    """Return one text's map [token, source site, source token], which is exact.

    It is of the log-probability of one predicted token at each place.
    """
    axes, measure = measurement.axes, measurement.measure
    stack = axes.last_stack
    sums = _Sums(axes, axes.lengths[stack], squares=False)
    for tokens in _pieces(measurement, stack, 1):
        part = cut_texts(text, stack, tokens.stop)
        run, outputs = _predict(measurement, part, predicted)
        units = torch.eye(len(outputs), dtype=outputs.dtype, device=outputs.device)
        assert run.logits is not None
        most = max(1, measurement.row_budget * ROW_WIDTH // run.logits.shape[1])
        for start in range(0, len(tokens), most):
            targets = torch.tensor(tokens[start : start + most])
            vectors = units[targets.to(units.device)]
            for site, products in run.pull({}, (outputs, vectors)):
                sums.add(site, measure.size(products), targets)
        advance(len(tokens))
    return sums.values(measure, axes.lengths[stack])


def influence_on_next_tokens(
    measurement: Measurement, text: Inputs, predicted: Sequence[int], targets: set[int]
) -> Floats:
    """Return the influence on some predictions of a causal text.

    It is [token, source site, source token], 0 for other predictions. No token of the
    last site sees another, so one backward pass through the head serves all of them:
    that makes a long text several times faster than one vector for each prediction.
    """
    axes, measure = measurement.axes, measurement.measure
    top = max(axes.sites)
    sums = _Sums(axes, axes.tokens, squares=False)
    for tokens in _pieces(measurement, None, 1):
        wanted = targets.intersection(tokens)
        part = cut_texts(text, None, tokens.stop)
        run, outputs = _predict(measurement, part, predicted)
        end = run.states[top].end
        (gradient,) = torch.autograd.grad(outputs, end, torch.ones_like(outputs))
        seeds = [Seed(token, top, token, gradient[:, token]) for token in wanted]
        if seeds:
            sums.add_products(measurement, run, seeds, tokens.stop)
    return sums.values(measure, axes.tokens)[0]


def _predict(
    measurement: Measurement, text: Inputs, predicted: Sequence[int]
) -> tuple[Tape, Tensor]:
    """Run a text, and return the log-probability of one token at each place."""
    run = tape(measurement.model, text, measurement.axes.sites, logits=True)
    assert run.logits is not None
    wide = torch.promote_types(run.logits.dtype, torch.float32)
    ids = torch.tensor(predicted[: len(run.logits)], device=run.logits.device)
    with autograd.restored(), torch.enable_grad():
        log_probabilities = run.logits.to(wide).log_softmax(-1)
        return run, log_probabilities.gather(-1, ids[:, None])[:, 0]


def _needs_whole(model: Model, length: int) -> bool:
    """Tell whether the start of a text has other states if it is run without the rest.

    Beyond some length LongRoPE scales positions.
    """
    switch = model.batching.rope_switch
    return switch is not None and length > switch


def cut_after(model: Model, text: Inputs, stack: str | None, length: int) -> Inputs:
    """Cut off the end of a text, unless its start would then have other states."""
    whole = _needs_whole(model, text.lengths[0])
    return text if whole else cut_texts(text, stack, length)


def cut_texts(inputs: Inputs, stack: str | None, length: int) -> Inputs:
    """Cut the texts of one stack; the texts of the other stay whole."""
    if stack == "decoder" and inputs.targets is not None:
        return inputs.with_targets(cut_texts(inputs.targets, None, length))
    ids = tuple(text[:length] for text in inputs.ids)
    spans = inputs.spans and tuple(row[:length] for row in inputs.spans)
    return Inputs(ids, inputs.texts, spans, inputs.targets)


def _pieces(
    measurement: Measurement, stack: str | None, vectors: int
) -> Iterator[range]:
    """Cut the target tokens of a causal stack into pieces with a pass of their own.

    The pass of a piece ends with it, so no product is computed for later tokens. All
    vectors together take `vectors * length**2` rows, and each piece gets as many as go
    through a block together.
    """
    length = measurement.axes.lengths[stack]
    count = 1
    model = measurement.model
    causal = model.anatomy.stack_named(stack).causal
    if causal and not _needs_whole(model, length):
        passes = round(vectors * length**2 / measurement.row_budget)
        count = min(length, max(1, passes))
    ends = [round(length * part / count) for part in range(count + 1)]
    return itertools.starmap(range, itertools.pairwise(ends))

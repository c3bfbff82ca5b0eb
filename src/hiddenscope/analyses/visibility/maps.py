"""The map itself: every target's vectors taken through the model, and what is met at every source added up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hiddenscope.analyses.visibility.measures import Measure, Numbers
from hiddenscope.errors import NotFinite
from hiddenscope.model import Model
from hiddenscope.passes import Batch
from hiddenscope.passes.jacobian import Tape, tape
from hiddenscope.sites import Site

ROWS = {"cpu": 1024, "cuda": 65_536}  # how many rows [token, width] go through a block together, about
SMALLEST = 768  # how wide such a row is thought to be, where logits are as wide as a vocabulary


@dataclass(frozen=True)
class Text:
    """One text: the ids of each stack's tokens, by the name that its sites carry, and the ids that are predicted."""

    ids: Mapping[str | None, tuple[int, ...]]
    asked: tuple[int, ...] = ()

    def batch(self, model: Model, stack: str | None, length: int) -> Batch:
        """The text as far as a token of one stack; an encoder is always given whole."""
        kept = {name: ids[:length] if name == stack else ids for name, ids in self.ids.items()}
        pad = model.encoder.pad
        aims = Batch.of([kept["decoder"]], pad, model.device) if "decoder" in kept else None
        return Batch.of([kept.get(None) or kept["encoder"]], pad, model.device, aims)


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

    @property
    def there(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Which cells [site, token] are states: those of a site's own stack."""
        cells = np.zeros((len(self.sites), self.tokens), dtype=bool)
        for row, site in enumerate(self.sites):
            cells[row, self.columns(site.stack)] = True
        return cells


class Sums:
    """What has been met at each source, [source site, target, source token], added up over vectors in float64."""

    def __init__(self, axes: Axes, targets: int, *, squares: bool) -> None:
        self.axes = axes
        shape = len(axes.sites), targets, axes.tokens
        self.first = torch.zeros(shape, dtype=torch.float64)
        self.second = torch.zeros(shape, dtype=torch.float64) if squares else None
        self._rows = {site: row for row, site in enumerate(axes.sites)}

    def add(self, site: Site, sizes: Tensor, targets: Tensor) -> None:
        """Add sizes [vector, token] of products at a source, for vectors that belong to some targets."""
        sizes, start = sizes.cpu(), self.axes.starts[site.stack]
        columns = slice(start, start + sizes.shape[1])
        self.first[self._rows[site], :, columns].index_add_(0, targets, sizes)
        if self.second is not None:
            self.second[self._rows[site], :, columns].index_add_(0, targets, sizes.square())

    def arrays(self, *shape: int) -> tuple[Numbers, Numbers]:
        """Both sums as [*shape, source site, source token], the targets in the shape that they have."""
        both = (self.first, self.first if self.second is None else self.second)
        first, second = (one.transpose(0, 1).reshape(*shape, *one.shape[::2]).numpy() for one in both)
        return first, second


def influence(
    model: Model,
    text: Text,
    axes: Axes,
    measure: Measure,
    advance: Callable[[float], None],
    *,
    generator: torch.Generator,
) -> tuple[Numbers, Numbers | None]:
    """One text's map [site, token, source site, source token], and half the 95% interval where it is estimated.

    Texts that are averaged take their probes from one `generator`, one after another: so their errors are independent.
    """
    sums = Sums(axes, len(axes.sites) * axes.tokens, squares=measure.probes > 0)
    norms = np.ones((len(axes.sites), axes.tokens))
    for name, length in axes.lengths.items():
        sites = [site for site in axes.sites if site.stack == name]
        if not sites:
            continue
        seen = [site for site in axes.sites if not site > sites[-1]]
        vectors = sum(measure.count(model.anatomy.width(site)) for site in sites)
        for start, end in _spans(model, sites[0], length, vectors):
            run = tape(model, text.batch(model, name, end), seen)
            for seeds, targets in _chunks(model, run, axes, sites, (start, end), measure, generator):
                for site, products in run.pull(seeds):
                    sums.add(site, measure.size(products), targets[: len(products)])
            for site in sites:
                columns = slice(axes.starts[name] + start, axes.starts[name] + end)
                norms[axes.sites.index(site), columns] = run.values(site)[start:end].double().norm(dim=-1).cpu()
            advance(len(sites) * (end - start))
    values, half = measure.values(*sums.arrays(len(axes.sites), axes.tokens))
    if measure.name == "relative":
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = norms[None, None] / norms[:, :, None, None]
        values, half = values * scale, None if half is None else half * scale
    return _finite(values, axes), half


def on_logits(
    model: Model, text: Text, axes: Axes, measure: Measure, advance: Callable[[float], None]
) -> tuple[Numbers, None]:
    """One text's map [token, source site, source token]: of the log-probability of one token at each place."""
    name = "decoder" if "decoder" in axes.lengths else None
    length = axes.lengths[name]
    sums = Sums(axes, length, squares=False)
    rows = ROWS.get(model.device.type, ROWS["cpu"])
    for start, end in _spans(model, Site(0, "", name), length, 1):
        run = tape(model, text.batch(model, name, end), axes.sites, logits=True)
        assert run.logits is not None
        ids = torch.tensor(text.asked[:end], device=run.logits.device)
        with torch.enable_grad():
            wide = run.logits if run.logits.dtype == torch.float64 else run.logits.float()
            said = wide.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        several = max(1, rows * SMALLEST // wide.shape[1])
        for first in range(start, end, several):
            targets = torch.arange(first, min(end, first + several))
            seeds = torch.eye(end, dtype=said.dtype, device=said.device)[targets.to(said.device)]
            for site, products in run.pull({}, (said, seeds)):
                sums.add(site, measure.size(products), targets[: len(products)])
        advance(end - start)
    return _finite(np.sqrt(sums.arrays(length)[0]), axes), None


def _spans(model: Model, site: Site, length: int, vectors: int) -> list[tuple[int, int]]:
    """Runs of target tokens, each of which is given only the text as far as its end, if that is all it can see.

    A run is as long as fills the rows that go through a block together: longer ones would see more than they need.
    """
    stack = model.anatomy.stack(site)
    if not stack.causal or (model.turn is not None and length > model.turn):
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
    measure: Measure,
    generator: torch.Generator,
) -> Iterator[tuple[dict[Site, Tensor], Tensor]]:
    """The vectors of every target of a span, as many at a time as go through together, and whose each is."""
    start, end = span
    room = max(1, 2 * ROWS.get(model.device.type, ROWS["cpu"]) // end)
    seeds: dict[Site, list[Tensor]] = {}
    targets: list[int] = []
    for site in sorted(sites, reverse=True):
        states = run.values(site)
        vectors = measure.vectors(states[start:end], generator)
        row = axes.sites.index(site) * axes.tokens + axes.starts[site.stack]
        for token, own in enumerate(vectors, start):
            for some in own.split(room):
                if len(targets) + len(some) > room and targets:
                    yield {one: torch.cat(parts) for one, parts in seeds.items()}, torch.tensor(targets)
                    seeds, targets = {}, []
                seed = states.new_zeros((len(some), *states.shape))
                seed[:, token] = some
                seeds.setdefault(site, []).append(seed)
                targets += [row + token] * len(some)
    yield {one: torch.cat(parts) for one, parts in seeds.items()}, torch.tensor(targets)


def _finite(values: Numbers, axes: Axes) -> Numbers:
    """The values, of which none may be a NaN or an infinity."""
    if np.isfinite(values).all():
        return values
    place = np.argwhere(~np.isfinite(values))[0]
    source = f"{axes.sites[place[-2]]} at token {place[-1]}"
    reason = f"that of {source} is {values[tuple(place)]}"
    raise NotFinite("The influence of every state", reason, "Look at its states with profile(), or choose other sites.")

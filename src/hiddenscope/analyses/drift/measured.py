"""Measured: what differs at every site and token, how much of it is local and how much inherited, against the noise.

With two live models each part is measured on equal input (`of_live`). With saved states, or a program that cannot be
entered in the middle, whole passes are compared (`of_passes`), and the noise is that of whole passes of the reference:
in float64, with another attention kernel, in another batch, with another number of threads, in the other's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope import autograd, hooks, progress, trials
from hiddenscope.analyses.drift.observe import (
    LOGITS,
    MARGIN,
    Gap,
    Live,
    Noise,
    Observed,
    attention_kernel,
    check_finite,
    gap,
    gap_of_blocks,
    observe,
)
from hiddenscope.analyses.drift.sides import alike, not_wider
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

Array: TypeAlias = NDArray[np.float64]
Taken: TypeAlias = Callable[[Sequence[int]], Tensor]
"""What gives some rows of a site."""

CELLS: Mapping[str, Mapping[str, str]] = {
    "relative": {"long_name": "relative error", "units": "L2 over the reference's norm", "scale": "log"},
    "max_abs": {"long_name": "largest absolute error", "scale": "log"},
    "cosine": {"long_name": "cosine of the two states"},
    "ulp": {
        "long_name": "largest error in units in the last place",
        "units": "ULP of the coarser dtype",
        "scale": "log",
    },
    "mismatched": {"long_name": "share of elements that differ by more than 8 ULP"},
    "local": {"long_name": "local error, on the reference's own input", "units": "L2 over the norm", "scale": "log"},
    "inherited": {"long_name": "inherited error", "units": "L2 over the norm", "scale": "log"},
}
MISMATCH = 8  # units in the last place


@dataclass
class Errors:
    """Every number of a comparison: cells by site and measure, and per site the noise and how far it is exceeded.

    `beyond` has one entry for each site and for the logits: over 1 is drift. `sources` say what the noise was made of.
    """

    tokens: dict[str | None, int]
    cells: dict[str, dict[str, Array]] = field(default_factory=dict)
    beyond: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    envelope: dict[str, float] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    first_batch: dict[str, Inputs] = field(default_factory=dict)
    observing_changed_nothing: bool | None = None
    passes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    kl: list[Array] = field(default_factory=list)
    top1: list[NDArray[np.bool_]] = field(default_factory=list)

    def put(self, name: str, measure: str, places: Sequence[int], values: Tensor) -> None:
        """Put the values of one batch to the rows of its tokens."""
        count = self.tokens[stack_of(name, self.tokens)]
        own = self.cells.setdefault(name, {})
        own.setdefault(measure, np.full(count, np.nan))[list(places)] = values.double().numpy()

    def judge(self, name: str, error: Gap, noise: Noise, batch: Inputs) -> None:
        """Hold an error against the noise; the worst of all batches and parts counts."""
        beyond = noise.beyond(error)
        if beyond >= self.beyond.get(name, -1.0):
            self.beyond[name], self.first_batch[name] = beyond, batch
        self.error[name] = max(self.error.get(name, 0.0), error.worst)
        self.envelope[name] = max(self.envelope.get(name, 0.0), MARGIN * noise.row)

    @property
    def drifting(self) -> list[str]:
        """The sites whose error is beyond the noise, in the order of the pass."""
        return [name for name, beyond in self.beyond.items() if beyond > 1]


def stack_of(name: str, tokens: Mapping[str | None, Any]) -> str | None:
    """The stack that a site, or the logits, belong to."""
    if len(tokens) == 1:
        return next(iter(tokens))
    return "decoder" if name == LOGITS else name.partition(".")[0]


def of_live(reference: Live, model: Model, candidate: Live, inputs: Inputs) -> Errors:
    """Two live models: one pass of each, one of the candidate on the reference's states, one in float64.

    A padded batch in which a NaN comes up is run again one text at a time.
    """
    batches = list(inputs.batches(model))
    if candidate.call is not None:
        return _part_by_part(reference, model, candidate, inputs, _one_by_one(inputs))
    try:
        return _part_by_part(reference, model, candidate, inputs, batches)
    except NotFinite:
        if not any(len(set(batch.costs)) > 1 for _, batch in batches):
            raise
    reference.passes = candidate.passes = 0
    errors = _part_by_part(reference, model, candidate, inputs, _one_by_one(inputs))
    errors.notes.append("Texts were run one at a time, because a NaN comes up in a padded batch.")
    return errors


def _one_by_one(inputs: Inputs) -> list[tuple[list[int], Inputs]]:
    return [([text], inputs.some([text])) for text in range(len(inputs))]


def _part_by_part(
    reference: Live, model: Model, candidate: Live, inputs: Inputs, batches: Sequence[tuple[list[int], Inputs]]
) -> Errors:
    errors = empty(inputs, reference)
    rounded = not_wider(candidate, reference)  # a candidate with more digits is compared in the reference's
    working = alike(reference, rounded)
    names = ("dtype", candidate.dtype != reference.dtype), ("kernel", working.kernel != reference.kernel)
    errors.sources = ["float64", *(name for name, differs in names if differs)]
    sites = [site for site in reference.sites() if site in candidate.taps]
    # The state that enters a block is not seen where the candidate leaves that block out.
    entries = {str(site) for site in sites if candidate.taps[site].side == "input"}
    has_head = False
    with progress.track("Comparing", total=len(batches)) as advance:
        for texts, batch in reversed(batches):  # the shortest texts first: the self-check is made on these
            true = observe(working, batch, sites, noise=True)
            plain = true if working is reference else observe(reference, batch, sites)
            whole = observe(candidate, batch, sites)
            _check(plain, whole, inputs, texts, model)
            has_head = has_head or LOGITS in plain.rows
            free = whole if rounded is candidate else observe(rounded, batch, sites)
            equal = observe(rounded, batch, sites, put=_layers(true))
            runs = _Runs(plain, true, whole, free, equal)
            _compare_batch(errors, runs, batch, places_of(inputs, texts, errors.tokens), entries)
            if errors.observing_changed_nothing is None:
                sides = [(reference, plain), (candidate, whole)]
                errors.observing_changed_nothing = all(unchanged(side, batch, seen) for side, seen in sides)
            advance(1)
    errors.passes = passes_of((reference, working), (candidate, rounded), len(batches))
    if has_head and LOGITS not in errors.beyond:
        errors.notes.append("The candidate gives no logits of the reference's shape: they were not compared.")
    ordered(errors, sites)
    return errors


@dataclass(frozen=True)
class _Runs:
    """The passes of one batch.

    `plain` is the reference and `true` the same in the dtype and with the kernel that both are compared in; `whole` is
    the candidate, `free` the same in that dtype, and `equal` the same on the reference's states.
    """

    plain: Observed
    true: Observed
    whole: Observed
    free: Observed
    equal: Observed


def empty(inputs: Inputs, reference: Live) -> Errors:
    """The errors of some texts, before any was measured."""
    stacks = reference.anatomy.stacks
    names = [stack.name for stack in stacks] if len(stacks) > 1 else [None]
    return Errors({name: sum(inputs.of(name).lengths) for name in names})


def places_of(inputs: Inputs, texts: Sequence[int], stacks: Mapping[str | None, int]) -> dict[str | None, list[int]]:
    """The rows of a batch's tokens among all, stack by stack."""
    places: dict[str | None, list[int]] = {}
    for stack in stacks:
        lengths = inputs.of(stack).lengths
        starts = np.concatenate([[0], np.cumsum(lengths)])
        places[stack] = [row for text in texts for row in range(starts[text], starts[text + 1])]
    return places


def _compare_batch(
    measured: Errors,
    runs: _Runs,
    batch: Inputs,
    places: Mapping[str | None, Sequence[int]],
    entries: Collection[str],
) -> None:
    """Compare the passes of one batch."""
    plain, true, whole, free, equal = runs.plain, runs.true, runs.whole, runs.free, runs.equal
    for name, rows in true.rows.items():
        main = main_site(name)
        if name not in free.rows or name not in equal.rows:
            if main == name and name not in entries and name != LOGITS:
                measured.judge(name, Gap(torch.full((1,), torch.inf), torch.inf), true.noise[name], batch)
            continue
        rows_here = places[stack_of(name, measured.tokens)]
        if rows.shape != equal.rows[name].shape:  # a head of its own
            continue
        local = gap(rows, equal.rows[name])
        measured.judge(main, local, true.noise[name], batch)
        if main == name:
            for measure, values in cells(plain.rows[name], whole.rows[name]).items():
                measured.put(name, measure, rows_here, values)
            norms = rows.double().norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
            inherited = (free.rows[name].double() - equal.rows[name].double()).norm(dim=-1) / norms
            measured.put(name, "local", rows_here, local.rows)
            measured.put(name, "inherited", rows_here, inherited)
    if LOGITS in plain.rows and LOGITS in whole.rows and plain.rows[LOGITS].shape == whole.rows[LOGITS].shape:
        add_consequences(measured, plain.rows[LOGITS], whole.rows[LOGITS])


def _layers(seen: Observed) -> dict[str, Tensor]:
    """The whole layers and final: what is put in their place is where each part starts."""
    return {name: rows for name, rows in seen.rows.items() if main_site(name) == name and name != LOGITS}


def main_site(name: str) -> str:
    """The site that a branch of a block counts for."""
    for part in ("attn", "cross", "mlp"):
        name = name.removesuffix(f".{part}")
    return name


def passes_of(references: Sequence[Live], candidates: Sequence[Live], batches: int) -> dict[str, float]:
    """How many passes of each model a batch took; a model that serves as two sides is counted once."""

    def counted(sides: Sequence[Live]) -> float:
        return sum({id(side): side.passes for side in sides}.values()) / batches

    return {"reference": counted(references), "candidate": counted(candidates)}


def ordered(measured: Errors, sites: Sequence[Site]) -> None:
    """The judged sites in the order of the pass, the logits last."""
    order = [str(site) for site in sites if not site.part]
    names = [name for name in [*order, LOGITS] if name in measured.beyond]
    measured.beyond = {name: measured.beyond[name] for name in names}


def cells(one: Tensor, two: Tensor) -> dict[str, Tensor]:
    """Every measure of two sets of rows, row by row, in float64."""
    coarse = max((one.dtype, two.dtype), key=lambda dtype: torch.finfo(dtype).eps)
    a, b = one.double(), two.double()
    difference, norms = (b - a).abs(), a.norm(dim=-1)
    size = a.abs().maximum(a.square().mean(-1, keepdim=True).sqrt())
    ulp = torch.where(difference == 0, 0.0, difference / (torch.finfo(coarse).eps * size))
    products = (a * b).sum(-1) / (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    l2 = (b - a).norm(dim=-1)
    return {
        "relative": torch.where(l2 == 0, 0.0, l2 / norms),
        "max_abs": difference.amax(-1),
        "cosine": products.clamp(-1, 1),
        "ulp": ulp.amax(-1),
        "mismatched": (ulp > MISMATCH).double().mean(-1),
    }


def add_consequences(measured: Errors, one: Tensor, two: Tensor) -> None:
    """Put the KL divergence of the two outputs, and whether the top token changed, token by token."""
    kl, changed = divergence(one, two)
    measured.kl.append(kl.numpy())
    measured.top1.append(changed.numpy())


def divergence(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """The KL divergence of the second logits from the first in nats, and whether the top token differs, row by row."""
    p, q = one.double().log_softmax(-1), two.double().log_softmax(-1)
    terms = p.exp() * (p - q)
    return terms.nan_to_num(nan=0.0).sum(-1).clamp_min(0), one.argmax(-1) != two.argmax(-1)


def unchanged(side: Live, batch: Inputs, seen: Observed) -> bool:
    """Whether a pass without any hook gives the same output bit for bit."""
    with autograd.restored(inference=False), torch.no_grad():
        output = side.run(side.batch(batch))
    bare = hooks.first_tensor(output)
    return seen.output is not None and bare is not None and torch.equal(bare.cpu(), seen.output)


def _check(plain: Observed, free: Observed, inputs: Inputs, texts: Sequence[int], model: Model) -> None:
    """Refuse numbers that are not finite, on the side where they first come up."""
    check = not_finite(inputs, texts, model)
    for who, seen in (("reference", plain), ("candidate", free)):
        for name, rows in seen.rows.items():
            check(who, name, rows)


def not_finite(inputs: Inputs, texts: Sequence[int], model: Model) -> Callable[[str, str, Tensor], None]:
    """A check of the rows of some texts: it refuses a NaN or an infinity, and names side, site and token."""
    stacks: dict[str | None, Any] = {"encoder": 0, "decoder": 0} if model.encoder_decoder else {None: 0}

    def shown(name: str, row: int) -> str:
        own = inputs.of(stack_of(name, stacks))
        for text in texts:
            if row < own.lengths[text]:
                token = model.text_encoder.string(own.ids[text][row])
                return f"{token!r} (text {text}, position {row})"
            row -= own.lengths[text]
        return f"row {row}"

    return lambda who, name, rows: check_finite(Observed({name: rows}), who, shown)


def of_passes(
    reference: Live,
    model: Model,
    given: Mapping[str, Taken],
    dtype: torch.dtype,
    inputs: Inputs,
) -> Errors:
    """A live reference against states that only whole passes can be compared with, given as rows of each site."""
    measured = empty(inputs, reference)
    sites = [site for site in reference.sites() if str(site) in given]
    batches = list(inputs.batches(model))
    for texts, batch in batches:
        plain = observe(reference, batch, sites)
        nulls = list(_null_passes(measured, reference, batch, sites, dtype))
        places = places_of(inputs, texts, measured.tokens)
        for name in [*map(str, sites), LOGITS]:
            if name not in given or name not in plain.rows:
                continue
            rows_here = places[stack_of(name, measured.tokens)]
            theirs = given[name](rows_here)
            _refuse_infinite(theirs, name)
            gaps = [gap(plain.rows[name], null.rows[name]) for null in nulls]
            judge_rows(measured, name, (plain.rows[name], theirs), gaps, batch)
            for measure, values in cells(plain.rows[name], theirs).items():
                measured.put(name, measure, rows_here, values)
            if name == LOGITS:
                add_consequences(measured, plain.rows[name], theirs)
    measured.passes = {"reference": reference.passes / len(batches), "candidate": 0}
    ordered(measured, sites)
    return measured


def of_states(
    pairs: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    tokens: dict[str | None, int],
    computed_in: Collection[torch.dtype],
) -> Errors:
    """Two runs of which only the states are here, in blocks: the tolerance of their dtype stands for the noise.

    States may be stored in a wider dtype than they were computed in: the coarsest of all counts.
    """
    measured = Errors(tokens, sources=["tolerance"])
    for name, blocks in pairs.items():
        dtypes = set(computed_in)
        error = gap_of_blocks(_measuring(measured, name, blocks, dtypes))
        judge_gap(measured, name, error, _coarse(dtypes), [], Inputs(()))
    return measured


def _measuring(
    measured: Errors, name: str, blocks: Iterable[tuple[Tensor, Tensor]], dtypes: set[torch.dtype]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of two runs, measured token by token on their way."""
    done = 0
    for one, two in blocks:
        one, two = one.cpu(), two.cpu()
        check_finite(Observed({name: one}), "reference", partial(_row, "in row", done))
        check_finite(Observed({name: two}), "candidate", partial(_row, "row", done))
        for measure, values in cells(one, two).items():
            measured.put(name, measure, range(done, done + len(one)), values)
        dtypes |= {one.dtype, two.dtype}
        done += len(one)
        yield one, two


def _row(words: str, done: int, _: object, row: int) -> str:
    return f"{words} {done + row}"


def _coarse(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _refuse_infinite(rows: Tensor, name: str) -> None:
    check_finite(Observed({name: rows}), "candidate", lambda _, row: f"row {row}")


def judge_rows(measured: Errors, name: str, pair: tuple[Tensor, Tensor], nulls: Sequence[Gap], batch: Inputs) -> None:
    """Hold whole passes against each other, token by token: noise grows very differently from token to token."""
    judge_gap(measured, name, gap(*pair), _coarse(one.dtype for one in pair), nulls, batch)


def judge_gap(
    measured: Errors, name: str, error: Gap, coarse: torch.dtype, nulls: Sequence[Gap], batch: Inputs
) -> None:
    """Hold the gap between two passes, of which the coarser is in this dtype, against that of passes without fault."""
    unit = torch.finfo(coarse).eps
    if nulls:
        expected = torch.stack([null.rows for null in nulls]).amax(0)
        expected = expected.clamp_min(max(unit, float(expected.median()) / 2))
    else:
        depth = 0 if name == LOGITS else Site.parse(name).layer or 0
        expected = torch.full_like(error.rows, trials.tolerance(coarse, depth) / MARGIN)
    ratio = error.rows / (MARGIN * expected)
    beyond = float(ratio.max()) if len(ratio) else 0.0
    if beyond >= measured.beyond.get(name, -1.0):
        measured.beyond[name], measured.first_batch[name] = beyond, batch
    measured.error[name] = max(measured.error.get(name, 0.0), error.worst)
    measured.envelope[name] = max(measured.envelope.get(name, 0.0), float(MARGIN * expected.max()))


def _null_passes(
    measured: Errors, reference: Live, batch: Inputs, sites: Sequence[Site], dtype: torch.dtype
) -> Iterator[Observed]:
    """The reference against itself: each pass differs from its own in nothing but rounding."""
    measured.sources = []
    double = copy.deepcopy(reference.module).double()
    yield from _tried(measured, "float64", lambda: observe(_copy(reference, double), batch, sites))
    reference.passes += 1
    if dtype not in (reference.dtype, torch.float64):
        narrow = copy.deepcopy(reference.module)
        for weight in narrow.parameters():
            weight.data = weight.data.to(dtype)
        yield from _tried(measured, "dtype", lambda: observe(_copy(reference, narrow), batch, sites))
        reference.passes += 1
    else:
        yield from _tried(measured, "kernel_batch_threads", lambda: _otherwise(reference, batch, sites))


def _copy(reference: Live, module: torch.nn.Module) -> Live:
    return Live(reference.name, module, reference.anatomy, reference.pad, reference.dtype)


def _tried(measured: Errors, name: str, make: Callable[[], Observed]) -> Iterator[Observed]:
    """A null pass, where the model allows it."""
    try:
        made = make()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, PassError):
        return
    if name not in measured.sources:
        measured.sources.append(name)
    yield made


def _otherwise(reference: Live, batch: Inputs, sites: Sequence[Site]) -> Observed:
    """The same texts with another attention kernel, another number of threads, and one text at a time."""
    kernel = {"sdpa": "eager", "eager": "sdpa"}.get(reference.kernel, reference.kernel)
    doubled = len(batch) == 1
    parts = [batch.some([0, 0])] if doubled else [batch.some([text]) for text in range(len(batch))]
    before = reference.passes
    threads = 2 if torch.get_num_threads() == 1 else 1
    with attention_kernel(reference.module, kernel), hooks.threads(threads):
        seen = [observe(reference, part, sites) for part in parts]
    reference.passes = before + 1
    if doubled:
        return Observed({name: rows[: len(rows) // 2] for name, rows in seen[0].rows.items()})
    return Observed({name: torch.cat([one.rows[name] for one in seen]) for name in seen[0].rows})

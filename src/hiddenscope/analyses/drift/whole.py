"""Compare whole passes: with states that were saved, or with a program that cannot be
entered in the middle.

The noise is that of whole passes of the reference, each of which differs from its own
pass in nothing but rounding: in float64, in the other's dtype, or with another
attention kernel, another batch and another number of threads. They run on private
copies. Of two saved runs nothing can be measured, and the tolerance of their dtype
stands for the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.errors import (
    Errors,
    places_of,
    refuse_not_finite,
    stack_of,
)
from hiddenscope.analyses.drift.noise import Gap, Noise, coarsest, gap, gap_of_blocks
from hiddenscope.analyses.drift.observe import (
    LOGITS,
    Observed,
    ObservedState,
    Side,
    observe,
)
from hiddenscope.analyses.drift.parts import empty_errors
from hiddenscope.errors import PassError
from hiddenscope.model import Model
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import Convert, float64_copy, private_copy
from hiddenscope.modules.slow_dtypes import slowdown
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

RowReader: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Returns some rows of a site, by their numbers."""


def compare_passes(
    reference: Side,
    model: Model,
    other: Mapping[str, RowReader],
    dtype: torch.dtype,
    inputs: Inputs,
) -> Errors:
    """Compare a live reference with the rows of another run, computed in a dtype, site
    by site.
    """
    errors = empty_errors(inputs, reference)
    sites = [site for site in reference.sites if str(site) in other]
    batches = list(inputs.batches(model))
    for texts, batch in batches:
        observed = observe(reference, batch, sites)
        null_passes = list(_null_passes(errors, reference, batch, sites, dtype))
        places = places_of(inputs, texts, errors.tokens)
        for name in [*map(str, sites), LOGITS]:
            if name not in other or name not in observed.states:
                continue
            row_numbers = places[stack_of(name, errors.tokens)]
            rows = other[name](row_numbers)
            refuse_not_finite("candidate", name, rows, lambda _, row: f"row {row}")
            expected = observed.rows(name)
            gaps = [gap(expected, null.rows(name)) for null in null_passes]
            errors.judge(
                name,
                gap(expected, rows),
                _noise(name, gaps, [expected.dtype, rows.dtype]),
                batch,
            )
            errors.put_cells(name, row_numbers, expected, rows)
    errors.passes = {"reference": reference.passes / len(batches), "candidate": 0}
    errors.sort(sites)
    return errors


def compare_saved(
    runs: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    tokens: dict[str | None, int],
    computed_in: Collection[torch.dtype],
) -> Errors:
    """Compare two saved runs, given as pairs of blocks of rows for each site.

    States may be stored in a wider dtype than they were computed in: the coarsest of
    all counts.
    """
    errors = Errors(tokens, noise_sources=["tolerance"])
    for name, blocks in runs.items():
        dtypes = set(computed_in)
        error = gap_of_blocks(_measured(errors, name, blocks, dtypes))
        errors.judge(name, error, _noise(name, [], dtypes), Inputs(()))
    return errors


def _measured(
    errors: Errors,
    name: str,
    blocks: Iterable[tuple[Tensor, Tensor]],
    dtypes: set[torch.dtype],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Measure blocks of two runs token by token on their way."""
    done = 0
    for reference, candidate in blocks:
        expected, rows = reference.cpu(), candidate.cpu()
        for who, values in (("reference", expected), ("candidate", rows)):
            refuse_not_finite(who, name, values, partial(_row_name, done))
        errors.put_cells(name, range(done, done + len(expected)), expected, rows)
        dtypes |= {expected.dtype, rows.dtype}
        done += len(expected)
        yield expected, rows


def _noise(name: str, gaps: Sequence[Gap], dtypes: Iterable[torch.dtype]) -> Noise:
    dtype = coarsest(dtypes)
    if gaps:
        return Noise.of_passes(gaps, dtype)
    depth = 0 if name == LOGITS else Site.parse(name).layer or 0
    return replace(Noise.assumed(dtype, depth), channel=torch.inf)


def _null_passes(
    errors: Errors,
    reference: Side,
    batch: Inputs,
    sites: Sequence[Site],
    dtype: torch.dtype,
) -> Iterator[Observed]:
    """Run the reference in other ways that are as right, wherever the model allows
    them.
    """

    def run_copy(module: nn.Module) -> Observed:
        return observe(_with_module(reference, module), batch, sites)

    ways: dict[str, Callable[[], Observed]] = {
        "float64": lambda: run_copy(float64_copy(reference.module))
    }
    if dtype in (reference.dtype, torch.float64):
        ways["kernel_batch_threads"] = lambda: _run_otherwise(reference, batch, sites)
    else:
        # torch warns once, with a stack trace, that a CPU has no product in this dtype:
        # the trial hears it.
        slowdown(dtype)
        ways["dtype"] = lambda: run_copy(
            private_copy(reference.module, _parameters_to(dtype))
        )
    errors.noise_sources = []
    for name, run in ways.items():
        reference.passes += 1
        try:
            observed = run()
        except (
            RuntimeError,
            NotImplementedError,
            ValueError,
            TypeError,
            PassError,
        ) as error:
            errors.notes.append(
                f"The noise of `{name}` could not be measured:"
                f" {str(error).partition(chr(10))[0]}"
            )
            continue
        errors.noise_sources.append(name)
        yield observed


def _parameters_to(dtype: torch.dtype) -> Convert:
    """Make a conversion of parameters alone: models keep buffers such as rotary tables
    wider.
    """

    def convert(name: str, tensor: Tensor) -> Tensor:
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to(dtype) if is_weight else tensor

    return convert


def _with_module(reference: Side, module: nn.Module) -> Side:
    return replace(reference, module=module, passes=0)


def _run_otherwise(reference: Side, batch: Inputs, sites: Sequence[Site]) -> Observed:
    """Run the same texts with another attention kernel, another number of threads, and
    one text at a time.
    """
    kernel = {"sdpa": "eager", "eager": "sdpa"}.get(reference.kernel)
    other = _with_module(reference, private_copy(reference.module, attention=kernel))
    is_single = len(batch) == 1
    parts = (
        [batch.some([0, 0])]
        if is_single
        else [batch.some([text]) for text in range(len(batch))]
    )
    threads = 2 if torch.get_num_threads() == 1 else 1
    with hooks.threads(threads):
        passes = [observe(other, part, sites) for part in parts]
    merged = Observed()
    for name in passes[0].states:
        rows = torch.cat([observed.rows(name) for observed in passes])
        # A single text was run twice in one batch.
        count = len(rows) // 2 if is_single else len(rows)
        merged.keep(ObservedState(name, rows[:count]))
    return merged


def _row_name(start: int, text: int, row: int) -> str:
    return f"row {start + row}"

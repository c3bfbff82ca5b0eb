"""Compare whole passes, where the other side cannot be entered in the middle.

The other side is either saved states or a program that only returns tensors. The noise
comes from null passes: runs of private copies of the reference that differ from its own
pass in rounding alone, because they use float64, the other side's dtype, or another
attention kernel, batch size and number of threads. Two saved runs allow no measurement,
so the tolerance of their dtype is used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import raise_if_out_of_memory
from hiddenscope.analyses.drift.errors import (
    Errors,
    Where,
    places_of,
    refuse_not_finite,
    stack_of,
    token_finder,
)
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.noise import Noise, coarsest, gap, gap_of_blocks
from hiddenscope.analyses.drift.observe import Observed, ObservedState, observe
from hiddenscope.errors import PassError
from hiddenscope.model import Model
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import float64_copy, private_copy
from hiddenscope.modules.operations import slowdown
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

RowReader: TypeAlias = Callable[[Sequence[int]], Tensor]
"""Returns some rows of a site, by their numbers."""


def compare_passes(
    reference: LiveModel,
    model: Model,
    other: Mapping[str, RowReader],
    dtype: torch.dtype,
    inputs: Inputs,
    *,
    roles: tuple[str, str] = ("reference", "candidate"),
) -> Errors:
    """Compare a live reference with the rows of another run, site by site.

    `dtype` is the one that the other run was computed in. `roles` are what a message
    about a NaN calls the live model and the other run.
    """
    errors = Errors.for_texts(inputs, reference)
    sites = [site for site in reference.taps if str(site) in other]
    batches = list(inputs.batches(model))
    for texts, batch in batches:
        observed = observe(reference, batch, sites)
        null_passes = list(_null_passes(errors, reference, batch, sites, dtype))
        places = places_of(inputs, texts, errors.tokens)
        where = token_finder(inputs, texts, model.text_encoder, errors.tokens)
        for name in [*map(str, sites), LOGITS]:
            if name not in other or name not in observed.states:
                continue
            row_numbers = places[stack_of(name, errors.tokens)]
            rows = other[name](row_numbers)
            expected = observed.rows(name)
            refuse_not_finite(roles[0], name, expected, where)
            refuse_not_finite(roles[1], name, rows, where)
            coarse = coarsest([expected.dtype, rows.dtype])
            gaps = [gap(expected, null.rows(name)) for null in null_passes]
            noise = _assumed_noise(name, coarse)
            if gaps:
                noise = Noise.of_passes(gaps, coarse)
            errors.judge(name, gap(expected, rows), noise, batch)
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

    States may be stored in a wider dtype than they were computed in, so the coarsest
    of all dtypes counts.
    """
    errors = Errors(tokens, noise_sources=["tolerance"])
    for name, blocks in runs.items():
        dtypes = set(computed_in)
        error = gap_of_blocks(_measured(errors, name, blocks, dtypes))
        errors.judge(name, error, _assumed_noise(name, coarsest(dtypes)), Inputs(()))
    return errors


def _measured(
    errors: Errors,
    name: str,
    blocks: Iterable[tuple[Tensor, Tensor]],
    dtypes: set[torch.dtype],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of two runs while measuring them token by token."""
    start = 0
    for reference, candidate in blocks:
        expected, rows = reference.cpu(), candidate.cpu()
        refuse_not_finite("reference", name, expected, _rows_from(start))
        refuse_not_finite("candidate", name, rows, _rows_from(start))
        end = start + len(expected)
        errors.put_cells(name, range(start, end), expected, rows)
        dtypes |= {expected.dtype, rows.dtype}
        start = end
        yield expected, rows


def _rows_from(start: int) -> Where:
    return lambda name, row: f"row {start + row}"


def _assumed_noise(name: str, dtype: torch.dtype) -> Noise:
    depth = 0 if name == LOGITS else Site.parse(name).layer or 0
    return replace(Noise.assumed(dtype, depth), channel=torch.inf)


def _null_passes(
    errors: Errors,
    reference: LiveModel,
    batch: Inputs,
    sites: Sequence[Site],
    dtype: torch.dtype,
) -> Iterator[Observed]:
    """Run the reference in other, equally correct ways, where the model allows them."""

    def run_float64() -> Observed:
        copied = float64_copy(reference.module)
        return observe(_with_module(reference, copied), batch, sites)

    def run_narrow() -> Observed:
        # torch warns once, with a stack trace, if a CPU lacks products in this dtype.
        # The trial receives that warning instead of the user.
        slowdown(dtype)
        copied = private_copy(reference.module, convert)
        return observe(_with_module(reference, copied), batch, sites)

    def convert(name: str, tensor: Tensor) -> Tensor:
        # Only parameters: models keep buffers such as rotary tables wider.
        is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        return tensor.to(dtype) if is_weight else tensor

    runs: dict[str, Callable[[], Observed]] = {"float64": run_float64}
    if dtype in (reference.dtype, torch.float64):
        runs["kernel_batch_threads"] = lambda: _run_otherwise(reference, batch, sites)
    else:
        runs["dtype"] = run_narrow
    errors.noise_sources = []
    for name, run in runs.items():
        reference.passes += 1
        try:
            observed = run()
        except (RuntimeError, ValueError, TypeError, PassError) as error:
            raise_if_out_of_memory(error)
            reason = str(error).partition("\n")[0]
            errors.notes.append(
                f"The noise of `{name}` could not be measured: {reason}"
            )
            continue
        errors.noise_sources.append(name)
        yield observed


def _with_module(reference: LiveModel, module: nn.Module) -> LiveModel:
    return replace(reference, module=module, passes=0)


def _run_otherwise(
    reference: LiveModel, batch: Inputs, sites: Sequence[Site]
) -> Observed:
    """Run texts with another attention kernel, thread count and batch size."""
    kernel = {"sdpa": "eager", "eager": "sdpa"}.get(reference.kernel)
    other = _with_module(reference, private_copy(reference.module, attention=kernel))
    parts = [batch.some([text]) for text in range(len(batch))]
    # A single text runs twice in one batch, and the second copy is dropped below.
    if len(batch) == 1:
        parts = [batch.some([0, 0])]
    threads = 2 if torch.get_num_threads() == 1 else 1
    with hooks.threads(threads):
        passes = [observe(other, part, sites) for part in parts]
    merged = Observed()
    for name in passes[0].states:
        rows = torch.cat([observed.rows(name) for observed in passes])
        if len(batch) == 1:
            rows = rows[: len(rows) // 2]
        merged.keep(ObservedState(name, rows))
    return merged

"""Computed vectors: one for each text, pooled as a model's passes go.

The states of all texts are never held together: those of some batches are pooled when
they have filled some memory.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import (
    Inputs,
    StackBuffer,
    Texts,
    buffers_for,
    check_targets,
    run_pass,
)
from hiddenscope.sites import Site
from hiddenscope.states import Pooling
from hiddenscope.states.mixed import check_one_width, one_tensor
from hiddenscope.states.pool import Pool, as_vectors, check_cls
from hiddenscope.states.pooling import requires_cls
from hiddenscope.vectors.stored import not_finite

# Texts that are encoded, and sorted by length, at a time.
PORTION = 8192
# Bytes of states that are held before they are pooled; one batch may take more.
HELD = 64 * 2**20


def compute(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    pool: Pooling,
    *,
    targets: Texts | Inputs | None = None,
    truncate: bool | int = False,
) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield the inputs and vectors `[site, text, width]`, portion by portion."""
    check_one_width(sites, [model.anatomy.width(site) for site in sites])
    total = count(texts)
    if targets is not None and count(targets) != total:
        reason = f"there are {total} texts and {count(targets)} targets"
        raise TextError(
            "Targets do not fit the texts", reason, "Give one for each text."
        )
    cut = 0
    # No texts are a portion too, which the encoder refuses.
    for start in range(0, max(1, total), PORTION):
        portion = _portion(texts, start)
        portion_targets = None if targets is None else _portion(targets, start)
        try:
            inputs = model.encode(portion, targets=portion_targets, truncate=truncate)
            check_targets(model, inputs, sites, logits=False)
        except TextError as error:
            raise _renumbered(error, start) from None
        yield inputs, _vectors_of(model, inputs, sites, pool, start)
        if not isinstance(truncate, bool):
            cut += sum(length >= truncate for length in inputs.lengths)
    if cut:
        progress.note(
            f"{model.name}: {cut:,} of {total:,} texts have {truncate} tokens or more;"
            f" the vector is that of the first {truncate}, as in sentence-transformers"
        )


def count(texts: Texts | Inputs) -> int:
    """Return the number of texts; a string or a list of ids is one."""
    return len(texts) if _is_several(texts) else 1


def _renumbered(error: TextError, start: int) -> TextError:
    """Name a text by its number among all; the encoder counts within a portion."""
    problem = error.problem
    number = re.fullmatch(r"Text (\d+)", problem)
    if number:
        problem = f"Text {int(number[1]) + start}"
    return TextError(problem, error.reason, error.remedy)


def _is_several(texts: Any) -> bool:
    if isinstance(texts, Inputs):
        return True
    if isinstance(texts, str | bytes):
        return False
    if not isinstance(texts, Sequence | np.ndarray | Tensor):
        return False
    if getattr(texts, "shape", None) == ():
        return False
    if not len(texts) or isinstance(texts[0], str | list | tuple):
        return True
    # A list of ids is one text.
    return getattr(texts[0], "ndim", 0) > 0


def _portion(texts: Any, start: int) -> Any:
    if not _is_several(texts) or len(texts) <= PORTION:
        return texts
    end = min(len(texts), start + PORTION)
    if isinstance(texts, Inputs):
        return texts.some(range(start, end))
    return texts[start:end]


def _vectors_of(
    model: Model, inputs: Inputs, sites: tuple[Site, ...], pool: Pooling, first: int
) -> Tensor:
    """Compute the vectors `[site, text, width]` of a portion.

    `first` is the number of its first text among all.
    """
    stack = inputs.of(sites[0].stack)
    texts_pool = Pool(stack.lengths, pool, first)
    if requires_cls(pool):
        first_ids = [ids[0] for ids in stack.ids]
        check_cls(model.source(sites[0].stack), first_ids, first)
    costs = inputs.costs
    values: Tensor | None = None
    with model.lock, progress.track("Capturing", total=sum(costs)) as advance:
        for batches in _batch_groups(model, inputs, sites):
            numbers = list(chain.from_iterable(batches))
            sizes = [len(batch) for batch in batches]
            states = _states(model, inputs.some(numbers), sizes, sites)
            _check_finite(states, [number + first for number in numbers])
            block = as_vectors(texts_pool(one_tensor(states.finish()), numbers))
            if values is None:
                values = block.new_empty(len(sites), len(inputs), block.shape[2])
            values[:, numbers] = block
            advance(sum(costs[number] for number in numbers))
    assert values is not None  # there is at least one text
    return values


def _batch_groups(
    model: Model, inputs: Inputs, sites: tuple[Site, ...]
) -> Iterator[list[list[int]]]:
    """Yield the batches of a capture, as many at a time as HELD has room for.

    On a GPU the passes and copies of a group overlap.
    """
    row = len(sites) * model.anatomy.width(sites[0]) * model.dtype.itemsize
    lengths = inputs.of(sites[0].stack).lengths
    group: list[list[int]] = []
    size = 0
    for indices, _ in inputs.batches(model):
        batch = row * sum(lengths[index] for index in indices)
        if group and size + batch > HELD:
            yield group
            group = []
            size = 0
        group.append(indices)
        size += batch
    yield group


def _states(
    model: Model, inputs: Inputs, sizes: list[int], sites: tuple[Site, ...]
) -> StackBuffer:
    """Run some batches of these sizes and return their states, text after text."""
    buffers = buffers_for(model, sites, inputs)
    for start, end in pairwise(accumulate(sizes, initial=0)):
        numbers = range(start, end)
        run_pass(model, inputs.some(numbers).pad(model), numbers, buffers)
    (states,) = buffers.values()
    states.finish()
    return states


def _check_finite(states: StackBuffer, numbers: list[int]) -> None:
    """Refuse a NaN or an infinity among the states of texts with these numbers."""
    if states.finite:
        return
    lengths = states.inputs.lengths
    for site, values in zip(states.sites, states.finish(), strict=True):
        infinite = ~values.isfinite().all(1)
        if bool(infinite.any()):
            row = int(infinite.nonzero()[0])
            ends = np.cumsum(lengths)
            text = int(np.searchsorted(ends, row, side="right"))
            position = row - int(ends[text]) + lengths[text]
            where = f"{site}, text {numbers[text]}, position {position}"
            raise not_finite(values[row], where)

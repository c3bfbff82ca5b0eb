"""Pooled vectors: one for each text or token, computed by a model or read from states.

The states of all texts are never held together: those of some batches of a model, or of
a block of a file, are pooled when they have filled some memory. A store may have been
written with a pooling, or with every n-th token only: then the row that stands for a
text is another one, or there is none.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise, starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import NotFinite, StatesError, TextError, TooLarge
from hiddenscope.model import Model
from hiddenscope.passes import (
    Inputs,
    Texts,
    buffers_for,
    check_targets,
    require_recordable,
    run_pass,
)
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, Keep, free_memory
from hiddenscope.sites import Site
from hiddenscope.states import Pooling, Readable, Tokens
from hiddenscope.states.arrays import Ints
from hiddenscope.states.mixed import check_one_width, one_tensor
from hiddenscope.states.pool import (
    Pool,
    as_vectors,
    check_cls,
    check_lengths,
    not_whole,
    wide,
)
from hiddenscope.states.pooling import (
    SINKLESS,
    meaning_of,
    parse_pooling,
    position_of,
    requires_cls,
)
from hiddenscope.vectors.tally import Tally

# Texts that are encoded, and sorted by length, at a time.
PORTION = 8192
# Bytes of states that are held before they are pooled; one batch may take more.
HELD = 64 * 2**20


def compute(
    model: Model,
    texts: Texts | Inputs,
    sites: tuple[Site, ...],
    pool: Pooling,
    truncate: bool | int = False,
    tally: Tally | None = None,
) -> Iterator[tuple[Inputs, Tensor]]:
    """Yield the inputs and vectors `[site, text, width]`, portion by portion."""
    require_recordable(model.module)
    check_one_width(sites, [model.anatomy.width(site) for site in sites])
    total = count(texts)
    cut = 0
    # No texts are a portion too, which the encoder refuses.
    for start in range(0, max(1, total), PORTION):
        try:
            inputs = model.encode(_portion(texts, start), truncate=truncate)
            check_targets(model, inputs, sites, logits=False)
        except TextError as error:
            # The encoder counts within a portion.
            number = re.fullmatch(r"Text (\d+)", error.problem)
            if number is None:
                raise
            problem = f"Text {int(number[1]) + start}"
            raise TextError(problem, error.reason, error.remedy) from None
        yield inputs, _vectors_of(model, inputs, sites, pool, start, tally)
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
    model: Model,
    inputs: Inputs,
    sites: tuple[Site, ...],
    pool: Pooling,
    first: int,
    tally: Tally | None,
) -> Tensor:
    """Compute the vectors `[site, text, width]` of a portion.

    `first` is the number of its first text among all.
    """
    stack = inputs.of(sites[0].stack)
    texts_pool = Pool(stack.lengths, pool, first)
    if tally is not None:
        tally.watch(texts_pool, sites)
    if requires_cls(pool):
        first_ids = [ids[0] for ids in stack.ids]
        check_cls(model.source(sites[0].stack), first_ids, first)
    costs = inputs.costs
    values = None
    with model.lock, progress.track("Capturing", total=sum(costs)) as advance:
        for batches in _batch_groups(model, inputs, sites):
            numbers = list(chain.from_iterable(batches))
            some = inputs.some(numbers)
            buffers = buffers_for(model, sites, some)
            borders = accumulate(map(len, batches), initial=0)
            for batch in starmap(range, pairwise(borders)):
                run_pass(model, some.some(batch).pad(model), batch, buffers)
            (states,) = buffers.values()
            pooled = texts_pool(one_tensor(states.finish()), numbers)
            if not states.finite:
                ends = np.cumsum(states.inputs.lengths)
                starts = ends - states.inputs.lengths
                for site, rows in zip(sites, states.finish(), strict=True):
                    row = _infinite_row(rows)
                    if row is not None:
                        text = int(np.searchsorted(ends, row, side="right"))
                        number, position = numbers[text] + first, row - starts[text]
                        where = f"{site}, text {number}, position {position}"
                        raise _not_finite(rows[row], where)
            block = as_vectors(pooled)
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


def read_all(
    source: Readable,
    sites: tuple[Site, ...],
    pool: Pooling | None,
    tally: Tally | None = None,
) -> Tensor:
    """Return the vectors of states, `[site, row, width]`."""
    tokens = source.tokens
    count = len(tokens) if pool is None else tokens.count
    values = None
    for number, site in enumerate(sites):
        done = 0
        for block in read_vectors(source, site, pool, tally=tally):
            if values is None:
                values = allocate(len(sites), count, block)
            check_one_width((sites[0], site), (values.shape[2], block.shape[1]))
            values[number, done : done + len(block)] = block
            done += len(block)
    assert values is not None  # states of no texts were refused
    return values


def read_vectors(
    source: Readable,
    site: Site,
    pool: Pooling | None,
    keep: Keep = "host",
    tally: Tally | None = None,
) -> Iterator[Tensor]:
    """Yield the vectors of one site, block by block; of each token if not pooled.

    With `keep="device"` those of tokens stay where they are.
    """
    tokens = source.tokens
    if pool is None:
        check_lengths(tokens.lengths)
        blocks = _each_token(source, site, keep)
    else:
        texts_pool = _pool_of(source, pool)
        # Of what was pooled before, nothing is known of the tokens.
        if tally is not None and pooled_as(source) is None:
            tally.watch(texts_pool, (site,))
        blocks = texts_pool.stream(source.blocks(site), site)
    done = 0
    for block in blocks:
        row = _infinite_row(block)
        if row is not None:
            where = f"text {done + row}"
            if pool is None:
                token = done + row
                position = tokens.positions[token]
                where = f"text {tokens.text[token]}, position {position}"
            raise _not_finite(block[row], f"{site}, {where}")
        done += len(block)
        yield block


def pooled_as(source: object) -> Pooling | None:
    """Return how a store pooled each text (or window); None if every row is a token."""
    pool = getattr(source, "pooled", None)
    if pool is None:
        return None
    return parse_pooling(pool)


def allocate(sites: int, rows: int, like: Tensor) -> Tensor:
    """Allocate memory for all vectors, or refuse if too little is free."""
    width = like.shape[-1]
    size = sites * rows * width * like.dtype.itemsize
    free = free_memory()
    if size > free * SHARE_OF_FREE_MEMORY:
        needed = f"{size / 2**30:,.1f} GiB"
        raise TooLarge(
            f"Too little memory for {rows:,} vectors at {sites} sites, {width:,} wide",
            f"they take {needed}, and {free / 2**30:,.1f} GiB are free",
            "Choose fewer sites or texts.",
        )
    return torch.empty(sites, rows, width, dtype=like.dtype)


def _infinite_row(rows: Tensor) -> int | None:
    """Return the first row with a NaN or an infinity in it; None if there is none."""
    # A NaN or an infinity makes the sum one too, and a sum takes a tenth of the time.
    if rows.sum().isfinite():
        return None
    infinite = ~rows.isfinite().all(1)
    return int(infinite.nonzero()[0]) if infinite.any() else None


def _not_finite(row: Tensor, where: str) -> NotFinite:
    """Return the error that names a vector with a NaN or an infinity in it."""
    what = "a NaN" if row.isnan().any() else "an infinity"
    return NotFinite(
        "States are not finite",
        f"{what} at {where}",
        "Look at the weights of the block that computes it, or load the model in a"
        " wider dtype.",
    )


def _each_token(source: Readable, site: Site, keep: Keep) -> Iterator[Tensor]:
    rows = 0
    count = len(source.tokens)
    for block in source.blocks(site):
        rows += len(block)
        if rows > count:
            break
        if keep == "device":
            yield block.detach().to(wide(block.dtype))
        else:
            yield as_vectors(block)
    if rows != count:
        raise not_whole(site, rows, count)


def _pool_of(source: Readable, pool: Pooling) -> Pool:
    """Return the pool of states, once the rows that it takes are known to be there."""
    tokens = source.tokens
    lengths = tokens.lengths
    check_lengths(lengths)
    stored_as = pooled_as(source)
    if stored_as is not None:
        pool = _of_pooled_rows(pool, stored_as)
    starts = np.cumsum(lengths) - lengths
    row = _row_in_text(pool, getattr(source, "every", 1), lengths)
    # Where windows of one text overlap, a position may be there twice.
    same_text = np.diff(tokens.text) == 0
    overlap = bool((same_text & (np.diff(tokens.positions) <= 0)).any())
    if isinstance(pool, int) and overlap:
        return Pool(lengths, pool, rows=_rows_at(tokens, pool, starts))
    if requires_cls(pool):
        check_cls(getattr(source, "source", None), tokens.ids[starts], 0)
    result = Pool(lengths, row)
    rows = result.positions()
    position = position_of(pool)
    if rows is not None and position is not None and position >= 0:
        others = np.flatnonzero(tokens.positions[starts + rows] != position)
        if others.size:
            raise StatesError(
                f"No token at position {position} of every text",
                f"text {others[0]} has only some of its tokens here",
                "Give whole texts.",
            )
    return result


def _of_pooled_rows(pool: Pooling, stored_as: Pooling) -> Pooling:
    """Return the pooling of rows that were pooled when they were stored.

    A long text has a row for each window: what was kept of its start is in the first
    window, of its end in the last.
    """
    # Two words for one pooling; only older stores have the first.
    pool = "mean:all" if pool == "mean" else pool
    stored_as = "mean:all" if stored_as == "mean" else stored_as
    position = position_of(pool)
    stored_position = position_of(stored_as)
    same = pool == stored_as
    if position is not None and not requires_cls(pool):
        # The first token need not be a classification token.
        same = position == stored_position
    if not same:
        word = "mean" if stored_as == SINKLESS else stored_as
        raise StatesError(
            f"Cannot take {meaning_of(pool)} from pooled states",
            f"the store keeps {meaning_of(stored_as)}, and nothing else",
            f"Give {word!r}, or extract the states of every token.",
        )
    if pool == SINKLESS:
        # They were left out of each window, and no window is one.
        return "mean:all"
    if position is None:
        return pool
    return "last" if position < 0 else "first"


def _rows_at(tokens: Tokens, position: int, starts: Ints) -> Ints:
    """Return the row of each text at a position, in the first window that has it.

    Special tokens frame every window: where one window has such a token at the position
    and another one a token of the text, the latter is meant.
    """
    last = np.maximum.reduceat(tokens.positions, starts)
    wanted = last + 1 + position
    if position >= 0:
        wanted = np.full_like(last, position)
    rows = np.flatnonzero(tokens.positions == wanted[tokens.text])
    special = (tokens.spans[rows] < 0).all(1)
    rows = rows[np.lexsort((rows, special, tokens.text[rows]))]
    texts, firsts = np.unique(tokens.text[rows], return_index=True)
    if len(texts) < len(starts):
        text = int(np.setdiff1d(np.arange(len(starts)), texts)[0])
        raise TextError(
            f"No token at position {position} of every text",
            f"the last of text {text} is at {last[text]:,}",
            "Choose a position that every text has; -1 is the last token.",
        )
    return rows[firsts] - starts


def _row_in_text(pool: Pooling, every: int, lengths: Ints) -> Pooling:
    """Return the row that holds a position, where positions 0, n, 2n ... are kept.

    >>> _row_in_text(6, 2, np.array([5, 4])), _row_in_text("mean", 2, np.array([5, 4]))
    (3, 'mean')
    """
    position = position_of(pool)
    if every == 1 or position is None or position == 0:
        return pool
    stored = f"the store keeps positions 0, {every}, {2 * every} and so on"
    if position < 0:
        raise StatesError(
            "No last token of every text",
            f"{stored}, and the last may not be among them",
            'Use pool="mean", "max" or "first", or hs.each_token.',
        )
    problem = f"No token at position {position} of every text"
    if position % every:
        raise StatesError(problem, stored, f"Give a multiple of {every}.")
    short = np.flatnonzero(lengths <= position // every)
    if len(short):
        raise TextError(
            problem,
            f"text {short[0]} ends before it",
            "Choose a position that every text has.",
        )
    return position // every

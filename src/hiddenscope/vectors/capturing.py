"""The vectors of a model's texts, pooled as they come, so that never all states are held."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from hiddenscope import progress
from hiddenscope.errors import TextError
from hiddenscope.model import ANOTHER_BATCH, BUDGETS, Model
from hiddenscope.passes import Encoded, Landing, Texts, landings, make_batch, run
from hiddenscope.passes.compat import plan
from hiddenscope.sites import Site
from hiddenscope.vectors.pooling import Rows, Token, begin_with_cls, not_finite, room_for

PORTION = 8192  # texts that are encoded, and sorted by length, at a time
ROOM = 64 * 2**20  # bytes of states that are held before they are pooled; one batch may take more


def pooled(
    model: Model, texts: Any, wanted: tuple[Site, ...], token: Token, *, truncate: bool, targets: Texts | None
) -> tuple[Tensor, tuple[str, ...] | None]:
    """The vectors of a model's texts `[site, text, width]`, and the texts where they were given as such."""
    given = listed(texts), listed(targets)
    values, done, read = None, 0, []
    for encoded, block in portions(model, given, wanted, token, truncate):
        if values is None:
            values = room_for(len(wanted), _count(given[0]), block)
        values[:, done : done + block.shape[1]] = block
        done += block.shape[1]
        read += list(encoded.texts or ())
    assert values is not None  # an encoder refuses no texts
    return values, tuple(read) if read else None


def listed(texts: Any) -> Any:
    """A list of texts; one text, as a string or as ids, and what is no text at all stay as they are."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        return texts
    listed = list(texts)
    return listed if listed and (isinstance(listed[0], str) or np.ndim(listed[0])) else (listed,)


def _count(given: Any) -> int:
    return len(given) if isinstance(given, list) else 1


def portions(
    model: Model, given: tuple[Any, Any], wanted: tuple[Site, ...], token: Token, truncate: bool
) -> Iterator[tuple[Encoded, Tensor]]:
    """Portion by portion, in the order given: the texts as they were encoded, and their vectors."""
    texts, aims = given
    if aims is not None and len(model.anatomy.stacks) < 2:
        raise TextError("Targets for a decoder", f"{model.name} has one stack", "Leave `targets` out.")
    if aims is not None and _count(aims) != _count(texts):
        reason = f"there are {_count(aims)} targets"
        raise TextError(f"{_count(texts)} texts with targets", reason, "Give one for each text.")
    for start in range(0, _count(texts), PORTION):
        encoded, aimed = _encoded(model, _slice(texts, start), _slice(aims, start), start, truncate)
        yield encoded, _vectors_of(model, encoded, aimed, (wanted, token), start)


def _slice(given: Any, start: int) -> Any:
    if isinstance(given, tuple):
        return given[0]
    return given[start : start + PORTION] if isinstance(given, list) else given


def _encoded(model: Model, texts: Any, targets: Any, start: int, truncate: bool) -> tuple[Encoded, Encoded | None]:
    """Texts as ids, and a decoder's; an error names a text by its number among all."""
    two = len(model.anatomy.stacks) > 1
    try:
        with model.lock:  # a tokenizer serves one thread at a time
            encoded = model.encoder.encode(texts, truncate=truncate)
            aims = model.encoder.targets(targets, len(encoded.ids), truncate=truncate) if two else None
        return encoded, aims
    except TextError as error:
        number = re.fullmatch(r"Text (\d+)", error.problem)
        problem = f"Text {int(number[1]) + start}" if number else error.problem
        raise TextError(problem, error.reason, error.remedy) from None


def _vectors_of(
    model: Model, encoded: Encoded, aims: Encoded | None, asked: tuple[tuple[Site, ...], Token], first: int
) -> Tensor:
    """The vectors of some texts `[site, text, width]`, of which the first has this number among all."""
    wanted, token = asked
    own = aims if aims is not None and wanted[0].stack == "decoder" else encoded
    rows = Rows(own.lengths, token, first)
    if token == "cls":
        begin_with_cls(model.source(wanted[0].stack), [ids[0] for ids in own.ids], first)
    lengths = encoded.lengths if aims is None else list(map(sum, zip(encoded.lengths, aims.lengths, strict=True)))
    found: Tensor | None = None
    with model.lock, progress.track("Capturing", total=sum(lengths)) as advance:
        for batches in _together(model, lengths, len(wanted)):
            numbers = [number for batch in batches for number in batch]
            landing = _landed(model, encoded, aims, batches, wanted)
            _check(landing, [number + first for number in numbers])
            pooled = rows.pool(landing.buffer.values, numbers)
            found = pooled.new_empty(len(wanted), len(lengths), pooled.shape[2]) if found is None else found
            found[:, numbers] = pooled
            advance(sum(lengths[number] for number in numbers))
    assert found is not None  # an encoder refuses no texts
    return found


def _together(model: Model, lengths: list[int], sites: int) -> Iterator[list[list[int]]]:
    """The batches of a capture, as many at a time as their states have room; on a GPU they overlap."""
    kind = model.device.type if model.device.type in BUDGETS else "cpu"
    row = sites * model.anatomy.stacks[0].proof.width * model.dtype.itemsize
    some: list[list[int]] = []
    size = 0
    for batch in plan(
        lengths, BUDGETS[kind], padded=model.batches, turn=model.batching.rope_switch, another=ANOTHER_BATCH[kind]
    ):
        tokens = sum(lengths[number] for number in batch)
        if some and (size + tokens) * row > ROOM:
            yield some
            some, size = [], 0
        some.append(batch)
        size += tokens
    yield some


def _landed(
    model: Model, encoded: Encoded, aims: Encoded | None, batches: list[list[int]], wanted: tuple[Site, ...]
) -> Landing:
    """The states of some batches, text after text in the order of the batches."""
    numbers = [number for batch in batches for number in batch]
    texts = Encoded(None, tuple(encoded.ids[number] for number in numbers))
    targets = None if aims is None else Encoded(None, tuple(aims.ids[number] for number in numbers))
    landed = landings(model, wanted, texts, targets)
    for start, end in pairwise(accumulate(map(len, batches), initial=0)):
        run(model, make_batch(model, texts, targets, range(start, end)), range(start, end), landed)
    (landing,) = landed.values()
    landing.buffer.finish()
    return landing


def _check(landing: Landing, numbers: list[int]) -> None:
    """Refuse a NaN or an infinity among the states of these texts."""
    if landing.buffer.finite:
        return
    for site, values in zip(landing.sites, landing.buffer.values, strict=True):
        wrong = ~values.isfinite().all(1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            ends = np.cumsum(landing.encoded.lengths)
            text = int(np.searchsorted(ends, row, side="right"))
            position = row - int(ends[text]) + landing.encoded.lengths[text]
            raise not_finite(values[row], f"{site}, text {numbers[text]}, position {position}")

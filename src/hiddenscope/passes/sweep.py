"""Sweep: one text run in many variants, each with some states exchanged, and the logits of one token read off.

Variants go through the model together. Each is computed only from its first exchanged state on: in depth it joins the
batch at that layer, and where a token sees only those before it, the keys and values of the tokens before come from the
text's own pass. An encoder that is not changed is run once. None of it is assumed: on first use it is tried on the
model at hand, against passes made one at a time with every block run, and what fails is left out and said.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy import Tap, accepts, probe
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.passes.batch import Batch
from hiddenscope.passes.caches import beginning, unusable
from hiddenscope.passes.changes import Replace, Standing
from hiddenscope.passes.condition import watchable
from hiddenscope.passes.edit import Editor, edit, plan
from hiddenscope.passes.encoder import Encoded, Texts
from hiddenscope.passes.landing import Subject, landings
from hiddenscope.passes.record import make_batch, prepare, run
from hiddenscope.passes.resume import skipping, with_cache
from hiddenscope.sites import Site

BUDGETS = {"cpu": 2048, "cuda": 16384}
# What rounding may make of the logits in batches of other shapes, as a share of their norm: ROOM units in the last
# place times the root of the depth, but never more than MOST of it.
ROOM, MOST = 64, 0.05


@dataclass(frozen=True, eq=False)
class Exchange:
    """Values [token, width] that take the place of the state at a site, at some positions of its stack's text."""

    site: Site
    tokens: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Ways:
    """What may be saved in a model, as it was tried: `joins` in depth, `reuses` keys and values, `narrows` the head.

    `together` says whether variants go through in one batch at all; `notes` say why something may not be saved.
    """

    joins: bool = False
    reuses: bool = False
    narrows: bool = False
    together: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Base:
    """One text's own pass, from which variants begin: its ids, its states, its logits [token, vocabulary].

    `text` is its number in the batch that it was run in, and `length` how many tokens that was filled up to.
    """

    ids: tuple[int, ...]
    targets: tuple[int, ...] | None
    states: Mapping[Site, Tensor]
    logits: Tensor
    text: int
    length: int
    cache: Any = None
    encoded: Tensor | None = None

    def fed(self, stack: str | None) -> tuple[int, ...]:
        """The ids that a stack works on."""
        return self.targets if stack == "decoder" and self.targets is not None else self.ids


@dataclass(frozen=True, eq=False)
class Swept:
    """What a sweep gave: what was read off each variant's logits, how many passes and tokens it took, and notes."""

    values: Tensor
    passes: int
    tokens: int
    notes: tuple[str, ...]


def begin(model: Subject, texts: Texts, sites: Sequence[Site], *, targets: Texts | None = None) -> list[Base]:
    """The own passes of some texts, in one batch where that may be, with what a sweep needs of them."""
    watchable(model.module)
    encoded, aims, batch = prepare(model, texts, targets)
    if aims is None and model.anatomy.head is None:
        reason = "it has no head that gives any"
        raise PassError(f"Logits of {model.anatomy.name}", reason, "Load it with task='causal-lm' or 'masked-lm'.")
    wanted = tuple(sorted({*model.anatomy.select("layer.*"), *sites}))
    together = _may_share(model, batch)
    groups = [range(len(encoded.ids))] if together else [range(i, i + 1) for i in range(len(encoded.ids))]
    return [base for some in groups for base in _begin(model, encoded, aims, wanted, some)]


def sweep(
    model: Subject,
    base: Base,
    variants: Sequence[Sequence[Exchange]],
    at: int,
    *,
    read: Callable[[Tensor], Tensor] = lambda logits: logits,
    ways: Ways | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> Swept:
    """Run a text in many variants and read the logits [variant, vocabulary] of the token at one position.

    `read` makes of some of them what is kept, so that never all are in memory.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> base, other = begin(model, [[5, 6, 7], [5, 8, 7]], [])
    >>> site = Site(2)
    >>> swapped = sweep(model, base, [[Exchange(site, (0, 1, 2), other.states[site])]], at=2)
    >>> torch.allclose(swapped.values[0], other.logits[2], atol=1e-5)
    True
    """
    ways = tried(model) if ways is None else ways
    if ways.reuses and (why := unusable(base.cache, _answering(model).depth, base.length)):
        ways = replace(ways, reuses=False, notes=(*ways.notes, f"keys and values were computed anew, for {why}"))
    rows: list[Tensor | None] = [None] * len(variants)
    passes = tokens = 0
    with model.lock:
        for start, numbers in _batches(model, base, variants, at, ways):
            logits = _pass(model, base, [variants[number] for number in numbers], start, at, ways)
            if bool(logits.isnan().any()):
                reason = "there is a NaN among them"
                raise NotFinite(f"Logits of {model.anatomy.name}", reason, "Look at what was put in.")
            for number, row in zip(numbers, read(logits), strict=True):
                rows[number] = row
            encodes = base.targets is not None and variants[numbers[0]][0].site.stack == "encoder"
            length = len(base.fed(_answer_stack(model))) - start + (len(base.ids) if encodes else 0)
            passes, tokens = passes + 1, tokens + len(numbers) * length
            advance(len(numbers))
    values = torch.stack([row for row in rows if row is not None]) if rows else read(base.logits[:0])
    return Swept(values, passes, tokens, ways.notes)


def alone(model: Subject, base: Base, variant: Sequence[Exchange], at: int) -> Tensor:
    """The logits of one variant by itself, every block run: an edit, and what a sweep is held against."""
    changes: dict[str | Site, Any] = {one.site: Replace(one.values, tokens=list(one.tokens)) for one in variant}
    aims = None if base.targets is None else [list(base.targets)]
    made = edit(model, [list(base.ids)], changes, [variant[0].site], targets=aims, logits=True)
    assert made.logits is not None
    return made.logits[at]


def tried(model: Subject) -> Ways:
    """What may be saved in a model, tried once on the model as it is."""
    config: Any = getattr(model.module, "config", None)
    key = (getattr(config, "_attn_implementation", None), model.device, model.anatomy.stacks[0].proof.dtype)
    known = _TRIED.setdefault(model.module, {})
    if key not in known:
        with model.lock:
            known[key] = _try(model)
    return known[key]


_TRIED: WeakKeyDictionary[nn.Module, dict[Any, Ways]] = WeakKeyDictionary()


def room(model: Subject) -> float:
    """What rounding may make of logits in batches of other shapes, as a share of their norm."""
    unit = min(ROOM * torch.finfo(model.anatomy.stacks[0].proof.dtype).eps, MOST)
    return unit * sqrt(sum(stack.depth for stack in model.anatomy.stacks) + 1)


def _try(model: Subject) -> Ways:
    """Try each way of saving on a few variants of a short text, the most thrifty first."""
    stack = _answer_stack(model)
    limit = min(7, model.encoder.window or 7)
    ids = probe(model.module, 4, limit, seed=9).tolist()
    aims = [row[: min(5, limit)] for row in ids[2:]] if len(model.anatomy.stacks) > 1 else None
    at = len(aims[0] if aims else ids[0]) - 1
    sites = _some_sites(model)
    base, other = begin(model, ids[:2], sites, targets=aims)
    variants = []
    for site in sites:
        for token in (0, len(base.fed(site.stack)) // 2):
            values = other.states[site][token : token + 1]
            variants.append([Exchange(site, (token,), values)])
    expected = torch.stack([alone(model, base, variant, at) for variant in variants]).double()
    notes: list[str] = []
    skips = skipping(model, stack)
    joins = not skips.why_not and all(tap.layout == Tap("", 0, "output").layout for tap in _taps(model, stack))
    if not joins:
        notes.append(f"every block was run, for {skips.why_not or 'its states do not lie text by text'}")
    causal = _answering(model).causal and "past_key_values" in accepts(model.module)
    why = unusable(base.cache, _answering(model).depth, base.length) if causal else "a token sees those after it"
    if not causal and _answering(model).causal:
        why = "it takes none"
    if why:
        notes.append(f"keys and values were computed anew, for {why}")
    for ways in _attempts(joins, not why):
        found = _how_far(model, base, variants, expected, at, ways)
        if not found:
            return replace(ways, notes=tuple(notes))
        notes.append(f"{_named(ways)} left out, for {found}")
    return Ways(together=False, notes=tuple(notes))


def _attempts(joins: bool, reuses: bool) -> Iterator[Ways]:
    for join, reuse in ((True, True), (True, False), (False, True), (False, False)):
        if (joins or not join) and (reuses or not reuse):
            yield Ways(join, reuse, narrows=True)
    yield Ways(narrows=False)


def _named(ways: Ways) -> str:
    saved = [("joining at a layer", ways.joins), ("reuse of keys and values", ways.reuses), ("a batch", True)]
    return " with ".join(name for name, used in saved if used)


def _how_far(
    model: Subject, base: Base, variants: Sequence[Sequence[Exchange]], expected: Tensor, at: int, ways: Ways
) -> str:
    """Why a way cannot be gone; empty if it gives what passes one at a time give, within rounding."""
    try:
        found = sweep(model, base, variants, at, ways=ways).values.double()
        off = float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) / room(model)
    except Exception as error:
        return f"it stopped with {type(error).__name__}: {str(error)[:120]}"
    return "" if off <= 1 else f"it came out {off:,.0f} times farther off than rounding may"


def _some_sites(model: Subject) -> tuple[Site, ...]:
    """The first, the last and a middle layer of each stack, and what a middle block adds, where it can be seen."""
    found: list[Site] = []
    for stack in model.anatomy.stacks:
        name = stack.name if len(model.anatomy.stacks) > 1 else None
        middle = (stack.depth + 1) // 2
        wanted = [Site(0, "", name), Site(middle, "attn", name), Site(middle, "", name), Site(stack.depth, "", name)]
        found += [site for site in wanted if site in model.anatomy.taps and _may_change(model, site)]
    return tuple(dict.fromkeys(found))


def _may_change(model: Subject, site: Site) -> bool:
    try:
        return bool(plan(model.anatomy, {site: lambda states: states}))
    except LookupError:
        return False


def _answering(model: Subject) -> Any:
    """The stack whose last state makes the logits."""
    return model.anatomy.stacks[-1]


def _answer_stack(model: Subject) -> str | None:
    return "decoder" if len(model.anatomy.stacks) > 1 else None


def _taps(model: Subject, stack: str | None) -> Sequence[Tap]:
    own = next(one for one in model.anatomy.stacks if stack in (None, one.name))
    return own.proof.taps


def _may_share(model: Subject, batch: Batch) -> bool:
    sides = [batch, *([batch.targets] if batch.targets else [])]
    if any(side.padded for side in sides) and not model.batches:
        return False
    return model.turn is None or not min(batch.lengths) <= model.turn < max(batch.lengths)


def _begin(
    model: Subject, encoded: Encoded, aims: Encoded | None, wanted: Sequence[Site], texts: range
) -> Iterator[Base]:
    """The own passes of some texts in one batch."""
    some = Encoded(None, tuple(encoded.ids[i] for i in texts))
    goals = None if aims is None else Encoded(None, tuple(aims.ids[i] for i in texts))
    batch = make_batch(model, some, goals, range(len(some.ids)))
    landed = landings(model, wanted, some, goals)
    with model.lock, torch.no_grad(), hooks.watching([with_cache(model.module, "use_cache" in accepts(model.module))]):
        output = run(model, batch, range(len(some.ids)), landed, logits=True)
    states = {stack: landing.states() for stack, landing in landed.items()}
    fed = batch.targets or batch
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != fed.ids.shape:
        reason = "its head does not give one row a token" if isinstance(logits, Tensor) else "it has no head"
        raise PassError(f"Logits of {model.anatomy.name}", reason, "Load it with task='causal-lm' or 'masked-lm'.")
    last = getattr(output, "encoder_last_hidden_state", None)
    for row in range(len(some.ids)):
        own = {site: states[site.stack].of(row)[site].to(model.device) for site in wanted}
        length = len(some.ids[row])
        yield Base(
            some.ids[row],
            None if goals is None else goals.ids[row],
            own,
            logits[row, : fed.lengths[row]],
            row,
            fed.ids.shape[1],
            getattr(output, "past_key_values", None),
            None if last is None else last[row : row + 1, :length],
        )


def _batches(
    model: Subject, base: Base, variants: Sequence[Sequence[Exchange]], at: int, ways: Ways
) -> Iterator[tuple[int, list[int]]]:
    """Which variants go together: those that begin at one token, the lowest layer first, up to so many tokens."""
    stack = _answer_stack(model)
    starts: dict[tuple[str | None, int], list[int]] = defaultdict(list)
    for number, variant in enumerate(variants):
        own = variant[0].site.stack
        first = min(at, *(min(one.tokens) for one in variant))
        starts[own, first if ways.reuses and own == stack else 0].append(number)
    budget = BUDGETS.get(model.device.type, BUDGETS["cpu"]) if ways.together else 1
    for (_, start), numbers in starts.items():
        numbers = sorted(numbers, key=lambda number: _entry(variants[number]))
        length = len(base.ids) + len(base.targets or ()) - start
        many = max(1, budget // length)
        yield from ((start, numbers[i : i + many]) for i in range(0, len(numbers), many))


def _entry(variant: Sequence[Exchange]) -> int:
    """The layer from which a variant differs: that of its lowest site, or the one below the block that it is in."""
    first = min(one.site for one in variant)
    return 10**6 if first.layer is None else first.layer - bool(first.part)


def _pass(
    model: Subject, base: Base, variants: Sequence[Sequence[Exchange]], start: int, at: int, ways: Ways
) -> Tensor:
    """One pass over variants in the order of their entries: the logits [variant, vocabulary] at one position."""
    stack, fed = variants[0][0].site.stack, _answer_stack(model)
    length, count = len(base.fed(fed)) - start, len(variants)
    rows = count
    while rows > 1 and rows in (length, length + start, len(base.ids)):  # so that no other axis looks like the texts
        rows += 1
    variants = [*variants, *[variants[-1]] * (rows - count)]
    entries = [_entry(variant) for variant in variants]
    depth = next(one for one in model.anatomy.stacks if stack in (None, one.name)).depth
    joins = ways.joins and not skipping(model, stack).why_not and not _counted(model, variants)
    working = [sum(entry < k for entry in entries) if joins else rows for k in range(1, depth + 1)]
    given = _arguments(model, base, rows, start, [max(1, many) for many in working], changed=stack)
    seen = length if stack == fed else len(base.ids)
    changes, made = _changes(variants, start if stack == fed else 0)
    editor = Editor(model.anatomy, changes, _standing(seen))
    watches = editor.watches(model.module)
    if ways.narrows:
        watches.append(_narrow(model, length, at - start))
    entering = _joining(model, base, stack, entries, start) if joins else nullcontext()
    with torch.inference_mode(False), torch.no_grad(), entering, hooks.watching(watches):
        logits = hooks.run(model.module, given).logits
    if made != set(changes):
        reason = f"the state at {min(set(changes) - made)} was not reached in this pass"
        raise PassError(f"A change in {model.anatomy.name}", reason, "Report this model.")
    kept: Tensor = logits[:count, 0 if logits.shape[1] == 1 else at - start]
    return kept


def _arguments(
    model: Subject, base: Base, rows: int, start: int, working: Sequence[int], changed: str | None
) -> dict[str, Any]:
    """What the module is called with: the tokens from `start` on, and what is known of those before."""
    pad = model.encoder.pad
    aims = None if base.targets is None else Batch.of([base.targets] * rows, pad, model.device)
    given = Batch.of([base.ids] * rows, pad, model.device, aims).arguments(model.module, masked=model.masks)
    if start:
        name = "input_ids" if aims is None else "decoder_input_ids"
        given[name] = given[name][:, start:]
        given["past_key_values"] = beginning(base.cache, base.text, start, working, len(base.ids))
        given["use_cache"] = True
    if base.encoded is not None and changed != "encoder" and "encoder_outputs" in accepts(model.module):
        from transformers.modeling_outputs import BaseModelOutput

        state: Any = base.encoded.expand(rows, -1, -1)
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=state)
    return given


def _counted(model: Subject, variants: Sequence[Sequence[Exchange]]) -> bool:
    """Parts of a block that is called again and again are told by counting, and skipped calls would not be counted."""
    return any(one.site.part and model.anatomy.taps[one.site].call for variant in variants for one in variant)


def _changes(
    variants: Sequence[Sequence[Exchange]], start: int
) -> tuple[dict[Site, Callable[[Tensor], Tensor]], set[Site]]:
    """For each site, one change of all the rows that have one there; and the sites where it was made, as they are."""
    made: set[Site] = set()
    places: dict[Site, list[tuple[int, Exchange]]] = defaultdict(list)
    for row, variant in enumerate(variants):
        for one in variant:
            places[one.site].append((row, one))

    def change(site: Site, some: Sequence[tuple[int, Exchange]]) -> Callable[[Tensor], Tensor]:
        texts = torch.tensor([row for row, one in some for _ in one.tokens])
        columns = torch.tensor([token - start for _, one in some for token in one.tokens])
        values = torch.cat([one.values for _, one in some])

        def put(states: Tensor) -> Tensor:
            states[texts, columns] = values.to(states)
            made.add(site)
            return states

        return put

    return {site: change(site, places[site]) for site in sorted(places)}, made


def _standing(length: int) -> Callable[[str | None, Tensor, Tap], Standing]:
    """Every row of a tensor is a variant, and every token is there."""

    def where(stack: str | None, tensor: Tensor, tap: Tap) -> Standing:
        rows = tensor.shape[0] // length if tap.layout.flat else tensor.shape[tap.layout.text]
        return Standing(torch.zeros(rows, length, dtype=torch.long), None)

    return where


def _joining(
    model: Subject, base: Base, stack: str | None, entries: Sequence[int], start: int
) -> AbstractContextManager[None]:
    """Let each row enter at its layer, with what the text's own pass has there."""
    forms = skipping(model, stack).forms
    start = start if stack == _answer_stack(model) else 0
    joins: dict[nn.Module, dict[int, hooks.Join]] = defaultdict(dict)
    for k, (tap, form) in enumerate(zip(_taps(model, stack)[1:], forms, strict=True), 1):
        before, entering = sum(entry < k for entry in entries), sum(entry == k for entry in entries)
        if before == len(entries):
            break
        values = base.states[Site(k, "", stack)][start:]
        joined = values.expand(entering, *values.shape) if entering else None
        joins[model.module.get_submodule(tap.path)][tap.call] = hooks.Join(len(entries), before, form, joined)
    return hooks.joining(joins)


def _narrow(model: Subject, length: int, place: int) -> hooks.Watch:
    """Only the wanted token goes into the head, which makes a row as long as the vocabulary of each."""
    head = model.anatomy.head
    assert head is not None

    def seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = hooks.state_in(args, kwargs)
        if state is None or state.ndim != 3 or state.shape[1] != length:
            return None
        return hooks.with_state_in(args, kwargs, state[:, place : place + 1])

    return hooks.Watch(model.module.get_submodule(head.path), "input", seen)

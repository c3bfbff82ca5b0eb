"""Sweep: one text run in many variants, each with some states exchanged, and the logits
of one token read off.

Variants go through the model together. Each is computed only from its first exchanged
state on: in depth it joins the batch at that layer, and where a token attends only to
those before it, the keys and values of the tokens before come from the text's own pass.
An encoder that is not changed is run once. None of these shortcuts is assumed: on first
use each is tried on the model at hand, against passes made one at a time with every
block run, and what fails is left out and noted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery import Stack, Tap, accepts, trial_ids
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.modules import autograd, hooks, trials
from hiddenscope.passes.buffers import buffers_for
from hiddenscope.passes.changes import Change, Positions, Replace
from hiddenscope.passes.edit import Editor, edit, plan
from hiddenscope.passes.inputs import BATCH_OVERHEAD, BATCH_TOKENS, Inputs, Texts
from hiddenscope.passes.protocol import ModelLike, recordable
from hiddenscope.passes.record import check_targets, run
from hiddenscope.passes.resume import skipping, with_cache
from hiddenscope.sites import Site

# The layers of Hugging Face's caches that hold every token's keys and values and
# nothing else.
PLAIN_CACHE_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


@dataclass(frozen=True, eq=False)
class Exchange:
    """Values [token, width] that take the place of the state at a site, at some
    positions of its stack's text.
    """

    site: Site
    tokens: tuple[int, ...]
    values: Tensor


@dataclass(frozen=True)
class Shortcuts:
    """What a sweep of a model may leave out, as it was tried on the model.

    `joins`: blocks below a variant's first exchanged layer. `reuses`: the keys and
    values of tokens before it. `narrows`: the head at other tokens. `encodes_once`: an
    encoder that is not changed, after the text's own pass. `batched`: passes one at a
    time. `notes` say why something may not be left out.
    """

    joins: bool = False
    reuses: bool = False
    narrows: bool = False
    encodes_once: bool = False
    batched: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Base:
    """One text's own pass, from which variants begin: its inputs, its states, its
    logits [token, vocabulary].

    `row` is its number in the batch that it was run in, and `padded_length` the length
    that was padded to.
    """

    inputs: Inputs
    states: Mapping[Site, Tensor]
    logits: Tensor
    row: int
    padded_length: int
    cache: Any = None
    encoder_output: Tensor | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the text."""
        return self.inputs.ids[0]

    @property
    def targets(self) -> tuple[int, ...] | None:
        """The token ids of the decoder's text, in an encoder-decoder."""
        return None if self.inputs.targets is None else self.inputs.targets.ids[0]

    def fed(self, stack: str | None) -> tuple[int, ...]:
        """The ids that a stack works on."""
        return self.inputs.of(stack).ids[0]


@dataclass(frozen=True, eq=False)
class Swept:
    """What a sweep gave: what was read off each variant's logits, how many passes and
    tokens it took, and notes.
    """

    values: Tensor
    passes: int
    tokens: int
    notes: tuple[str, ...]


def begin(
    model: ModelLike,
    texts: Texts | Inputs,
    sites: Sequence[Site],
    *,
    targets: Texts | Inputs | None = None,
) -> list[Base]:
    """The own passes of some texts, in one batch where that is allowed, with what a
    sweep needs of them.
    """
    recordable(model.module)
    inputs = model.encode(texts, targets=targets)
    if not model.anatomy.makes_logits:
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(
            f"No logits of {model.anatomy.name}",
            "it has no language-model head",
            remedy,
        )
    check_targets(model, inputs, (), logits=True)
    kept = tuple(sorted({*model.anatomy.select("layer.*"), *sites}))
    groups = (
        [range(len(inputs))]
        if _may_share(model, inputs)
        else [range(i, i + 1) for i in range(len(inputs))]
    )
    cached = _keeps_cache(model)
    return [
        base
        for group in groups
        for base in _own_passes(model, inputs.some(group), kept, cached)
    ]


def sweep(
    model: ModelLike,
    base: Base,
    variants: Sequence[Sequence[Exchange]],
    at: int,
    *,
    read: Callable[[Tensor], Tensor] = lambda logits: logits,
    shortcuts: Shortcuts | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> Swept:
    """Run a text in many variants and read the logits [variant, vocabulary] of the
    token at one position.

    `read` makes of the logits of a batch what is kept, so that never all are in memory.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> base, other = begin(model, [[5, 6, 7], [5, 8, 7]], [])
    >>> site = Site(2)
    >>> swapped = sweep(model, base, [[Exchange(site, (0, 1, 2), other.states[site])]], at=2)
    >>> torch.allclose(swapped.values[0], other.logits[2], atol=1e-5)
    True
    """
    shortcuts = shortcuts_of(model) if shortcuts is None else shortcuts
    if shortcuts.reuses and (
        why := _unusable(base.cache, _answering(model).depth, base.padded_length)
    ):
        note = f"Keys and values were computed anew, because {why}."
        shortcuts = replace(shortcuts, reuses=False, notes=(*shortcuts.notes, note))
    rows: list[Tensor | None] = [None] * len(variants)
    passes = tokens = 0
    with model.lock:
        for start, numbers in _batches(model, base, variants, at, shortcuts):
            logits = _pass(
                model,
                base,
                [variants[number] for number in numbers],
                start,
                at,
                shortcuts,
            )
            if bool(logits.isnan().any()):
                reason = "there is a NaN among them"
                raise NotFinite(
                    f"No logits of {model.anatomy.name}",
                    reason,
                    "Look at the values that were put in.",
                )
            for number, row in zip(numbers, read(logits), strict=True):
                rows[number] = row
            encodes = (
                base.targets is not None
                and variants[numbers[0]][0].site.stack == "encoder"
            )
            length = (
                len(base.fed(_answer_stack(model)))
                - start
                + (len(base.ids) if encodes else 0)
            )
            passes, tokens = passes + 1, tokens + len(numbers) * length
            advance(len(numbers))
    values = (
        torch.stack([row for row in rows if row is not None])
        if rows
        else read(base.logits[:0])
    )
    return Swept(values, passes, tokens, shortcuts.notes)


def alone(model: ModelLike, base: Base, variant: Sequence[Exchange], at: int) -> Tensor:
    """The logits of one variant by itself, every block run: an edit, and what a sweep
    is held against.
    """
    changes: dict[str | Site, Change] = {
        one.site: Replace(one.values, tokens=list(one.tokens)) for one in variant
    }
    edited = edit(model, base.inputs, changes, (), logits=True)
    assert edited.logits is not None
    return edited.logits[at]


def shortcuts_of(model: ModelLike) -> Shortcuts:
    """What may be left out in a model, tried once on the model as it is."""
    with model.lock:
        return model.trials.once("sweep", lambda: _try_shortcuts(model), form=Shortcuts)


def logits_tolerance(model: ModelLike) -> float:
    """What rounding may change of logits in batches of other shapes, as a share of
    their norm.
    """
    return trials.tolerance(
        model.dtype, sum(stack.depth for stack in model.anatomy.stacks)
    )


def _try_shortcuts(model: ModelLike) -> Shortcuts:
    """Try the shortcuts on a few variants of a short text, those that leave out most
    first.
    """
    stack = _answer_stack(model)
    base, other = _trial_bases(model)
    at = len(base.fed(stack)) - 1
    variants = [
        [Exchange(site, (token,), other.states[site][token : token + 1])]
        for site in _some_sites(model)
        for token in (0, len(base.fed(site.stack)) // 2)
    ]
    expected = torch.stack(
        [alone(model, base, variant, at) for variant in variants]
    ).double()
    notes: list[str] = []
    skips = skipping(model, stack)
    joins = not skips.refused and all(
        tap.layout == Tap("", 0, "output").layout for tap in _taps(model, stack)
    )
    if not joins:
        notes.append(
            "Every block was run, because"
            f" {skips.refused or 'its states do not lie text by text'}."
        )
    if why := _why_not_reused(model, base):
        notes.append(f"Keys and values were computed anew, because {why}.")
    for shortcuts in _attempts(
        joins, not why, model.encoder_decoder, model.anatomy.head is not None
    ):
        failed = _failure(model, base, variants, expected, at, shortcuts)
        # A batch with a variant of the first token reuses nothing.
        if shortcuts.reuses and not failed:
            later = [k for k, (one,) in enumerate(variants) if one.tokens[0]]
            failed = _failure(
                model,
                base,
                [variants[k] for k in later],
                expected[later],
                at,
                shortcuts,
            )
        if not failed:
            return replace(shortcuts, notes=tuple(notes))
        notes.append(f"{_name(shortcuts)} was left out: {failed}.")
    return Shortcuts(batched=False, notes=tuple(notes))


def _trial_bases(model: ModelLike) -> list[Base]:
    return begin(model, _trial_inputs(model), _some_sites(model))


def _trial_inputs(model: ModelLike) -> Inputs:
    limit = min(7, model.text_encoder.window or 7)
    ids = list(map(tuple, trial_ids(model.module, 4, limit, seed=9).tolist()))
    targets = (
        Inputs(tuple(row[: min(5, limit)] for row in ids[2:]))
        if model.encoder_decoder
        else None
    )
    return Inputs(tuple(ids[:2]), targets=targets)


def _why_not_reused(model: ModelLike, base: Base) -> str:
    if not _answering(model).causal:
        return "a token attends to those after it"
    if "past_key_values" not in accepts(model.module):
        return "its forward takes no past_key_values"
    return _unusable(base.cache, _answering(model).depth, base.padded_length)


def _attempts(
    joins: bool, reuses: bool, encoder: bool, head: bool
) -> Iterator[Shortcuts]:
    """The shortcuts in the order in which they are tried; those of an encoder come
    first where there is one.
    """
    for encodes_once in (True, False) if encoder else (False,):
        for join, reuse in ((True, True), (True, False), (False, True), (False, False)):
            if (joins or not join) and (reuses or not reuse):
                yield Shortcuts(join, reuse, narrows=head, encodes_once=encodes_once)
        if head:
            yield Shortcuts(narrows=False, encodes_once=encodes_once)


def _name(shortcuts: Shortcuts) -> str:
    used = [
        ("joining at a layer", shortcuts.joins),
        ("reuse of keys and values", shortcuts.reuses),
        ("one run of the encoder", shortcuts.encodes_once),
        ("a batch", True),
    ]
    name = " with ".join(name for name, is_used in used if is_used)
    return name[0].upper() + name[1:]


def _failure(
    model: ModelLike,
    base: Base,
    variants: Sequence[Sequence[Exchange]],
    expected: Tensor,
    at: int,
    shortcuts: Shortcuts,
) -> str:
    """Why a shortcut cannot be taken; empty if it gives what passes one at a time give,
    within rounding.
    """
    try:
        logits = sweep(model, base, variants, at, shortcuts=shortcuts).values.double()
        worst = float(
            ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max()
        ) / logits_tolerance(model)
    except Exception as error:
        return f"it stopped with {type(error).__name__}: {str(error)[:120]}"
    return (
        ""
        if worst <= 1
        else f"its logits were off by {worst:,.0f} times the rounding tolerance"
    )


def _some_sites(model: ModelLike) -> tuple[Site, ...]:
    """The first, the last and a middle layer of each stack, and what a middle block
    adds, where it can be seen.
    """
    found: list[Site] = []
    for stack in model.anatomy.stacks:
        name = stack.name if model.encoder_decoder else None
        middle = (stack.depth + 1) // 2
        wanted = [
            Site(0, "", name),
            Site(middle, "attn", name),
            Site(middle, "", name),
            Site(stack.depth, "", name),
        ]
        found += [
            site
            for site in wanted
            if site in model.anatomy.taps and _may_change(model, site)
        ]
    return tuple(dict.fromkeys(found))


def _may_change(model: ModelLike, site: Site) -> bool:
    try:
        return bool(plan(model.anatomy, {site: lambda states: states}))
    except LookupError:
        return False


def _answering(model: ModelLike) -> Stack:
    """The stack whose last state makes the logits."""
    return model.anatomy.stacks[-1]


def _answer_stack(model: ModelLike) -> str | None:
    return "decoder" if model.encoder_decoder else None


def _taps(model: ModelLike, stack: str | None) -> Sequence[Tap]:
    own = next(one for one in model.anatomy.stacks if stack in (None, one.name))
    return own.proof.taps


def _may_share(model: ModelLike, inputs: Inputs) -> bool:
    """Whether the texts may go through in one batch."""
    switch = model.batching.rope_switch
    if inputs.pad(model).has_padding and not model.batching.padding_safe:
        return False
    return switch is None or not min(inputs.lengths) <= switch < max(inputs.lengths)


def _keeps_cache(model: ModelLike) -> bool:
    """Whether a pass over a whole text may keep a cache: FSMT then has no causal mask,
    and ProphetNet stops.
    """
    return "use_cache" in accepts(model.module) and model.trials.once(
        "keep cache", lambda: _try_cache(model), form=bool
    )


def _try_cache(model: ModelLike) -> bool:
    inputs = _trial_inputs(model)
    try:
        plain, cached = (
            [base.logits for base in _own_passes(model, inputs, (), cached)]
            for cached in (False, True)
        )
    except PassError:
        raise
    except Exception:  # whatever a model's own code raises
        return False
    allowed = logits_tolerance(model)
    return all(
        (a - b).norm() <= allowed * a.norm() for a, b in zip(plain, cached, strict=True)
    )


def _own_passes(
    model: ModelLike, inputs: Inputs, sites: Sequence[Site], cached: bool
) -> Iterator[Base]:
    """The own passes of some texts in one batch; their states stay on the device."""
    batch = inputs.pad(model)
    buffers = buffers_for(model, sites, inputs, keep="device")
    with (
        model.lock,
        autograd.restored(),
        torch.no_grad(),
        hooks.watching([with_cache(model.module, cached)]),
    ):
        output = run(model, batch, range(len(inputs)), buffers, logits=True)
    states = {stack: buffer.states() for stack, buffer in buffers.items()}
    answering = batch.of_stack("decoder")
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:-1] != answering.ids.shape:
        reason = (
            "its head does not give one row per token"
            if isinstance(logits, Tensor)
            else "it has no head"
        )
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(f"No logits of {model.anatomy.name}", reason, remedy)
    encoded = getattr(output, "encoder_last_hidden_state", None)
    for row in range(len(inputs)):
        yield Base(
            inputs.some([row]),
            {site: states[site.stack].of(row)[site] for site in sites},
            logits[row, : answering.lengths[row]],
            row,
            answering.ids.shape[1],
            getattr(output, "past_key_values", None),
            None if encoded is None else encoded[row : row + 1, : len(inputs.ids[row])],
        )


def _batches(
    model: ModelLike,
    base: Base,
    variants: Sequence[Sequence[Exchange]],
    at: int,
    shortcuts: Shortcuts,
) -> Iterator[tuple[int, list[int]]]:
    """Which variants go together, and the first token that is computed: the lowest
    layer first, up to so many tokens.

    Variants that begin at one token share the keys and values before it. Those that
    begin later join them where that costs fewer tokens than another pass would.
    """
    kind = model.device.type if model.device.type in BATCH_TOKENS else "cpu"
    starts: dict[tuple[str | None, int], list[int]] = defaultdict(list)
    for number, variant in enumerate(variants):
        stack = variant[0].site.stack
        first = min(at, *(min(one.tokens) for one in variant))
        reused = shortcuts.reuses and stack == _answer_stack(model)
        starts[stack, first if reused else 0].append(number)
    for start, numbers in _merged(starts, BATCH_OVERHEAD[kind]):
        numbers = sorted(
            numbers, key=lambda number: min(one.site for one in variants[number])
        )
        length = len(base.ids) + len(base.targets or ()) - start
        many = max(1, BATCH_TOKENS[kind] // length) if shortcuts.batched else 1
        yield from (
            (start, numbers[i : i + many]) for i in range(0, len(numbers), many)
        )


def _merged(
    starts: Mapping[tuple[str | None, int], list[int]], overhead: int
) -> Iterator[tuple[int, list[int]]]:
    """Groups of variants of one stack, each computed from the first token at which one
    of them begins.
    """
    stacks = dict.fromkeys(stack for stack, _ in starts)
    for stack in stacks:
        group: list[int] = []
        begin_at = extra = 0
        for start in sorted(first for own, first in starts if own == stack):
            numbers = starts[stack, start]
            extra += (start - begin_at) * len(numbers)
            if group and extra <= overhead:
                group += numbers
                continue
            if group:
                yield begin_at, group
            group, begin_at, extra = list(numbers), start, 0
        yield begin_at, group


def _entry(variant: Sequence[Exchange], depth: int) -> int:
    """The layer from which a variant differs: that of its lowest site, or the one below
    the block that it is in.
    """
    first = min(one.site for one in variant)
    return depth if first.layer is None else first.layer - bool(first.part)


def _pass(
    model: ModelLike,
    base: Base,
    variants: Sequence[Sequence[Exchange]],
    start: int,
    at: int,
    shortcuts: Shortcuts,
) -> Tensor:
    """One pass over variants in the order of their entries: the logits [variant,
    vocabulary] at one position.
    """
    stack, answering = variants[0][0].site.stack, _answer_stack(model)
    length, count = len(base.fed(answering)) - start, len(variants)
    rows = count
    # So that no other axis looks like the texts.
    while rows > 1 and rows in (
        length,
        length + start,
        len(base.ids),
    ):
        rows += 1
    variants = [*variants, *[variants[-1]] * (rows - count)]
    depth = _depth(model, stack)
    entries = [_entry(variant, depth) for variant in variants]
    joins = (
        shortcuts.joins
        and not skipping(model, stack).refused
        and not _needs_all_rows(model, variants)
    )
    working = [
        sum(entry < k for entry in entries) if joins else rows
        for k in range(1, depth + 1)
    ]
    encodes = not shortcuts.encodes_once or stack == "encoder"
    given = _arguments(
        model, base, rows, start, [max(1, many) for many in working], encodes=encodes
    )
    seen = length if stack == answering else len(base.ids)
    changes, made = _changes(variants, start if stack == answering else 0, model.device)
    editor = Editor(model.anatomy, changes, _every_token(seen))
    watches = editor.watches(model.module)
    if shortcuts.narrows:
        watches.append(_narrow(model, length, at - start))
    entering = _joining(model, base, stack, entries, start) if joins else nullcontext()
    with (
        autograd.restored(inference=False),
        torch.no_grad(),
        entering,
        hooks.watching(watches),
    ):
        logits = hooks.run(model.module, given).logits
    if made != set(changes):
        reason = f"the state at {min(set(changes) - made)} was not reached in this pass"
        raise PassError(
            f"Cannot change the states of {model.anatomy.name}",
            reason,
            "Report this model.",
        )
    kept: Tensor = logits[:count, 0 if logits.shape[1] == 1 else at - start]
    return kept


def _arguments(
    model: ModelLike,
    base: Base,
    rows: int,
    start: int,
    working: Sequence[int],
    *,
    encodes: bool,
) -> dict[str, Any]:
    """What the module is called with: the tokens from `start` on, and what is known of
    those before.
    """
    given = (
        _repeated(base.inputs, rows)
        .pad(model)
        .arguments(model.module, masked=model.batching.needs_mask)
    )
    if start:
        name = "input_ids" if base.targets is None else "decoder_input_ids"
        given[name] = given[name][:, start:]
        given["past_key_values"] = _beginning(
            base.cache, base.row, start, working, len(base.ids)
        )
        given["use_cache"] = True
    if (
        base.encoder_output is not None
        and not encodes
        and "encoder_outputs" in accepts(model.module)
    ):
        from transformers.modeling_outputs import BaseModelOutput

        state: Any = base.encoder_output.expand(rows, -1, -1)
        given["encoder_outputs"] = BaseModelOutput(last_hidden_state=state)
    return given


def _repeated(inputs: Inputs, rows: int) -> Inputs:
    return inputs.some([0] * rows)


def _needs_all_rows(model: ModelLike, variants: Sequence[Sequence[Exchange]]) -> bool:
    """Whether a block must be run with every row of the batch.

    Parts of a block that is called repeatedly are told by counting calls, and skipped
    ones would not be counted. The stream in the middle of a block is the sum of what
    entered it and what attention adds, which must have equal rows.
    """
    sites = {one.site for variant in variants for one in variant}
    return any(
        site.part == "mid" or (site.part and model.anatomy.taps[site].call)
        for site in sites
    )


def _depth(model: ModelLike, stack: str | None) -> int:
    return next(one for one in model.anatomy.stacks if stack in (None, one.name)).depth


def _changes(
    variants: Sequence[Sequence[Exchange]], start: int, device: torch.device
) -> tuple[dict[Site, Callable[[Tensor], Tensor]], set[Site]]:
    """For each site, one change of all the rows that have one there; and the sites
    where it was made, as they are.
    """
    made: set[Site] = set()
    places: dict[Site, list[tuple[int, Exchange]]] = defaultdict(list)
    for row, variant in enumerate(variants):
        for one in variant:
            places[one.site].append((row, one))

    def change(
        site: Site, some: Sequence[tuple[int, Exchange]]
    ) -> Callable[[Tensor], Tensor]:
        texts = torch.tensor(
            [row for row, one in some for _ in one.tokens], device=device
        )
        columns = torch.tensor(
            [token - start for _, one in some for token in one.tokens], device=device
        )
        values = torch.cat([one.values for _, one in some])

        def put(states: Tensor) -> Tensor:
            states[texts.to(states.device), columns.to(states.device)] = values.to(
                states
            )
            made.add(site)
            return states

        return put

    return {site: change(site, places[site]) for site in sorted(places)}, made


def _every_token(length: int) -> Callable[[str | None, Tensor, Tap], Positions]:
    """Every row of a tensor is a variant, and every token is there."""

    def where(stack: str | None, tensor: Tensor, tap: Tap) -> Positions:
        rows = (
            tensor.shape[0] // length
            if tap.layout.flat
            else tensor.shape[tap.layout.text]
        )
        return Positions(torch.zeros(rows, length, dtype=torch.long), None)

    return where


def _joining(
    model: ModelLike, base: Base, stack: str | None, entries: Sequence[int], start: int
) -> AbstractContextManager[None]:
    """Let each row enter at its layer, with what the text's own pass has there."""
    forms = skipping(model, stack).forms
    start = start if stack == _answer_stack(model) else 0
    joins: dict[nn.Module, dict[int, hooks.Join]] = defaultdict(dict)
    for k, (tap, form) in enumerate(
        zip(_taps(model, stack)[1:], forms, strict=True), 1
    ):
        before, entering = (
            sum(entry < k for entry in entries),
            sum(entry == k for entry in entries),
        )
        if before == len(entries):
            break
        values = base.states[Site(k, "", stack)][start:]
        joined = values.expand(entering, *values.shape) if entering else None
        joins[model.module.get_submodule(tap.path)][tap.call] = hooks.Join(
            len(entries), before, form, joined
        )
    return hooks.joining(joins)


def _narrow(model: ModelLike, length: int, place: int) -> hooks.Watch:
    """Only the wanted token goes into the head, which makes a row as long as the
    vocabulary of each.
    """
    head = model.anatomy.head
    assert head is not None

    def seen(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        state = hooks.state_in(args, kwargs)
        if state is None or state.ndim != 3 or state.shape[1] != length:
            return None
        return hooks.with_state_in(args, kwargs, state[:, place : place + 1])

    return hooks.Watch(model.module.get_submodule(head.path), "input", seen)


def _unusable(cache: Any, blocks: int, tokens: int) -> str:
    """Why the keys and values of a pass over so many tokens cannot be used again; empty
    if they can.
    """
    if cache is None:
        return "it gave no keys and values"
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if not isinstance(layers, list) or len(layers) != blocks:
        return (
            f"its cache ({type(cache).__name__}) does not hold keys and values for each"
            f" of its {blocks} blocks"
        )
    for layer in layers:
        if type(layer).__name__ not in PLAIN_CACHE_LAYERS:
            return (
                f"its cache holds a {type(layer).__name__}, which is more than keys and"
                " values"
            )
        if (
            not isinstance(layer.keys, Tensor)
            or layer.keys.ndim != 4
            or layer.keys.shape[2] != tokens
        ):
            return (
                "its cache does not hold every token: its attention looks back only"
                " so far"
            )
    return ""


def _beginning(
    cache: Any, row: int, tokens: int, rows: Sequence[int], source: int
) -> Any:
    """The first tokens of one row of a cache, for so many rows in each block; the cache
    itself stays as it is.

    `source` is the length of the encoder's text, where there is one: its keys and
    values are the same for all.
    """
    new = copy(cache)
    if hasattr(cache, "self_attention_cache"):
        new.self_attention_cache = _cut_cache(
            cache.self_attention_cache, row, tokens, rows
        )
        new.cross_attention_cache = _cut_cache(
            cache.cross_attention_cache, row, source, rows
        )
        new.is_updated = dict(cache.is_updated)
        return new
    return _cut_cache(cache, row, tokens, rows)


def _cut_cache(cache: Any, row: int, tokens: int, rows: Sequence[int]) -> Any:
    new = copy(cache)
    new.layers = [
        _cut_layer(layer, row, tokens, many)
        for layer, many in zip(cache.layers, rows, strict=True)
    ]
    return new


def _cut_layer(layer: Any, row: int, tokens: int, rows: int) -> Any:
    new = copy(layer)
    new.keys, new.values = (
        side[row : row + 1, :, :tokens].expand(rows, -1, -1, -1)
        for side in (layer.keys, layer.values)
    )
    if hasattr(layer, "cumulative_length"):
        new.cumulative_length = tokens
    return new

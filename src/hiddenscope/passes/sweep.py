"""Sweep: run one text in many patched variants and read the logits of one token.

Variants go through the model together. Each is computed only from its first patch on:
in depth it joins the batch at that layer, and in a causal model the keys and values of
the tokens before the patch come from the clean run. An encoder that is not patched is
run once. None of these shortcuts is assumed: on first use each is tried on the model
against variants that are run one at a time without shortcuts. One that fails is left
out and noted.

What holds throughout, of the caller's arguments first:

- A variant has at least one patch, and each patch at least one token.
- All patches of a variant lie in one stack, at most one of them at a site. Those of all
  variants at one site replace whole states, or equally many columns.
- Tokens and `at` count from the start of a text, from 0 up, never from its end. Those
  of a patch are in the text of its stack, `at` in the text that makes the logits.
- The variants of a batch patch the same stack, and start at the same token: none has a
  patch before it, and it is not beyond `at`.
- Only the stack that makes the logits starts later than at token 0.
- The rows of a batch are sorted by the layer at which they join it, because a
  hooks.Join runs a block on the first rows and appends those that join above it. The
  order of sites is the order of the pass, so sorting by the lowest site does that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.discovery import OperationTap, Stack, Tap, accepts
from hiddenscope.discovery.trace import PLAIN
from hiddenscope.errors import NotFinite, PassError, is_out_of_memory
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes.changes import Change, Positions, Replace
from hiddenscope.passes.clean_run import (
    CleanRun,
    logits_tolerance,
    run_clean,
    trial_inputs,
)
from hiddenscope.passes.edit import Editor, Where, edit, plan
from hiddenscope.passes.inputs import BATCH_OVERHEAD, BATCH_TOKENS
from hiddenscope.passes.key_values import first_tokens, why_not_reusable
from hiddenscope.passes.protocol import PassModel
from hiddenscope.passes.resume import try_skipping
from hiddenscope.sites import Site

if TYPE_CHECKING:
    from transformers.modeling_outputs import BaseModelOutput


@dataclass(frozen=True, eq=False)
class Patch:
    """Values [token, width] that replace the state at a site, at some tokens.

    With `columns` they replace some columns of it, such as a head's of `attn.z`. All
    patches of a sweep at one site replace equally many.
    """

    site: Site
    tokens: tuple[int, ...]
    values: Tensor
    columns: slice | None = None

    def change(self) -> Change:
        """Return the patch as a change of a pass over one text."""
        if self.columns is None:
            return Replace(self.values, tokens=list(self.tokens))
        tokens, columns, values = list(self.tokens), self.columns, self.values

        def put(states: Tensor) -> Tensor:
            states[0, tokens, columns] = values.to(states)
            return states

        return put


Variant: TypeAlias = Sequence[Patch]
"""The patches that are made together in one run of the text."""


@dataclass(frozen=True)
class Shortcuts:
    """Shortcuts that were verified on this model.

    `joins`: a variant skips the blocks below its first patch. `reuses`: it takes the
    keys and values of the tokens before its first patch from the clean run. `narrows`:
    the head runs on the requested token alone. `encodes_once`: an unpatched encoder is
    not run again. `batched`: variants share a pass. `notes` say why a shortcut is not
    taken.
    """

    joins: bool = False
    reuses: bool = False
    narrows: bool = False
    encodes_once: bool = False
    batched: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SweepResult:
    """The values read from each variant, the cost in passes and tokens, and notes."""

    values: Tensor
    passes: int
    tokens: int
    notes: tuple[str, ...]


def _all_logits(logits: Tensor) -> Tensor:
    return logits


def _ignore_progress(amount: float) -> None:
    pass


def sweep(
    model: PassModel,
    clean: CleanRun,
    variants: Sequence[Variant],
    at: int,
    *,
    read: Callable[[Tensor], Tensor] = _all_logits,
    shortcuts: Shortcuts | None = None,
    advance: Callable[[float], None] = _ignore_progress,
) -> SweepResult:
    """Run patched variants of a clean run and read the logits of the token `at`.

    `read` reduces the logits [variant, vocabulary] of each batch to what is kept, so
    that they are never in memory all at once. `advance` is called after each batch with
    the number of its variants.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> clean, other = run_clean(model, [[5, 6, 7], [5, 8, 7]], [])
    >>> patch = Patch(Site(2), (0, 1, 2), other.states[Site(2)])
    >>> result = sweep(model, clean, [[patch]], at=2)
    >>> torch.allclose(result.values[0], other.logits[2], atol=1e-5)
    True
    """
    if shortcuts is None:
        shortcuts = shortcuts_of(model)
    if shortcuts.reuses:
        shortcuts = _without_useless_cache(model, clean, shortcuts)
    rows: dict[int, Tensor] = {}
    passes = tokens = 0
    with model.lock:
        for start, numbers in _batches(model, clean, variants, at, shortcuts):
            batch = [variants[number] for number in numbers]
            logits = _run_batch(model, clean, batch, start, at, shortcuts)
            if bool(logits.isnan().any()):
                raise NotFinite(
                    f"No logits of {model.anatomy.name}",
                    "there is a NaN among them",
                    "Look at the values that were put in.",
                )
            rows.update(zip(numbers, read(logits), strict=True))
            length = len(clean.input_ids(_answer_stack(model))) - start
            if _runs_encoder(model, clean, batch, shortcuts):
                length += len(clean.ids)
            passes += 1
            tokens += len(batch) * length
            advance(len(batch))
    if rows:
        values = torch.stack([rows[number] for number in range(len(variants))])
    else:
        values = read(clean.logits[:0])
    return SweepResult(values, passes, tokens, shortcuts.notes)


def run_unbatched(
    model: PassModel, clean: CleanRun, variant: Variant, at: int
) -> Tensor:
    """Run one patched variant without shortcuts and return its logits.

    Sweeps are checked against this.
    """
    changes: dict[str | Site, Change] = {}
    for patch in variant:
        changes[patch.site] = patch.change()
    edited = edit(model, clean.inputs, changes, (), logits=True)
    assert edited.logits is not None
    return edited.logits[at]


# The stack that answers is the one whose last state makes the logits: the decoder of an
# encoder-decoder, or the only stack. Sites name a stack only where there are two.


def _answer_stack(model: PassModel) -> str | None:
    return "decoder" if model.encoder_decoder else None


def _answering(model: PassModel) -> Stack:
    return model.anatomy.stacks[-1]


def _stack_of(variant: Variant) -> str | None:
    """Return the stack that a variant patches; its patches are all in one."""
    return variant[0].site.stack


# Grouping variants into batches.


def _batches(
    model: PassModel,
    clean: CleanRun,
    variants: Sequence[Variant],
    at: int,
    shortcuts: Shortcuts,
) -> Iterator[tuple[int, list[int]]]:
    """Yield batches of variants: the first token to compute, and their numbers.

    Within a batch the variants are ordered by their lowest site.
    """
    device = model.device.type
    if device not in BATCH_TOKENS:
        device = "cpu"
    starts: dict[tuple[str | None, int], list[int]] = defaultdict(list)
    for number, variant in enumerate(variants):
        stack = _stack_of(variant)
        start = 0
        if shortcuts.reuses and stack == _answer_stack(model):
            start = min(at, *(min(patch.tokens) for patch in variant))
        starts[stack, start].append(number)

    def lowest_site(number: int) -> Site:
        return min(patch.site for patch in variants[number])

    for start, numbers in _merged(starts, BATCH_OVERHEAD[device]):
        ordered = sorted(numbers, key=lowest_site)
        length = len(clean.ids) + len(clean.targets or ()) - start
        size = 1
        if shortcuts.batched:
            size = max(1, BATCH_TOKENS[device] // length)
        for first in range(0, len(ordered), size):
            yield start, ordered[first : first + size]


def _merged(
    starts: Mapping[tuple[str | None, int], list[int]], overhead_tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Merge variants of one stack that start at different tokens.

    Variants that start at the same token share the keys and values before it. Those
    that start later join them as long as the group computes no more tokens in vain, all
    of its variants together, than the overhead of a pass.
    """
    for stack in dict.fromkeys(stack for stack, _ in starts):
        group: list[int] = []
        group_start = extra_tokens = 0
        for start in sorted(first for name, first in starts if name == stack):
            numbers = starts[stack, start]
            extra_tokens += (start - group_start) * len(numbers)
            if group and extra_tokens <= overhead_tokens:
                group += numbers
                continue
            if group:
                yield group_start, group
            group, group_start, extra_tokens = list(numbers), start, 0
        yield group_start, group


# Running one batch.


def _run_batch(
    model: PassModel,
    clean: CleanRun,
    variants: Sequence[Variant],
    start: int,
    at: int,
    shortcuts: Shortcuts,
) -> Tensor:
    """Run variants in one pass and return their logits [variant, vocabulary].

    They are those of the token `at`. The tokens before `start` are not computed. The
    variants are a batch of `_batches`: not empty, of one stack, sorted by lowest site,
    and without a patch before `start`.
    """
    stack = _stack_of(variants[0])
    length = len(clean.input_ids(_answer_stack(model))) - start
    # Patches count tokens in the text of their own stack, and only that of the
    # answering stack is cut at `start`.
    first, tokens = 0, len(clean.ids)
    if stack == _answer_stack(model):
        first, tokens = start, length
    count = len(variants)
    rows = _batch_rows(count, (length, length + start, len(clean.ids)))
    # Repeats of the last variant fill the batch; their logits are dropped at the end.
    variants = [*variants, *[variants[-1]] * (rows - count)]
    depth = model.anatomy.stack_named(stack).depth
    entries = [_entry_layer(variant, depth) for variant in variants]
    rows_per_block = [rows] * depth
    entering: AbstractContextManager[None] = nullcontext()
    if shortcuts.joins and _may_join(model, stack, variants):
        layers = range(1, depth + 1)
        rows_per_block = [_rows_below(entries, layer) for layer in layers]
        entering = _joining(model, clean, stack, entries, first)
    arguments = _arguments(model, clean, rows, start, rows_per_block)
    if model.encoder_decoder and not _runs_encoder(model, clean, variants, shortcuts):
        arguments["encoder_outputs"] = _encoder_outputs(clean, rows)
    changes = _Changes(variants, first, model.device)
    editor = Editor(model.anatomy, changes.by_site, _every_token(tokens))
    watches = editor.watches(model.module)
    if shortcuts.narrows:
        watches.append(_narrow_head(model, length, at - start))
    with (
        # Logits that are made in inference mode could not be trained on.
        autograd.restored(inference=False),
        torch.no_grad(),
        entering,
        hooks.watching(watches),
    ):
        logits = hooks.logits_in(hooks.call_module(model.module, arguments))
    assert logits is not None, "the clean run has some"
    changes.require_all_made(model)
    # A narrowed head has made the logits of the requested token alone.
    token = 0 if logits.shape[1] == 1 else at - start
    return logits[:count, token]


def _batch_rows(count: int, lengths: Sequence[int]) -> int:
    """Return the batch size for some variants, which is none of these lengths.

    hooks.joining cuts every tensor of two or more axes whose first is as long as the
    batch. A mask or a table of positions with as many tokens would be cut too. A single
    row needs no such care: a block runs it whole or is skipped.
    """
    rows = count
    while rows > 1 and rows in lengths:
        rows += 1
    return rows


def _entry_layer(variant: Variant, depth: int) -> int:
    """Return the layer up to which a variant equals the clean run.

    That is the layer of its lowest site, or the one below the block that it is in.
    """
    lowest = min(patch.site for patch in variant)
    if lowest.layer is None:
        return depth
    return lowest.layer - 1 if lowest.part else lowest.layer


def _rows_below(entries: Sequence[int], layer: int) -> int:
    """Count the rows that have joined the batch below a layer."""
    return sum(entry < layer for entry in entries)


def _may_join(model: PassModel, stack: str | None, variants: Sequence[Variant]) -> bool:
    """Tell whether these variants may join the batch at different layers."""
    if try_skipping(model, stack).refused:
        return False
    for variant in variants:
        for patch in variant:
            site = patch.site
            # To change `mid`, the editor adds the stream that it saw below the block to
            # attention's output inside. Below the first block that stream is the whole
            # batch, and inside it there are only the rows that have joined.
            if site.part == "mid":
                return False
            # The parts of a block that is called repeatedly are told apart by counting
            # its calls, and skipped ones would not be counted.
            if site.part and model.anatomy.tap(site).call:
                return False
    return True


def _joining(
    model: PassModel,
    clean: CleanRun,
    stack: str | None,
    entries: Sequence[int],
    start: int,
) -> AbstractContextManager[None]:
    """Let each row enter at its layer, with the clean state of that layer."""
    forms = try_skipping(model, stack).forms
    taps = model.anatomy.stack_named(stack).proof.taps[1:]
    joins: dict[nn.Module, dict[int, hooks.Join]] = defaultdict(dict)
    for layer, (tap, form) in enumerate(zip(taps, forms, strict=True), 1):
        below = _rows_below(entries, layer)
        if below == len(entries):
            break
        joined = None
        entering = entries.count(layer)
        if entering:
            values = clean.states[Site(layer, "", stack)][start:]
            joined = values.expand(entering, *values.shape)
        block = model.module.get_submodule(tap.path)
        joins[block][tap.call] = hooks.Join(len(entries), below, form, joined)
    return hooks.joining(joins)


def _arguments(
    model: PassModel,
    clean: CleanRun,
    rows: int,
    start: int,
    rows_per_block: Sequence[int],
) -> dict[str, Any]:
    """Return the arguments of the module: the tokens from `start` on, and a cache."""
    batch = clean.inputs.some([0] * rows).pad(model)
    arguments = batch.arguments(model.module, masked=model.batching.needs_mask)
    if start:
        name = "input_ids" if clean.targets is None else "decoder_input_ids"
        arguments[name] = arguments[name][:, start:]
        # A cache layer without any row reports no tokens, and transformers takes masks
        # and positions from that.
        cached_rows = [max(1, count) for count in rows_per_block]
        arguments["past_key_values"] = first_tokens(
            clean.cache, clean.row, start, cached_rows, len(clean.ids)
        )
        arguments["use_cache"] = True
    return arguments


def _runs_encoder(
    model: PassModel, clean: CleanRun, batch: Sequence[Variant], shortcuts: Shortcuts
) -> bool:
    """Tell whether a batch runs the encoder of an encoder-decoder again."""
    if not model.encoder_decoder:
        return False
    if _stack_of(batch[0]) == "encoder" or not shortcuts.encodes_once:
        return True
    return bool(_why_not_encoded_once(model, clean))


def _encoder_outputs(clean: CleanRun, rows: int) -> BaseModelOutput:
    """Return the argument that spares the module a run of its encoder."""
    from transformers.modeling_outputs import BaseModelOutput

    assert clean.encoder_output is not None
    state: Any = clean.encoder_output.expand(rows, -1, -1)
    return BaseModelOutput(last_hidden_state=state)


class _Changes:
    """One change for each patched site, for all rows that have a patch there."""

    def __init__(
        self, variants: Sequence[Variant], start: int, device: torch.device
    ) -> None:
        self.start = start
        self.device = device
        self.made: set[Site] = set()
        patches: dict[Site, list[tuple[int, Patch]]] = defaultdict(list)
        for row, variant in enumerate(variants):
            for patch in variant:
                patches[patch.site].append((row, patch))
        self.by_site: dict[Site, Change] = {}
        for site in sorted(patches):
            self.by_site[site] = self._change(site, patches[site])

    def _change(
        self, site: Site, patches: Sequence[tuple[int, Patch]]
    ) -> Callable[[Tensor], Tensor]:
        rows: list[int] = []
        columns: list[int] = []
        for row, patch in patches:
            rows += [row] * len(patch.tokens)
            columns += [token - self.start for token in patch.tokens]
        index = [
            torch.tensor(rows, device=self.device),
            torch.tensor(columns, device=self.device),
        ]
        channels = _channels([patch for _, patch in patches])
        if channels is not None:
            index = [index[0][:, None], index[1][:, None], channels.to(self.device)]
        values = torch.cat([patch.values for _, patch in patches])

        def put(states: Tensor) -> Tensor:
            places = tuple(part.to(states.device) for part in index)
            states[places] = values.to(states)
            self.made.add(site)
            return states

        return put

    def require_all_made(self, model: PassModel) -> None:
        """Raise PassError if the pass did not reach a patched site."""
        missing = set(self.by_site) - self.made
        if missing:
            raise PassError(
                f"Cannot change the states of {model.anatomy.name}",
                f"the state at {min(missing)} was not reached in this pass",
                "Report this model.",
            )


def _channels(patches: Sequence[Patch]) -> Tensor | None:
    """Return the channels [token, width] that patches replace; None for all of them."""
    rows = []
    for patch in patches:
        if patch.columns is None:
            return None
        channels = torch.arange(patch.columns.start, patch.columns.stop)
        rows.append(channels.expand(len(patch.tokens), -1))
    return torch.cat(rows)


def _every_token(length: int) -> Where:
    """Return the positions of a batch in which every row has all of its tokens."""

    def where(stack: str | None, tensor: Tensor, tap: Tap | OperationTap) -> Positions:
        rows = tap.layout.texts(tensor, length)
        # A change by a function is made at every position that is not -1, padding: only
        # that and the shape matter here, not which positions they are.
        return Positions(torch.zeros(rows, length, dtype=torch.long), None)

    return where


def _narrow_head(model: PassModel, length: int, token: int) -> hooks.Watch:
    """Return a hook that lets the head see only one token.

    The head makes a row as long as the vocabulary for each token that it sees.
    """
    head = model.anatomy.head
    assert head is not None

    def narrow(args: hooks.Args, kwargs: dict[str, Any]) -> Any:
        state = hooks.state_in(args, kwargs)
        if state is None or state.ndim != 3 or state.shape[1] != length:
            return None
        return hooks.with_state_in(args, kwargs, state[:, token : token + 1])

    return hooks.Watch(model.module.get_submodule(head.path), "input", narrow)


# Trying the shortcuts.


def shortcuts_of(model: PassModel) -> Shortcuts:
    """Return the shortcuts of a model, tried once on the model as it is."""
    with model.lock:
        return model.trials.once("sweep", lambda: _try_shortcuts(model), form=Shortcuts)


def _try_shortcuts(model: PassModel) -> Shortcuts:
    """Try shortcuts on a few variants of a short text, the most frugal ones first."""
    sites = _trial_sites(model)
    clean, other = run_clean(model, trial_inputs(model), sites)
    at = len(clean.input_ids(_answer_stack(model))) - 1
    variants: list[Variant] = []
    for site in sites:
        for token in (0, len(clean.input_ids(site.stack)) // 2):
            values = other.states[site][token : token + 1]
            variants.append([Patch(site, (token,), values)])
    unbatched = [run_unbatched(model, clean, variant, at) for variant in variants]
    expected = torch.stack(unbatched).double()
    notes: list[str] = []
    not_joined = _why_not_joined(model)
    if not_joined:
        notes.append(f"Every block was run, because {not_joined}.")
    not_reused = _why_not_reused(model, clean)
    if not_reused:
        notes.append(f"Keys and values were computed anew, because {not_reused}.")
    not_encoded_once = _why_not_encoded_once(model, clean)
    if model.encoder_decoder and not_encoded_once:
        notes.append(
            f"The encoder was run for every variant, because {not_encoded_once}."
        )
    # A batch that holds a variant of the first token reuses nothing, so variants of
    # later tokens are tried by themselves as well.
    later = [k for k, (patch,) in enumerate(variants) if patch.tokens[0]]
    later_variants = [variants[k] for k in later]
    for shortcuts in _candidates(
        joins=not not_joined,
        reuses=not not_reused,
        narrows=model.anatomy.head is not None,
        encodes_once=model.encoder_decoder and not not_encoded_once,
    ):
        failure = _failure(model, clean, variants, expected, at, shortcuts)
        if shortcuts.reuses and not failure:
            failure = _failure(
                model, clean, later_variants, expected[later], at, shortcuts
            )
        if not failure:
            return replace(shortcuts, notes=tuple(notes))
        notes.append(f"{_describe(shortcuts)}: {failure}.")
    return Shortcuts(batched=False, notes=tuple(notes))


def _trial_sites(model: PassModel) -> tuple[Site, ...]:
    """Return three layers of each stack, and what its middle attention adds."""
    sites: list[Site] = []
    for stack in model.anatomy.stacks:
        name = stack.name if model.encoder_decoder else None
        middle = (stack.depth + 1) // 2
        for site in (
            Site(0, "", name),
            Site(middle, "attn", name),
            Site(middle, "", name),
            Site(stack.depth, "", name),
        ):
            if site in model.anatomy.taps and _may_change(model, site):
                sites.append(site)
    return tuple(dict.fromkeys(sites))


def _may_change(model: PassModel, site: Site) -> bool:
    try:
        plan(model.anatomy, {site: lambda states: states})
    except LookupError:
        return False
    return True


def _why_not_joined(model: PassModel) -> str:
    """Say why variants cannot join the batch at different layers; empty if they can."""
    stack = _answer_stack(model)
    trial = try_skipping(model, stack)
    if trial.refused:
        return trial.refused
    taps = model.anatomy.stack_named(stack).proof.taps
    if any(tap.layout != PLAIN for tap in taps):
        return "its states are not [text, token, width]"
    return ""


def _why_not_reused(model: PassModel, clean: CleanRun) -> str:
    """Say why keys and values of a clean run cannot be reused; empty if they can."""
    if not _answering(model).causal:
        return "a token attends to those after it"
    if "past_key_values" not in accepts(model.module):
        return "its forward takes no past_key_values"
    return why_not_reusable(clean.cache, _answering(model).depth, clean.padded_length)


def _why_not_encoded_once(model: PassModel, clean: CleanRun) -> str:
    """Say why an encoder must be run for every variant; empty if it need not be."""
    if "encoder_outputs" not in accepts(model.module):
        return "its forward takes no encoder_outputs"
    if clean.encoder_output is None:
        return "its output does not hold the encoder's last state"
    return ""


def _without_useless_cache(
    model: PassModel, clean: CleanRun, shortcuts: Shortcuts
) -> Shortcuts:
    """Turn `reuses` off where the cache of this text does not hold every token."""
    depth = _answering(model).depth
    reason = why_not_reusable(clean.cache, depth, clean.padded_length)
    if not reason:
        return shortcuts
    note = f"Keys and values were computed anew, because {reason}."
    return replace(shortcuts, reuses=False, notes=(*shortcuts.notes, note))


def _candidates(
    *, joins: bool, reuses: bool, narrows: bool, encodes_once: bool
) -> Iterator[Shortcuts]:
    """Yield the possible shortcuts in the order of trial, the most frugal ones first.

    All that leave an encoder out come before any that runs it again.
    """
    for once in (True, False) if encodes_once else (False,):
        for join in (True, False) if joins else (False,):
            for reuse in (True, False) if reuses else (False,):
                yield Shortcuts(join, reuse, narrows, once)
        if narrows:
            yield Shortcuts(narrows=False, encodes_once=once)


def _failure(
    model: PassModel,
    clean: CleanRun,
    variants: Sequence[Variant],
    expected: Tensor,
    at: int,
    shortcuts: Shortcuts,
) -> str:
    """Say why shortcuts do not give the expected logits; empty if they do."""
    try:
        result = sweep(model, clean, variants, at, shortcuts=shortcuts)
        difference = (result.values.double() - expected).norm(dim=-1)
        share = float((difference / expected.norm(dim=-1)).max())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"it stopped with {type(error).__name__}: {str(error)[:120]}"
    excess = share / logits_tolerance(model)
    if excess <= 1:
        return ""
    return f"its logits were off by {excess:,.1f} times the rounding tolerance"


def _describe(shortcuts: Shortcuts) -> str:
    """Name the shortcuts that were tried together and left out."""
    names = []
    if shortcuts.joins:
        names.append("joining at a layer")
    if shortcuts.reuses:
        names.append("reuse of keys and values")
    if shortcuts.encodes_once:
        names.append("one run of the encoder")
    if shortcuts.narrows:
        names.append("a head on one token")
    if shortcuts.batched:
        names.append("a batch")
    *others, last = names
    if not others:
        return f"Tried and left out: {last}"
    return f"Tried together and left out: {', '.join(others)} and {last}"

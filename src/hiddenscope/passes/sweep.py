"""Sweep: run one text in many patched variants and read the logits of some tokens.

The text is run unpatched first, and everything that variants start from is recorded.
They go through the model together. Each is computed only from its first patch on: in
depth it joins the batch at that layer, and in a causal model the keys and values of the
tokens before the patch come from the unpatched run. The head runs on what is read. None
of this is assumed: on first use all of it is tried together on the model, against
variants that are run one at a time. Where that fails, variants share a batch and
nothing else.

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
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.discovery import OperationTap, Tap, accepts
from hiddenscope.discovery.trace import PLAIN
from hiddenscope.errors import NotFinite, is_out_of_memory
from hiddenscope.modules import autograd, hooks, trials
from hiddenscope.passes.buffers import buffers_for
from hiddenscope.passes.changes import Change, Positions, Replace
from hiddenscope.passes.edit import Editor, edit, plan
from hiddenscope.passes.inputs import (
    BATCH_OVERHEAD,
    BATCH_TOKENS,
    Inputs,
    PassModel,
    Texts,
)
from hiddenscope.passes.record import (
    batch_conflict,
    batch_logits,
    check_targets,
    not_reached,
    require_recordable,
    run_pass,
)
from hiddenscope.passes.resume import (
    trial_inputs,
    try_skipping,
    why_not_counted,
    with_cache,
)
from hiddenscope.sites import Site

# The cache layers that hold every token's keys and values and nothing else.
PLAIN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer")


@dataclass(frozen=True, eq=False)
class UnpatchedRun:
    """The unpatched pass of one text: its states, and its logits [token, vocabulary].

    `row` is its number in the batch that it was run in, and `padded_length` the length
    of that batch, in an encoder-decoder that of the targets. `cache` holds the keys and
    values of the whole batch.
    """

    inputs: Inputs
    states: Mapping[Site, Tensor]
    logits: Tensor
    row: int
    padded_length: int
    cache: Any = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the token ids of the text."""
        return self.inputs.ids[0]

    def input_ids(self, stack: str | None = "decoder") -> tuple[int, ...]:
        """Return the token ids that a stack works on, or that make the logits."""
        return self.inputs.of(stack).ids[0]


def run_unpatched(
    model: PassModel,
    texts: Texts | Inputs,
    sites: Sequence[Site],
    *,
    targets: Texts | Inputs | None = None,
) -> list[UnpatchedRun]:
    """Run some texts unpatched, in one batch where that is safe.

    Every layer is kept besides the requested sites, because a variant joins the batch
    with the unpatched state of the last layer before its first patch, or of the patched
    layer.
    """
    require_recordable(model.module)
    inputs = model.encode(texts, targets=targets)
    check_targets(model, inputs, (), logits=True)
    recorded = tuple(sorted({*model.anatomy.select("layer.*"), *sites}))
    # With a cache FSMT has no causal mask, in some versions it runs the last token
    # alone, and ProphetNet stops with an error.
    cached = "use_cache" in accepts(model.module) and model.trials.once(
        "keep cache", lambda: _try_cache(model)
    )
    batches = [inputs]
    if batch_conflict(model, inputs.pad(model)) is not None:
        batches = [inputs.some([text]) for text in range(len(inputs))]
    runs: list[UnpatchedRun] = []
    for batch in batches:
        runs += _run_unpatched_batch(model, batch, recorded, cached)
    return runs


def logits_tolerance(model: PassModel) -> float:
    """Return how far rounding may move logits, as a share of their norm."""
    depth = sum(stack.depth for stack in model.anatomy.stacks)
    return trials.tolerance(model.dtype, depth)


def _try_cache(model: PassModel) -> bool:
    """Tell whether a pass over a whole text may keep a cache."""
    inputs = trial_inputs(model)
    try:
        plain = list(_run_unpatched_batch(model, inputs, (), cached=False))
        cached = list(_run_unpatched_batch(model, inputs, (), cached=True))
    except Exception as error:
        # The model's own code may raise anything, and what a pass without a cache is
        # refused for, the one that is wanted is refused for too.
        if is_out_of_memory(error):
            raise
        return False
    tolerance = logits_tolerance(model)
    for a, b in zip(plain, cached, strict=True):
        difference = (a.logits - b.logits).norm()
        # `not <=` refuses a NaN as well, which `>` would let through.
        if not difference <= tolerance * a.logits.norm():
            return False
    return True


def _run_unpatched_batch(
    model: PassModel, inputs: Inputs, sites: Sequence[Site], cached: bool
) -> Iterator[UnpatchedRun]:
    """Run some texts as one batch; their states stay on the device."""
    batch = inputs.pad(model)
    buffers = buffers_for(model, sites, inputs, keep="device")
    with model.lock, hooks.watching([with_cache(model.module, cached)]):
        output = run_pass(model, batch, range(len(inputs)), buffers, logits=True)
    states = {stack: buffer.states() for stack, buffer in buffers.items()}
    answering = batch.of_stack("decoder")
    logits = batch_logits(output, batch, model)
    # Texts are padded on the right, so that the first rows are those of their tokens.
    for row in range(len(inputs)):
        of_text: dict[Site, Tensor] = {}
        for stack_states in states.values():
            own = stack_states.of(row)
            of_text |= {site: own.values[k] for k, site in enumerate(own.sites)}
        yield UnpatchedRun(
            inputs.some([row]),
            of_text,
            logits[row, : answering.lengths[row]],
            row,
            answering.ids.shape[1],
            getattr(output, "past_key_values", None),
        )


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
    """Shortcuts that were verified on this model, all of them in one trial.

    `joins`: a variant skips the blocks below its first patch. `reuses`: it takes the
    keys and values of the tokens before its first patch from the unpatched run.
    `narrows`: the head runs on the requested tokens alone. `batched`: variants share a
    pass. `notes` say why one is not taken.
    """

    joins: bool = False
    reuses: bool = False
    narrows: bool = False
    batched: bool = True
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class SweepResult:
    """The values read from each variant, the cost in passes and tokens, and notes."""

    values: Tensor
    passes: int
    tokens: int
    notes: tuple[str, ...]


def sweep(
    model: PassModel,
    unpatched: UnpatchedRun,
    variants: Sequence[Variant],
    at: int | range,
    *,
    read: Callable[[Tensor], Tensor] = lambda logits: logits,
    shortcuts: Shortcuts | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> SweepResult:
    """Run patched variants of an unpatched run and read the logits of the token `at`.

    `read` reduces the logits [variant, vocabulary] of each batch to what is kept, so
    that they are never in memory all at once; of a range of tokens they are [variant,
    token, vocabulary]. `advance` is called after each batch with
    the number of its variants.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> unpatched, other = run_unpatched(model, [[5, 6, 7], [5, 8, 7]], [])
    >>> patch = Patch(Site(2), (0, 1, 2), other.states[Site(2)])
    >>> result = sweep(model, unpatched, [[patch]], at=2)
    >>> torch.allclose(result.values[0], other.logits[2], atol=1e-5)
    True
    """
    if shortcuts is None:
        shortcuts = shortcuts_of(model)
    if shortcuts.reuses:
        # The cache of this text need not hold every token.
        reason = _why_not_reusable(model, unpatched)
        if reason:
            note = f"Keys and values were computed anew, because {reason}."
            notes = *shortcuts.notes, note
            shortcuts = replace(shortcuts, reuses=False, notes=notes)
    tokens_read = at if isinstance(at, range) else range(at, at + 1)
    run = _Sweep(model, unpatched, tokens_read, shortcuts)
    rows: dict[int, Tensor] = {}
    passes = tokens = 0
    with model.lock:
        for start, numbers in run.batches(variants):
            batch = [variants[number] for number in numbers]
            logits = run.logits(batch, start)
            if isinstance(at, int):
                logits = logits[:, 0]
            if logits.isnan().any():
                raise NotFinite(
                    f"No logits of {model.anatomy.name}",
                    "there is a NaN among them",
                    "Look at the values that were put in.",
                )
            rows.update(zip(numbers, read(logits), strict=True))
            passes += 1
            tokens += len(batch) * (sum(unpatched.inputs.costs) - start)
            advance(len(batch))
    if rows:
        values = torch.stack([rows[number] for number in range(len(variants))])
    else:
        values = read(unpatched.logits[:0])
    return SweepResult(values, passes, tokens, shortcuts.notes)


def run_unbatched(
    model: PassModel, unpatched: UnpatchedRun, variant: Variant, at: int
) -> Tensor:
    """Run one patched variant without shortcuts and return its logits.

    Sweeps are checked against this.
    """
    # Not by the code that puts patches into a batch, whose faults this must show.
    changes: dict[str | Site, Change] = {}
    for patch in variant:
        changes[patch.site] = patch.change()
    edited = edit(model, unpatched.inputs, changes, (), logits=True)
    assert edited.logits is not None
    return edited.logits[at]


@dataclass(frozen=True, eq=False)
class _Sweep:
    """An unpatched run, the tokens at which variants are read, and the shortcuts."""

    model: PassModel
    unpatched: UnpatchedRun
    at: range
    shortcuts: Shortcuts

    @property
    def stack(self) -> str | None:
        """Return the stack that answers, whose last state makes the logits.

        That is the decoder of an encoder-decoder, or the only stack. Sites name a stack
        only where there are two.
        """
        return "decoder" if self.model.encoder_decoder else None

    def batches(self, variants: Sequence[Variant]) -> Iterator[tuple[int, list[int]]]:
        """Yield batches of variants: the first token to compute, and their numbers.

        Within a batch the variants are ordered by their lowest site.
        """
        device = self.model.device.type
        if device not in BATCH_TOKENS:
            device = "cpu"
        starts: dict[tuple[str | None, int], list[int]] = defaultdict(list)
        for number, variant in enumerate(variants):
            stack, start = variant[0].site.stack, 0
            if self.shortcuts.reuses and stack == self.stack:
                start = min(self.at.start, *(min(patch.tokens) for patch in variant))
            starts[stack, start].append(number)

        def lowest_site(number: int) -> Site:
            return min(patch.site for patch in variants[number])

        for start, numbers in _merged(starts, BATCH_OVERHEAD[device]):
            ordered = sorted(numbers, key=lowest_site)
            length = sum(self.unpatched.inputs.costs) - start
            size = 1
            if self.shortcuts.batched:
                size = max(1, BATCH_TOKENS[device] // length)
            for first in range(0, len(ordered), size):
                yield start, ordered[first : first + size]

    def logits(self, variants: Sequence[Variant], start: int) -> Tensor:
        """Run a batch of variants in one pass and return their logits.

        They are [variant, token, vocabulary], those of the tokens `at`. The tokens
        before `start` are not computed.
        """
        model, unpatched = self.model, self.unpatched
        stack = variants[0][0].site.stack
        length = len(unpatched.input_ids()) - start
        # Patches count tokens in the text of their own stack, and only that of the
        # answering stack is cut at `start`.
        first, tokens = 0, len(unpatched.ids)
        if stack == self.stack:
            first, tokens = start, length
        count = rows = len(variants)
        # hooks.joining cuts every tensor of two or more axes whose first is as long as
        # the batch. A mask or a table of positions with as many tokens would be cut
        # too. A single row needs no such care: a block runs it whole or is skipped.
        while rows > 1 and rows in (length, length + start, len(unpatched.ids)):
            rows += 1
        # Repeats of the last variant fill the batch; their logits are dropped.
        variants = [*variants, *[variants[-1]] * (rows - count)]
        depth = model.anatomy.stack_named(stack).depth
        rows_per_block = [rows] * depth
        entering: AbstractContextManager[None] = nullcontext()
        if self.shortcuts.joins and _may_join(model, stack, variants):
            entries = [_entry_layer(variant, depth) for variant in variants]
            # Those that have joined below each layer.
            for layer in range(1, depth + 1):
                rows_per_block[layer - 1] = sum(entry < layer for entry in entries)
            entering = self._joining(stack, entries, rows_per_block, first)
        arguments = self._arguments(rows, start, rows_per_block)
        changed: set[Site] = set()
        changes = _changes(variants, first, model.device, changed)

        def every_token(
            stack: str | None, tensor: Tensor, tap: Tap | OperationTap
        ) -> Positions:
            texts = tap.layout.texts(tensor, tokens)
            # A change by a function is made at every position that is not -1, padding:
            # only that and the shape matter here, not which positions they are.
            return Positions(torch.zeros(texts, tokens, dtype=torch.long), None)

        requested = slice(self.at.start - start, self.at.stop - start)
        editor = Editor(model.anatomy, changes, every_token)
        watches = editor.watches(model.module)
        if self.shortcuts.narrows:
            watches.append(self._narrow_head(length, requested))
        with (
            # Logits that are made in inference mode could not be trained on.
            autograd.restored(inference=False),
            torch.no_grad(),
            entering,
            hooks.watching(watches),
        ):
            logits = hooks.logits_in(hooks.call_module(model.module, arguments))
        assert logits is not None, "the unpatched run has some"
        if changed != set(changes):
            raise not_reached(model.anatomy, min(set(changes) - changed))
        # A narrowed head has made the logits of the requested tokens alone.
        if logits.shape[1] != len(self.at):
            logits = logits[:, requested]
        return logits[:count]

    def _joining(
        self,
        stack: str | None,
        entries: Sequence[int],
        rows_per_block: Sequence[int],
        start: int,
    ) -> AbstractContextManager[None]:
        """Let each row enter at its layer, with the unpatched state of that layer."""
        forms = try_skipping(self.model, stack).forms
        taps = self.model.anatomy.stack_named(stack).proof.taps[1:]
        joins: dict[nn.Module, dict[int, hooks.Join]] = defaultdict(dict)
        blocks = zip(taps, forms, rows_per_block, strict=True)
        for layer, (tap, form, below) in enumerate(blocks, 1):
            if below == len(entries):
                break
            joined = None
            entering = entries.count(layer)
            if entering:
                values = self.unpatched.states[Site(layer, "", stack)][start:]
                joined = values.expand(entering, *values.shape)
            block = self.model.module.get_submodule(tap.path)
            joins[block][tap.call] = hooks.Join(len(entries), below, form, joined)
        return hooks.joining(joins)

    def _arguments(
        self, rows: int, start: int, rows_per_block: Sequence[int]
    ) -> dict[str, Any]:
        """Return the arguments of the module: the tokens from `start` on, a cache."""
        model, unpatched = self.model, self.unpatched
        batch = unpatched.inputs.some([0] * rows).pad(model)
        arguments = batch.arguments(model.module, masked=model.batching.needs_mask)
        if start:
            name = "decoder_input_ids" if model.encoder_decoder else "input_ids"
            arguments[name] = arguments[name][:, start:]
            # A cache layer without any row reports no tokens, and transformers takes
            # masks and positions from that.
            cached_rows = [max(1, count) for count in rows_per_block]
            arguments["past_key_values"] = _first_tokens(unpatched, start, cached_rows)
            arguments["use_cache"] = True
        return arguments

    def _narrow_head(self, length: int, requested: slice) -> hooks.Watch:
        """Return a hook that lets the head see only the requested tokens.

        The head makes a row as long as the vocabulary for each token that it sees.
        """
        head = self.model.anatomy.head
        assert head is not None

        def narrow(args: hooks.Args, kwargs: dict[str, Any]) -> Any:
            state = hooks.state_in(args, kwargs)
            if state is None or state.ndim != 3 or state.shape[1] != length:
                return None
            return hooks.with_state_in(args, kwargs, state[:, requested])

        return hooks.Watch(self.model.module.get_submodule(head.path), "input", narrow)


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


def _entry_layer(variant: Variant, depth: int) -> int:
    """Return the layer up to which a variant equals the unpatched run.

    That is the layer of its lowest site, or the one below the block that it is in.
    """
    lowest = min(patch.site for patch in variant)
    if lowest.layer is None:
        return depth
    return lowest.layer - 1 if lowest.part else lowest.layer


def _may_join(model: PassModel, stack: str | None, variants: Sequence[Variant]) -> bool:
    """Tell whether these variants may join the batch at different layers."""
    if try_skipping(model, stack).refused:
        return False
    for variant in variants:
        sites = [patch.site for patch in variant]
        # To change `mid`, the editor adds the stream that it saw below the block to
        # attention's output inside. Below the first block that stream is the whole
        # batch, and inside it there are only the rows that have joined.
        if why_not_counted(model, sites) or any(site.part == "mid" for site in sites):
            return False
    return True


def _changes(
    variants: Sequence[Variant], start: int, device: torch.device, changed: set[Site]
) -> dict[Site, Change]:
    """Return one change for each patched site, for all rows that have a patch there.

    Each puts its site into `changed` when it is made.
    """
    patches: dict[Site, list[tuple[int, Patch]]] = defaultdict(list)
    for row, variant in enumerate(variants):
        for patch in variant:
            patches[patch.site].append((row, patch))

    def change(site: Site) -> Change:
        rows: list[int] = []
        columns: list[int] = []
        channels = []
        for row, patch in patches[site]:
            rows += [row] * len(patch.tokens)
            columns += [token - start for token in patch.tokens]
            if patch.columns is not None:
                some = torch.arange(patch.columns.start, patch.columns.stop)
                channels.append(some.expand(len(patch.tokens), -1))
        index = [torch.tensor(rows), torch.tensor(columns)]
        if channels:
            index = [index[0][:, None], index[1][:, None], torch.cat(channels)]
        index = [part.to(device) for part in index]
        values = torch.cat([patch.values for _, patch in patches[site]])

        def put(states: Tensor) -> Tensor:
            places = tuple(part.to(states.device) for part in index)
            states[places] = values.to(states)
            changed.add(site)
            return states

        return put

    return {site: change(site) for site in sorted(patches)}


def _why_not_reusable(model: PassModel, unpatched: UnpatchedRun) -> str:
    """Say why the cache of an unpatched run cannot be reused; empty if it can."""
    if unpatched.cache is None:
        return "it gave no keys and values"
    cache = getattr(unpatched.cache, "self_attention_cache", unpatched.cache)
    layers, blocks = getattr(cache, "layers", None), model.anatomy.stacks[-1].depth
    if not isinstance(layers, list) or len(layers) != blocks:
        return (
            f"its cache ({type(cache).__name__}) does not hold keys and values for each"
            f" of its {blocks} blocks"
        )
    for layer in layers:
        kind = type(layer).__name__
        if kind not in PLAIN_LAYERS:
            return f"its cache holds a {kind}, which is more than keys and values"
        keys = layer.keys
        shape = keys.shape if isinstance(keys, Tensor) else ()
        if len(shape) != 4 or shape[2] != unpatched.padded_length:
            return (
                "its cache does not hold every token: its attention looks back only"
                " so far"
            )
    return ""


def _first_tokens(unpatched: UnpatchedRun, tokens: int, rows: Sequence[int]) -> Any:
    """Return the first tokens in the cache of an unpatched run, repeated for a batch.

    `rows` is the batch size in each block. Every variant shares the keys and values of
    the encoder's text, where there is one. The cache itself is not changed.
    """

    def cut(cache: Any, tokens: int) -> Any:
        new, row = copy(cache), slice(unpatched.row, unpatched.row + 1)
        new.layers = []
        for layer, batch in zip(cache.layers, rows, strict=True):
            part = copy(layer)
            part.keys = layer.keys[row, :, :tokens].expand(batch, -1, -1, -1)
            part.values = layer.values[row, :, :tokens].expand(batch, -1, -1, -1)
            # Layers with a sliding window count their tokens by themselves.
            if hasattr(layer, "cumulative_length"):
                part.cumulative_length = tokens
            new.layers.append(part)
        return new

    cache = unpatched.cache
    if not hasattr(cache, "self_attention_cache"):
        return cut(cache, tokens)
    new = copy(cache)
    new.self_attention_cache = cut(cache.self_attention_cache, tokens)
    new.cross_attention_cache = cut(cache.cross_attention_cache, len(unpatched.ids))
    new.is_updated = dict(cache.is_updated)
    return new


def shortcuts_of(model: PassModel) -> Shortcuts:
    """Return the shortcuts of a model, tried once on the model as it is."""
    with model.lock:
        return model.trials.once("sweep", lambda: _try_shortcuts(model), form=Shortcuts)


def _try_shortcuts(model: PassModel) -> Shortcuts:
    """Try all shortcuts together on a few variants of a short text, then a batch."""
    # Three layers of each stack, and what its middle attention adds.
    candidates: list[Site] = []
    for stack in model.anatomy.stacks:
        name = stack.name if model.encoder_decoder else None
        middle = (stack.depth + 1) // 2
        for layer, part in ((0, ""), (middle, "attn"), (middle, ""), (stack.depth, "")):
            with suppress(LookupError):
                plan(model.anatomy, {Site(layer, part, name): lambda states: states})
                candidates.append(Site(layer, part, name))
    sites = tuple(dict.fromkeys(candidates))
    unpatched, other = run_unpatched(model, trial_inputs(model), sites)
    at = len(unpatched.input_ids()) - 1
    variants: list[Variant] = []
    for site in sites:
        for token in (0, len(unpatched.input_ids(site.stack)) // 2):
            values = other.states[site][token : token + 1]
            variants.append([Patch(site, (token,), values)])
    unbatched = [run_unbatched(model, unpatched, variant, at) for variant in variants]
    expected = torch.stack(unbatched)
    notes: list[str] = []
    not_joined = _why_not_joined(model)
    if not_joined:
        notes.append(f"Every block was run, because {not_joined}.")
    not_reused = _why_not_reused(model, unpatched)
    if not_reused:
        notes.append(f"Keys and values were computed anew, because {not_reused}.")
    fast = Shortcuts(
        joins=not not_joined,
        reuses=not not_reused,
        narrows=model.anatomy.head is not None,
    )
    # A batch that holds a variant of the first token reuses nothing, so variants of
    # later tokens are tried by themselves as well.
    later = [k for k, (patch,) in enumerate(variants) if patch.tokens[0]]
    for shortcuts, left_out in ((fast, "without shortcuts"), (Shortcuts(), "alone")):
        failure = _failure(model, unpatched, variants, expected, at, shortcuts)
        if shortcuts.reuses and not failure:
            some = [variants[k] for k in later]
            failure = _failure(model, unpatched, some, expected[later], at, shortcuts)
        if not failure:
            return replace(shortcuts, notes=tuple(notes))
        notes.append(f"Every variant was run {left_out}: tried otherwise, {failure}.")
    return Shortcuts(batched=False, notes=tuple(notes))


def _why_not_joined(model: PassModel) -> str:
    """Say why variants cannot join the batch at different layers; empty if they can."""
    stack = model.anatomy.stacks[-1]
    trial = try_skipping(model, stack.name if model.encoder_decoder else None)
    if trial.refused:
        return trial.refused
    if any(tap.layout != PLAIN for tap in stack.proof.taps):
        return "its states are not [text, token, width]"
    return ""


def _why_not_reused(model: PassModel, unpatched: UnpatchedRun) -> str:
    """Say why keys and values of this run cannot be reused; empty if they can."""
    if not model.anatomy.stacks[-1].causal:
        return "a token attends to those after it"
    if "past_key_values" not in accepts(model.module):
        return "its forward takes no past_key_values"
    return _why_not_reusable(model, unpatched)


def _failure(
    model: PassModel,
    unpatched: UnpatchedRun,
    variants: Sequence[Variant],
    expected: Tensor,
    at: int,
    shortcuts: Shortcuts,
) -> str:
    """Say why shortcuts do not give the expected logits; empty if they do."""
    try:
        values = sweep(model, unpatched, variants, at, shortcuts=shortcuts).values
        depth = sum(stack.depth for stack in model.anatomy.stacks)
        excess = trials.disagreement(
            expected[None], values[None], [depth], dtype=model.dtype
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"it stopped with {type(error).__name__}: {str(error)[:120]}"
    if excess <= 1:
        return ""
    return f"its logits were off by {excess:,.1f} times the rounding tolerance"

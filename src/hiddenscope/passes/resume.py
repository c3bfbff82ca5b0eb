"""Resume: enter the pass at a layer with other values and run only the rest.

The blocks below hand on their input, while masks, positions and rotary tables still
come from the model's own code, and the values replace the state where it enters the
rest. Whether blocks can be skipped is tried on the model: where a resumed pass is not
bit for bit the full pass, every block is run and the values still replace the state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from typing import Any

import torch
from torch import nn

from hiddenscope.arguments import checked
from hiddenscope.discovery import EVERYTHING, Stack, accepts, trial_ids
from hiddenscope.errors import (
    PassError,
    SiteError,
    StatesError,
    is_out_of_memory,
)
from hiddenscope.modules import hooks
from hiddenscope.passes.changes import Positions, Replace, check
from hiddenscope.passes.edit import Editor, plan
from hiddenscope.passes.inputs import Inputs, PassModel, Texts
from hiddenscope.passes.record import Pass, make_pass, require_recordable
from hiddenscope.sites import Site, SitePatterns

TRIAL_LENGTHS = (5, 9)
TRIAL_TARGET_LENGTHS = (6, 3)


@dataclass(frozen=True)
class SkipTrial:
    """Whether the blocks of a stack can be skipped, as tried on the model.

    `forms` holds the form of each block's output, `refused` the reason why not.
    """

    forms: tuple[Any, ...] = ()
    refused: str = ""


@checked
def resume(
    model: PassModel,
    inputs: Texts | Inputs,
    site: str | Site,
    values: Any,
    sites: SitePatterns | None = None,
    *,
    logits: bool = True,
    grad: bool = False,
) -> Pass:
    """Enter a pass at `layer.k` or `final` with other values, and run what is above.

    `values` are the rows of every token, [token, width] as in `States` or [text, token,
    width]. Without `sites`, the layers from there on and `final` are kept. The targets
    of an encoder-decoder come with its inputs, as in `model.encode(texts,
    targets=...)`. A model whose blocks cannot be skipped is run whole, and the notes of
    the pass say so. With `grad` the tensors themselves are in `live`, that of the entry
    among them, so that gradients can flow back.

    >>> from hiddenscope.passes import record
    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> full = record(model, [[5, 6, 7]], logits=True)
    >>> rest = resume(model, [[5, 6, 7]], "layer.2", full.states["layer.2"])
    >>> bool((rest.logits == full.logits).all())
    True
    """
    require_recordable(model.module)
    change = Replace(values)
    (entry,) = plan(model.anatomy, {_whole_layer(model, site): change})
    selected = _select_above(model, entry, sites)
    encoded = model.encode(inputs)
    tokens = sum(encoded.of(entry.stack).lengths)
    check(change, tokens, model.anatomy.width(entry), entry)
    if change.values.ndim < 2:
        raise StatesError(
            f"Cannot enter {model.anatomy.name} at {entry}",
            f"they have the shape {list(change.values.shape)}",
            "Give a row for each token.",
        )
    with model.lock:
        has_padding = encoded.pad(model).has_padding
        trial = try_skipping(model, entry.stack, padded=has_padding)
        refused = trial.refused or why_not_counted(model, selected)
        forms = () if refused else trial.forms
        entered = _enter(
            model, encoded, entry, change, selected, forms, logits=logits, grad=grad
        )
    if not refused:
        return entered
    note = f"Every block was run, and the values put in at {entry}, because {refused}."
    return replace(entered, notes=(note,))


def _whole_layer(model: PassModel, site: str | Site) -> Site:
    """Return the only layer that a pattern names; of two stacks, the decoder's."""
    selected = model.anatomy.select(site)
    in_decoder = tuple(match for match in selected if match.stack == "decoder")
    selected = in_decoder or selected
    if len(selected) == 1 and not selected[0].part:
        return selected[0]
    reason = "it is inside a block"
    if len(selected) != 1:
        reason = f"it names {len(selected)} sites"
    raise SiteError(
        f"Cannot enter {model.anatomy.name} at {site}",
        reason,
        "Give one whole layer, or `final`.",
    )


def _select_above(
    model: PassModel, entry: Site, sites: SitePatterns | None
) -> tuple[Site, ...]:
    """Return the requested sites, none of which may be below the entry."""
    if sites is None:
        everything = {*model.anatomy.select(EVERYTHING), entry}
        return tuple(sorted(site for site in everything if not site < entry))
    selected = model.anatomy.select(sites)
    for site in selected:
        if site < entry:
            raise SiteError(
                f"No state at {site} in a resumed pass",
                f"the pass is entered at {entry}, above it",
                f"Ask for {entry} or what comes after.",
            )
    return selected


def why_not_counted(model: PassModel, sites: Sequence[Site]) -> str:
    """Say why a site cannot be found behind skipped blocks; empty if all can."""
    for site in sites:
        # Parts of a block that is called several times are told apart by counting its
        # calls, and skipped ones would not be counted.
        if site.part and model.anatomy.tap(site).call:
            return f"{site} is inside a block that is called more than once"
    return ""


def _enter(
    model: PassModel,
    inputs: Inputs,
    entry: Site,
    change: Replace,
    sites: Sequence[Site],
    forms: Sequence[Any],
    *,
    logits: bool,
    grad: bool = False,
) -> Pass:
    """Run a pass with values in place of a layer.

    The blocks below it are skipped if the forms of their outputs are known.
    """
    positions = Positions.of(inputs.of(entry.stack))
    editor = Editor(
        model.anatomy, {entry: change}, lambda stack, tensor, tap: positions
    )
    stack = model.anatomy.stack(entry)
    depth = stack.depth if entry.layer is None else entry.layer
    skips: dict[nn.Module, dict[int, Any]] = defaultdict(dict)
    for tap, form in zip(stack.proof.taps[1:], forms[:depth], strict=False):
        skips[model.module.get_submodule(tap.path)][tap.call] = form
    with hooks.skipping(skips), hooks.watching(editor.watches(model.module)):
        return make_pass(model, inputs, sites, logits=logits, grad=grad)


def try_skipping(
    model: PassModel, stack: str | None = None, *, padded: bool = False
) -> SkipTrial:
    """Return whether the blocks of a stack can be skipped, tried once on the model.

    Padding is tried by itself: experts group all rows, and a resumed pass has other
    values in the padding than the full pass.
    """
    key = (stack, padded)
    return model.trials.once(
        "skip blocks", lambda: _try_skipping(model, stack, padded), key=key
    )


def _try_skipping(model: PassModel, name: str | None, padded: bool) -> SkipTrial:
    """Resume at the first, the last and some layers between, with and without a cache.

    Each resumed pass must be the full pass.
    """
    stack = model.anatomy.stack_named(name)
    paths = [block.path for block in stack.blocks]
    if [tap.path for tap in stack.proof.taps] != [paths[0], *paths]:
        return SkipTrial(refused="its layers are not what its blocks give back")
    inputs = trial_inputs(model, padded=padded)
    has_cache = "use_cache" in accepts(model.module)
    # By layer, in the order of the pass.
    forms: dict[int, Any] = {}

    def resumed() -> str:
        """Say how a resumed pass differs from the full pass; empty if none does."""
        depth = stack.depth
        layers = {1, depth // 4, depth // 2, 3 * depth // 4, depth} - {0}
        for cached in (False, True) if has_cache else (False,):
            cache = with_cache(model.module, cached)
            with hooks.watching([cache, *_learn_forms(model.module, stack, forms)]):
                full = _full_pass(model, inputs)
            for layer in sorted(layers):
                entry = Site(layer, "", name)
                values = Replace(full.states[entry])
                sites = _select_above(model, entry, None)
                with hooks.watching([with_cache(model.module, cached)]):
                    again = _enter(
                        model,
                        inputs,
                        entry,
                        values,
                        sites,
                        tuple(forms.values()),
                        logits=full.logits is not None,
                    )
                pairs = [(full.states[site], again.states[site]) for site in sites]
                if full.logits is not None:
                    assert again.logits is not None
                    pairs.append((full.logits, again.logits))
                if not all(starmap(torch.equal, pairs)):
                    with_or_without = "with" if cached else "without"
                    return (
                        f"skipping the blocks below {entry}, {with_or_without} a"
                        " cache, changed what the rest gave"
                    )
        return ""

    try:
        refused = model.trials.once("resumed", resumed, key=(name, padded), form=str)
        if not refused and not forms:
            # An earlier process has tried it: one pass shows the forms.
            cache = with_cache(model.module, has_cache)
            with hooks.watching([cache, *_learn_forms(model.module, stack, forms)]):
                _full_pass(model, inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refused = f"skipping blocks stopped with {type(error).__name__}: {error}"
    return SkipTrial(() if refused else tuple(forms.values()), refused)


def with_cache(module: nn.Module, cached: bool) -> hooks.Watch:
    """Return a hook that lets the module keep a cache, or changes nothing."""

    def switch(args: hooks.Args, kwargs: hooks.Kwargs) -> Any:
        return (args, {**kwargs, "use_cache": True}) if cached else None

    return hooks.Watch(module, "input", switch)


def _learn_forms(
    module: nn.Module, stack: Stack, forms: dict[int, Any]
) -> list[hooks.Watch]:
    """Return hooks that note the form of each block's output."""

    def watch(layer: int) -> hooks.Watch:
        tap = stack.proof.taps[layer]
        calls = 0

        def learn(output: Any) -> None:
            nonlocal calls
            if calls == tap.call:
                forms[layer] = hooks.form(output)
            calls += 1

        return hooks.Watch(module.get_submodule(tap.path), "output", learn)

    return [watch(layer) for layer in range(1, stack.depth + 1)]


def _full_pass(model: PassModel, inputs: Inputs) -> Pass:
    """Run a full pass, with logits if the head gives a row of them for each token."""
    sites = model.anatomy.select(EVERYTHING)
    try:
        return make_pass(model, inputs, sites, logits=model.anatomy.makes_logits)
    except PassError:
        return make_pass(model, inputs, sites)


def trial_inputs(model: PassModel, *, padded: bool = False) -> Inputs:
    """Return two texts for a trial, of different lengths or of the same.

    Those of a decoder differ in length from the encoder's, so that a mix-up shows.
    """
    lengths: Sequence[int] = TRIAL_LENGTHS
    target_lengths: Sequence[int] = TRIAL_TARGET_LENGTHS
    if not padded:
        lengths = (lengths[1],) * 2
        target_lengths = (target_lengths[1],) * 2
    inputs = trial_texts(model, lengths, seed=6)
    if model.encoder_decoder:
        inputs = inputs.with_targets(trial_texts(model, target_lengths, seed=7))
    return inputs


def trial_texts(model: PassModel, lengths: Sequence[int], seed: int) -> Inputs:
    """Return texts of ordinary ids, of these lengths or as long as the model takes."""
    limit = model.text_encoder.window or max(lengths)
    ids = trial_ids(model.module, len(lengths), max(lengths), seed=seed).tolist()
    texts = []
    for row, length in zip(ids, lengths, strict=True):
        # In a short window, too, a shorter text is padded.
        most = limit if length == max(lengths) else limit - 1
        texts.append(tuple(row[: min(length, most)]))
    return Inputs(tuple(texts))

"""Resume: enter the pass at a layer with given values and run only the rest.

The blocks below hand on what comes in, while masks, positions and rotary tables still
come from the model's own code, and the values take the state's place where it enters
the rest. Whether blocks can be skipped is tried on the model at hand: where a resumed
pass is not the full pass bit for bit, every block is run and the values still take the
place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked
from hiddenscope.discovery import EVERYTHING, Stack, accepts, trial_ids
from hiddenscope.errors import PassError, SiteError, StatesError
from hiddenscope.modules import hooks
from hiddenscope.passes.changes import Positions, Replace, check
from hiddenscope.passes.edit import Editor, plan
from hiddenscope.passes.inputs import Inputs, Texts
from hiddenscope.passes.protocol import ModelLike, recordable
from hiddenscope.passes.record import Pass, make_pass
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, States

# The lengths of the texts and of the targets of a trial.
LENGTHS, TARGET_LENGTHS = (5, 9), (6, 3)


@dataclass(frozen=True)
class Skipping:
    """Whether the blocks of a stack can be skipped: the form of each block's output, or
    the reason why not.
    """

    forms: tuple[Any, ...] = ()
    refused: str = ""


@checked
def resume(
    model: ModelLike,
    inputs: Texts | Inputs,
    site: str | Site,
    values: Any,
    sites: SitePatterns | None = None,
    *,
    logits: bool = True,
    grad: bool = False,
) -> Pass:
    """Enter the pass over a batch of texts at `layer.k` or `final` with given values,
    and run only what is above.

    `values` are the rows of every token, [token, width] as in `States` or [text, token,
    width]. Without `sites`, the layers from there on and `final` are kept. The targets
    of an encoder-decoder come with its inputs, as in `model.encode(texts,
    targets=...)`. A model whose blocks cannot be skipped is run whole, and `notes` of
    the pass say so. With `grad` the tensors themselves are in `live`, that of the entry
    among them, so that gradients can flow back.

    >>> from hiddenscope.passes import record
    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> full = record(model, [[5, 6, 7]], logits=True)
    >>> bool((resume(model, [[5, 6, 7]], "layer.2", full.states["layer.2"]).logits == full.logits).all())
    True
    """
    recordable(model.module)
    change = Replace(values)
    (entry,) = plan(model.anatomy, {_one_layer(model, site): change})
    chosen = _above(model, entry, sites)
    encoded = model.encode(inputs)
    check(
        change, sum(encoded.of(entry.stack).lengths), model.anatomy.width(entry), entry
    )
    if change.values.ndim < 2:
        reason = f"they have the shape {list(change.values.shape)}"
        raise StatesError(
            f"Cannot enter {model.anatomy.name} at {entry}",
            reason,
            "Give a row for each token.",
        )
    with model.lock:
        skips = skipping(model, entry.stack, padded=encoded.pad(model).has_padding)
        refused = skips.refused or _uncountable(model, chosen)
        forms = () if refused else skips.forms
        entered = _enter(
            model, encoded, entry, change, chosen, logits=logits, grad=grad, forms=forms
        )
    note = f"Every block was run, and the values put in at {entry}, because {refused}."
    return replace(entered, notes=(note,)) if refused else entered


def skipping(
    model: ModelLike, stack: str | None = None, *, padded: bool = False
) -> Skipping:
    """Whether the blocks of a stack can be skipped, tried once on the model as it is.

    Padding is tried by itself: experts group all rows, and the padding below is not
    what a pass makes of it.
    """
    return model.trials.once(
        "skip blocks",
        lambda: _try_skipping(model, stack, padded),
        key=(stack, padded),
        form=Skipping,
    )


def _one_layer(model: ModelLike, site: str | Site) -> Site:
    """The one whole layer that is named; of two stacks, the decoder's."""
    chosen = model.anatomy.select(site)
    chosen = tuple(one for one in chosen if one.stack == "decoder") or chosen
    if len(chosen) != 1 or chosen[0].part:
        reason = (
            f"it names {len(chosen)} sites"
            if len(chosen) != 1
            else "it is inside a block"
        )
        raise SiteError(
            f"Cannot enter {model.anatomy.name} at {site}",
            reason,
            "Give one whole layer, or `final`.",
        )
    return chosen[0]


def _above(
    model: ModelLike, entry: Site, sites: SitePatterns | None
) -> tuple[Site, ...]:
    """The chosen sites, none of which may be below the entry."""
    if sites is None:
        everything = {*model.anatomy.select(EVERYTHING), entry}
        return tuple(sorted(site for site in everything if not site < entry))
    chosen = model.anatomy.select(sites)
    below = [site for site in chosen if site < entry]
    if below:
        reason = f"the pass is entered at {entry}, above it"
        raise SiteError(
            f"No state at {below[0]} in a resumed pass",
            reason,
            f"Ask for {entry} or what comes after.",
        )
    return chosen


def _uncountable(model: ModelLike, sites: Sequence[Site]) -> str:
    """Parts of a block that is called several times are told by counting, and skipped
    calls would not be counted.
    """
    shared = [site for site in sites if site.part and model.anatomy.taps[site].call]
    return (
        f"{shared[0]} is inside a block that is called more than once" if shared else ""
    )


def _enter(
    model: ModelLike,
    inputs: Inputs,
    entry: Site,
    change: Replace,
    sites: Sequence[Site],
    *,
    logits: bool,
    forms: Sequence[Any],
    grad: bool = False,
) -> Pass:
    """One pass with values in the place of a layer; the blocks below it are skipped if
    their forms are known.
    """
    positions = Positions.of(inputs.of(entry.stack))
    editor = Editor(
        model.anatomy, {entry: change}, lambda stack, tensor, tap: positions
    )
    stack = model.anatomy.stack(entry)
    depth = stack.depth if entry.layer is None else entry.layer
    with (
        _skipped(model.module, stack, forms[:depth]),
        hooks.watching(editor.watches(model.module)),
    ):
        return make_pass(model, inputs, sites, logits=logits, grad=grad)


def _skipped(
    module: nn.Module, stack: Stack, forms: Sequence[Any]
) -> AbstractContextManager[None]:
    skips: dict[nn.Module, dict[int, Any]] = defaultdict(dict)
    for tap, form in zip(stack.proof.taps[1:], forms, strict=False):
        skips[module.get_submodule(tap.path)][tap.call] = form
    return hooks.skipping(skips) if skips else nullcontext()


def _try_skipping(model: ModelLike, stack: str | None, padded: bool) -> Skipping:
    """Resume at the first, the last and some layers between, with the cache off and on:
    each must be the full pass.
    """
    own = next(one for one in model.anatomy.stacks if stack in (None, one.name))
    if own.proof.taps[0].path != own.blocks[0].path:
        return Skipping(refused="its blocks are not modules of their own")
    forms: dict[int, Any] = {}
    in_order: tuple[Any, ...] = ()
    inputs = _trial_inputs(model, padded)
    depths = sorted(
        {1, own.depth // 4, own.depth // 2, 3 * own.depth // 4, own.depth} - {0}
    )
    for cached in (False, True) if "use_cache" in accepts(model.module) else (False,):
        try:
            with hooks.watching(
                [
                    with_cache(model.module, cached),
                    *_learn_forms(model.module, own, forms),
                ]
            ):
                full = _full_pass(model, inputs)
            in_order = tuple(forms[k] for k in sorted(forms))
            entries = (Site(k, "", stack) for k in depths)
            wrong = next(
                (
                    site
                    for site in entries
                    if not _same(model, inputs, full, site, in_order, cached)
                ),
                None,
            )
        except Exception as error:
            return Skipping(
                refused=f"skipping blocks stopped with {type(error).__name__}: {error}"
            )
        if wrong is not None:
            cache = "with" if cached else "without"
            return Skipping(
                refused=(
                    f"skipping the blocks below {wrong}, {cache} a cache, changed what"
                    " the rest gave"
                )
            )
    return Skipping(in_order)


def _same(
    model: ModelLike,
    inputs: Inputs,
    full: Pass,
    entry: Site,
    forms: Sequence[Any],
    cached: bool,
) -> bool:
    """Whether a pass resumed with what the full pass had is the full pass, bit for bit."""
    values = Replace(_at(full.states, entry))
    chosen = _above(model, entry, None)
    with hooks.watching([with_cache(model.module, cached)]):
        again = _enter(
            model,
            inputs,
            entry,
            values,
            chosen,
            logits=full.logits is not None,
            forms=forms,
        )
    if (
        full.logits is not None
        and again.logits is not None
        and not torch.equal(full.logits, again.logits)
    ):
        return False
    return all(
        torch.equal(_at(full.states, site), _at(again.states, site)) for site in chosen
    )


def _at(states: States | Pair, site: Site) -> Tensor:
    own = (
        states
        if isinstance(states, States)
        else states.encoder
        if site.stack == "encoder"
        else states.decoder
    )
    return own[site]


def with_cache(module: nn.Module, cached: bool) -> hooks.Watch:
    """A hook that lets the module keep a cache, or leaves it as it is called."""

    def switch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return (args, {**kwargs, "use_cache": True}) if cached else None

    return hooks.Watch(module, "input", switch)


def _learn_forms(
    module: nn.Module, stack: Stack, forms: dict[int, Any]
) -> list[hooks.Watch]:
    """Hooks that note the form of each block's output."""

    def watch(k: int) -> hooks.Watch:
        tap = stack.proof.taps[k]
        calls: list[None] = []

        def seen(output: Any) -> None:
            if len(calls) == tap.call:
                forms[k] = hooks.form(output)
            calls.append(None)

        return hooks.Watch(module.get_submodule(tap.path), "output", seen)

    return [watch(k) for k in range(1, stack.depth + 1)]


def _full_pass(model: ModelLike, inputs: Inputs) -> Pass:
    """The full pass, with logits where there is a row of them for each token."""
    sites = model.anatomy.select(EVERYTHING)
    try:
        return make_pass(model, inputs, sites, logits=model.anatomy.makes_logits)
    except PassError:
        return make_pass(model, inputs, sites)


def _trial_inputs(model: ModelLike, padded: bool) -> Inputs:
    """Texts for a trial, of different lengths or of one."""
    inputs = trial_texts(model, LENGTHS if padded else LENGTHS[1:] * 2, seed=6)
    if not model.encoder_decoder:
        return inputs
    return inputs.with_targets(
        trial_texts(model, TARGET_LENGTHS if padded else TARGET_LENGTHS[1:] * 2, seed=7)
    )


def trial_texts(model: ModelLike, lengths: Sequence[int], seed: int) -> Inputs:
    """Texts of ordinary ids, of these lengths or as long as the model takes."""
    limit = model.text_encoder.window or max(lengths)
    ids = trial_ids(model.module, len(lengths), max(lengths), seed=seed).tolist()
    return Inputs(
        tuple(
            tuple(row[: min(length, limit)])
            for row, length in zip(ids, lengths, strict=True)
        )
    )

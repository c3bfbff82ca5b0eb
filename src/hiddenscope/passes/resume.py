"""Resume: enter the pass at a layer with given values and run only the rest.

The blocks below give back what comes in, while masks, positions and rotary tables still come from the model's own code,
and the values take the state's place where it enters the rest. Whether blocks can be skipped is tried on the model at
hand: where a resumed pass is not the full pass bit for bit, every block is run and the values still take the place.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy import EVERYTHING, Stack, accepts, probe
from hiddenscope.errors import PassError, SiteError, StatesError
from hiddenscope.passes.changes import Replace, check
from hiddenscope.passes.condition import watchable
from hiddenscope.passes.edit import Editor, plan, standing
from hiddenscope.passes.encoder import Encoded, Texts
from hiddenscope.passes.landing import Subject
from hiddenscope.passes.record import Pass, Prepared, make, make_batch, prepare
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States

LENGTHS, TARGETS = (5, 9), (6, 3)


@dataclass(frozen=True)
class Skipping:
    """Whether the blocks of a stack can be skipped: the form of each block's output, or why not."""

    forms: tuple[Any, ...] = ()
    why_not: str = ""


def resume(
    model: Subject,
    batch: Texts,
    site: str | Site,
    values: Any,
    sites: Any = None,
    *,
    targets: Texts | None = None,
    logits: bool = True,
    grad: bool = False,
) -> Pass:
    """Enter the pass over a batch of texts at `layer.k` or `final` with given values, and run only what is above.

    `values` are the rows of every token, [token, width] as in `States` or [text, token, width]. The sites that are kept
    are the layers from there on and `final`, if no others are asked for. A model in which blocks cannot be skipped is
    run whole, which `notes` of the pass say. With `grad` the tensors themselves are in `live`, that of the entry among
    them, so that gradients can flow back to it.

    >>> from hiddenscope.passes import record
    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> full = record(model, [[5, 6, 7]], logits=True)
    >>> bool((resume(model, [[5, 6, 7]], "layer.2", full.states["layer.2"]).logits == full.logits).all())
    True
    """
    watchable(model.module)
    change = Replace(values)
    (entry,) = plan(model.anatomy, {_one(model, site): change})
    wanted = _above(model, entry, sites)
    prepared = prepare(model, batch, targets)
    check(change, sum(prepared[2].tokens(entry.stack).lengths), model.anatomy.width(entry), entry)
    if change.values.ndim < 2:
        reason = f"they have the shape {list(change.values.shape)}"
        raise StatesError(f"Values to enter {model.anatomy.name} with at {entry}", reason, "Give a row for each token.")
    with model.lock:
        skips = skipping(model, entry.stack, padded=_padded(prepared))
        why = skips.why_not or _uncountable(model, wanted)
        forms = () if why else skips.forms
        made = _enter(model, prepared, entry, change, wanted, logits=logits, grad=grad, forms=forms)
    note = f"every block was run, and the values put in at {entry}, for {why}"
    return replace(made, notes=(note,)) if why else made


def skipping(model: Subject, stack: str | None = None, *, padded: bool = False) -> Skipping:
    """Whether the blocks of a stack can be skipped, tried once on the model as it is.

    Padding is tried by itself: experts group all rows, and what stands in the padding below is not what a pass makes.
    """
    config: Any = getattr(model.module, "config", None)
    key = (
        stack,
        padded,
        getattr(config, "_attn_implementation", None),
        model.device,
        model.anatomy.stacks[0].proof.dtype,
    )
    known = _TRIED.setdefault(model.module, {})
    if key not in known:
        known[key] = _try(model, stack, padded)
    return known[key]


_TRIED: WeakKeyDictionary[nn.Module, dict[Any, Skipping]] = WeakKeyDictionary()


def _one(model: Subject, site: str | Site) -> Site:
    """The one whole layer that is meant; of two stacks, the decoder's."""
    found = model.anatomy.select(site)
    found = tuple(one for one in found if one.stack == "decoder") or found
    if len(found) != 1 or found[0].part:
        what = f"it is {len(found)} sites" if len(found) != 1 else "it is inside a block"
        raise SiteError(f"Entering {model.anatomy.name} at {site}", what, "Give one whole layer, or `final`.")
    return found[0]


def _above(model: Subject, entry: Site, sites: Any) -> tuple[Site, ...]:
    """The wanted sites, none of which may be below the entry."""
    if sites is None:
        everything = {*model.anatomy.select(EVERYTHING), entry}
        return tuple(sorted(site for site in everything if not site < entry))
    chosen = model.anatomy.select(sites)
    below = [site for site in chosen if site < entry]
    if below:
        reason = f"the pass is entered at {entry}, above it"
        raise SiteError(f"The state at {below[0]} of a resumed pass", reason, f"Ask for {entry} or what comes after.")
    return chosen


def _uncountable(model: Subject, wanted: Sequence[Site]) -> str:
    """Parts of a block that is called again and again are told by counting, and skipped calls would not be counted."""
    shared = [site for site in wanted if site.part and model.anatomy.taps[site].call]
    return f"{shared[0]} is inside a block that is called more than once" if shared else ""


def _enter(
    model: Subject,
    prepared: Prepared,
    entry: Site,
    change: Replace,
    wanted: Sequence[Site],
    *,
    logits: bool,
    forms: Sequence[Any],
    grad: bool = False,
) -> Pass:
    """One pass with values in the place of a layer; the blocks below it are skipped if their forms are known."""
    where = standing(prepared[2], entry.stack)
    editor = Editor(model.anatomy, {entry: change}, lambda stack, tensor, tap: where)
    stack = model.anatomy.stack(entry)
    depth = stack.depth if entry.layer is None else entry.layer
    with _skipped(model.module, stack, forms[:depth]), hooks.watching(editor.watches(model.module)):
        return make(model, prepared, wanted, logits=logits, grad=grad)


def _skipped(module: nn.Module, stack: Stack, forms: Sequence[Any]) -> AbstractContextManager[None]:
    skips: dict[nn.Module, dict[int, Any]] = defaultdict(dict)
    for tap, form in zip(stack.proof.taps[1:], forms, strict=False):
        skips[module.get_submodule(tap.path)][tap.call] = form
    return hooks.skipping(skips) if skips else nullcontext()


def _try(model: Subject, stack: str | None, padded: bool) -> Skipping:
    """Resume at the first, the last and some layers between, with the cache off and on: each must be the full pass."""
    own = next(one for one in model.anatomy.stacks if stack in (None, one.name))
    if own.proof.taps[0].path != own.blocks[0].path:
        return Skipping(why_not="its blocks are no modules of their own")
    forms: dict[int, Any] = {}
    shapes: tuple[Any, ...] = ()
    prepared = _trial(model, padded)
    depths = sorted({1, own.depth // 4, own.depth // 2, 3 * own.depth // 4, own.depth} - {0})
    for cached in (False, True) if "use_cache" in accepts(model.module) else (False,):
        try:
            with hooks.watching([with_cache(model.module, cached), *_forms(model.module, own, forms)]):
                full = _full(model, prepared)
            shapes = tuple(forms[k] for k in sorted(forms))
            wrong = next((k for k in depths if not _same(model, prepared, full, Site(k, "", stack), shapes, cached)), 0)
        except Exception as error:
            return Skipping(why_not=f"skipping blocks stopped with {type(error).__name__}: {error}")
        if wrong:
            cache = "with" if cached else "without"
            return Skipping(why_not=f"skipping its first {wrong} blocks, {cache} a cache, changed what the rest gave")
    return Skipping(shapes)


def _same(model: Subject, prepared: Prepared, full: Pass, entry: Site, forms: Sequence[Any], cached: bool) -> bool:
    """Whether a pass resumed with what the full pass had is the full pass, bit for bit."""
    values = Replace(_of(full.states, entry))
    wanted = _above(model, entry, None)
    with hooks.watching([with_cache(model.module, cached)]):
        again = _enter(model, prepared, entry, values, wanted, logits=full.logits is not None, forms=forms)
    if full.logits is not None and not torch.equal(full.logits, again.logits):  # type: ignore[arg-type]
        return False
    return all(torch.equal(_of(full.states, site), _of(again.states, site)) for site in wanted)


def _of(states: States | Pair, site: Site) -> Tensor:
    own = states if isinstance(states, States) else states.encoder if site.stack == "encoder" else states.decoder
    return own[site]


def with_cache(module: nn.Module, cached: bool) -> hooks.Watch:
    """A watch that lets the module keep a cache, or leaves it as it is called."""

    def switch(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return (args, {**kwargs, "use_cache": True}) if cached else None

    return hooks.Watch(module, "input", switch)


def _forms(module: nn.Module, stack: Stack, forms: dict[int, Any]) -> list[hooks.Watch]:
    """Watches that learn the form of each block's output."""

    def watch(k: int) -> hooks.Watch:
        tap = stack.proof.taps[k]
        calls: list[None] = []

        def seen(output: Any) -> None:
            if len(calls) == tap.call:
                forms[k] = hooks.form(output)
            calls.append(None)

        return hooks.Watch(module.get_submodule(tap.path), "output", seen)

    return [watch(k) for k in range(1, stack.depth + 1)]


def _full(model: Subject, prepared: Prepared) -> Pass:
    """The full pass, with logits where there is a row of them for each token."""
    wanted = model.anatomy.select(EVERYTHING)
    try:
        return make(model, prepared, wanted, logits=model.anatomy.head is not None)
    except PassError:
        return make(model, prepared, wanted, logits=False)


def _padded(prepared: Prepared) -> bool:
    batch = prepared[2]
    return batch.padded or (batch.targets is not None and batch.targets.padded)


def _trial(model: Subject, padded: bool) -> Prepared:
    """Texts for a trial, of different lengths or of one."""
    encoded = _texts(model, LENGTHS if padded else LENGTHS[1:] * 2, seed=6)
    aims = _texts(model, TARGETS if padded else TARGETS[1:] * 2, seed=7) if len(model.anatomy.stacks) > 1 else None
    return encoded, aims, make_batch(model, encoded, aims, range(len(LENGTHS)))


def _texts(model: Subject, lengths: Sequence[int], seed: int) -> Encoded:
    limit = model.encoder.window or max(lengths)
    ids = probe(model.module, len(lengths), max(lengths), seed=seed).tolist()
    return Encoded(None, tuple(tuple(row[: min(length, limit)]) for row, length in zip(ids, lengths, strict=True)))

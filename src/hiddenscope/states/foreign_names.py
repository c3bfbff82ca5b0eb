"""What other programs call states, and how they lay them out.

TransformerLens names hooks, nnsight the paths of modules, Hugging Face the entries of a
tuple. A name that is not a site for certain is never taken for one.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hiddenscope.errors import SiteError, StatesError
from hiddenscope.sites import (
    HIDDEN_STATES,
    Site,
    from_alias,
    named_layer,
    quoted,
    select,
)
from hiddenscope.states.tokens import Source

_BLOCK = re.compile(
    r"(?P<stack>(?:\w+\.)*)(?P<list>layers|layer|blocks|block|h)"
    r"\.(?P<block>[0-9]{1,6})"
    r"\.(?P<end>output|input)(?:\.0|\[0\])?"
)
_FINAL_NORM = re.compile(
    r"(?P<stack>(?:\w+\.)*)(?:norm|ln_f|norm_f|final_layer_?norm)\.output"
    r"(?:\.0|\[0\])?"
)
# Modules that are a language model, or only wrap one. Others, such as an encoder, a
# vision tower or a draft head, may have a list of blocks beside the language model's.
_LANGUAGE_MODELS = {
    *("model", "module", "base_model", "_orig_mod", "transformer", "backbone"),
    *("language_model", "text_model", "gpt_neox"),
}
# Text encoders, whose blocks are in an `encoder` that is their only one.
_TEXT_ENCODERS = {"bert", "roberta", "electra", "deberta", "camembert", "mpnet"}
_INSIDE_BLOCK = re.compile(r"\.[0-9]+\.")
_LENS_BLOCK = re.compile(r"(?:blocks|encoder|decoder)\.([0-9]{1,6})\.")
# A pattern that means nothing until the depth is known.
_NEEDS_DEPTH = re.compile(r"\*|\.-[0-9]|hidden_states")
# Layers of a model whose depth is not known.
_MOST_LAYERS = 1000
# Names that an error lists.
_MOST_LISTED = 6


def listed(names: Sequence[str]) -> str:
    """Show some names, and how many more there are."""
    shown = ", ".join(quoted(name) for name in names[:_MOST_LISTED])
    more = len(names) - _MOST_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def sites_in_order(
    sites: str | Site | Iterable[str | Site | int], source: Source
) -> tuple[Site, ...]:
    """Return the sites that the layers of an array are, in the order of the layers.

    >>> sites_in_order([1, 2, "final"], Source("toy"))
    (Site('layer.1'), Site('layer.2'), Site('final'))
    >>> sites_in_order("layer.1-2,final", Source("toy"))
    (Site('layer.1'), Site('layer.2'), Site('final'))
    """
    if isinstance(sites, str):
        if source.depth is None and _NEEDS_DEPTH.search(sites):
            raise _needs_depth(sites)
        layers = source.depth if source.depth is not None else _MOST_LAYERS
        known = [*map(Site, range(layers + 1)), Site(None)]
        # What each entry of `hidden_states` was proved to be, without its stack.
        entries = []
        for name in source.reported:
            entries.append(replace(Site.parse(name), stack=None) if name else None)
        return select(
            sites,
            known,
            owner=source.model,
            depth=source.depth,
            final=source.final,
            reported={None: entries} if source.reported else None,
        )
    if isinstance(sites, Site):
        return (sites,)
    parsed = [site_of(site, source) for site in sites]
    if len(set(parsed)) < len(parsed):
        raise SiteError(
            "Cannot name the layers of these states",
            f"a site is named twice among {listed(list(map(str, parsed)))}",
            "Name each layer once, in the order of the array.",
        )
    return tuple(parsed)


def site_of(name: Any, source: Source) -> Site:
    """Return the site that a number, a name of ours or an alias stands for."""
    text = named_layer(name)
    if isinstance(text, Site):
        return text
    if isinstance(text, str) and ("hook_" in text or HIDDEN_STATES.fullmatch(text)):
        if source.depth is None or source.final is None:
            raise _needs_depth(text)
        entry = HIDDEN_STATES.fullmatch(text)
        if entry and source.reported:
            (site,) = sites_in_order(f"hidden_states[{entry['k']}]", source)
            return replace(site, stack=entry["stack"])
        return from_alias(text, depth=source.depth, final=source.final)
    return Site.parse(text)


def sites_of_names(
    names: Sequence[str], source: Source
) -> tuple[dict[str, Site], list[str]]:
    """Return the site of every name, or raise an error that lists what is unknown.

    Hooks of TransformerLens that are not the state of a token are left out, and
    returned by themselves.

    >>> names = ["model.layers.3.output", "model.norm.output"]
    >>> sites_of_names(names, Source("toy"))[0]["model.layers.3.output"]
    Site('layer.4')
    """
    known = {}
    left_out = []
    unknown = []
    _check_one_stack(names)
    final = source.final
    if final is None and any(name.startswith("ln_final.") for name in names):
        final = True
    depth = source.depth
    if depth is None:
        # Only to bound the numbers of blocks, which the names themselves hold.
        blocks = [int(match[1]) for match in map(_LENS_BLOCK.match, names) if match]
        depth = max(blocks, default=-1) + 1
    for name in names:
        is_hook = "hook_" in name
        site = _lens_site(name, depth, final) if is_hook else _plain_site(name, source)
        if site is not None:
            known[name] = site
        elif is_hook:
            left_out.append(name)
        else:
            unknown.append(name)
    if not unknown:
        return known, left_out
    reason = "no site is called so here, in Hugging Face, TransformerLens or nnsight"
    if any(_BLOCK.fullmatch(name) or _FINAL_NORM.fullmatch(name) for name in unknown):
        reason = "nothing says that this stack of blocks is the language model's"
    elif any(map(_INSIDE_BLOCK.search, unknown)):
        reason = (
            "what a module inside a block returns need not be what the block adds"
            " (some norm it first)"
        )
    raise SiteError(
        f"No site for {listed(unknown)}",
        reason,
        f"Say what it is: sites={{{quoted(unknown[0])}: 'layer.3'}}, or leave it out.",
    )


def _plain_site(name: str, source: Source) -> Site | None:
    """Return the site of a name of ours, of Hugging Face's or of a module's path."""
    block = _BLOCK.fullmatch(name)
    if block and _is_language_model(block["stack"]):
        return Site(int(block["block"]) + (block["end"] == "output"))
    norm = _FINAL_NORM.fullmatch(name)
    if norm and _is_language_model(norm["stack"]):
        return Site(None)
    if HIDDEN_STATES.fullmatch(name):
        return site_of(name, source)
    try:
        return Site.parse(name)
    except SiteError:
        return None


def _is_language_model(stack: str) -> bool:
    """Tell whether the path of the module around a list of blocks is one for certain.

    >>> _is_language_model("model."), _is_language_model("vision_tower.encoder.")
    (True, False)
    """
    modules = stack.split(".")[:-1]
    if modules[-1:] == ["encoder"] and set(modules) & _TEXT_ENCODERS:
        modules = [name for name in modules[:-1] if name not in _TEXT_ENCODERS]
    return set(modules) <= _LANGUAGE_MODELS


def _check_one_stack(names: Sequence[str]) -> None:
    """Require that all paths of modules are of one list of blocks and its norm."""
    lists: dict[str, str] = {}
    stacks: dict[str, str] = {}
    for name in names:
        block = _BLOCK.fullmatch(name)
        path = block or _FINAL_NORM.fullmatch(name)
        if path:
            stacks.setdefault(path["stack"], name)
        if block:
            lists.setdefault(block["stack"] + block["list"], name)
    for examples in (lists, stacks):
        if len(examples) > 1:
            raise SiteError(
                "Cannot tell which layers these modules are",
                f"they are of {len(examples)} stacks of blocks, such as"
                f" {listed(list(examples.values()))}",
                "Give those of one stack, or say what each is:"
                f" sites={{{quoted(names[0])}: 'layer.3'}}.",
            )


def _lens_site(name: str, depth: int, final: bool | None) -> Site | None:
    """Return the site of a hook; None if it is inside a part, or no state at all."""
    if final is None:
        raise StatesError(
            f"Cannot tell which site {quoted(name)} is",
            "nothing says whether the model has a final norm, and without one"
            " TransformerLens takes the hook before the block's own norm",
            "Give source=hs.Source(name, depth=..., final=True), or keep"
            " 'ln_final.hook_scale' in the cache.",
        )
    try:
        site = from_alias(name, depth=depth, final=final)
    except SiteError:
        return None
    return None if site.is_inner else site


def _needs_depth(name: str) -> SiteError:
    return SiteError(
        f"Cannot tell which sites {quoted(name)} names",
        "that depends on the number of blocks and on a final norm, which the states"
        " do not say",
        "Give source=hs.Source(name, depth=..., final=...), or name each site, such as"
        " 'layer.3'.",
    )

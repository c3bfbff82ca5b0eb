"""States of other programs: what vLLM, TransformerLens, nnsight and plain arrays hold.

What a file does not say is asked for and never guessed: which layers it holds, which
tokens they are of, and whether the residual was kept apart.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hiddenscope.errors import SiteError, StatesError
from hiddenscope.sites import Site, summarise
from hiddenscope.states.files import StackParts
from hiddenscope.states.foreign_names import (
    NamedSites,
    listed,
    site_of,
    sites_in_order,
    sites_of_names,
)
from hiddenscope.states.foreign_tensors import UNNAMED, ForeignTensors, open_foreign
from hiddenscope.states.foreign_tokens import (
    GIVE_TOKENS,
    ID_NAMES,
    MASK_NAME,
    ForeignRows,
    foreign_rows,
)
from hiddenscope.states.mixed import stack_sites
from hiddenscope.states.tokens import Source

VLLM_NAME = "hidden_states"
RESIDUAL_NAME = "residual"
_GIVE_SITES = (
    "Give sites=, one for each layer: [1, 2] is the state after block 1 and after"
    " block 2, as vLLM numbers them."
)
# Rows whose mean is less than this share of their size are centred.
_CENTRED = 1e-4
# How far a sum may be off, relative to its size: far more than rounding.
_SUM_TOLERANCE = 0.05


class UnnamedLayers(NamedTuple):
    """Layers `[layer, token, width]` of one text, and the ids of its tokens."""

    values: Tensor
    ids: list[int]


def unnamed_layers(path: str | os.PathLike[str]) -> UnnamedLayers | None:
    """Return the layers of a file that vLLM wrote; None if it is another file.

    Such a file does not say which layers they are.
    """
    foreign = open_foreign(path)
    tensors = foreign.tensors
    if set(tensors) != {VLLM_NAME, ID_NAMES[0]} or tensors[VLLM_NAME].ndim != 3:
        return None
    tokens = foreign_rows(None, foreign).tokens
    values = tensors[VLLM_NAME]
    if _has_tokens_first(foreign, values, len(tokens)):
        values = values.movedim(1, 0)
    return UnnamedLayers(values, tokens.ids.tolist())


def read_foreign(
    foreign: ForeignTensors, tokens: Any, sites: Any, residual: Any, source: Source
) -> StackParts:
    """Return the parts of the states that another program computed."""
    known = _complete(source, foreign)
    rows = foreign_rows(tokens, foreign)
    residual_name = residual if isinstance(residual, str) else RESIDUAL_NAME
    if isinstance(residual, str) and residual not in foreign.tensors:
        held = listed(list(foreign.tensors))
        raise StatesError(
            foreign.problem,
            f"it has no tensor {residual!r}, but {held}",
            "Name the tensor of the residual as the file does.",
        )
    notes: tuple[str, ...] = ()
    rest = dict(foreign.tensors)
    for name in (*ID_NAMES, MASK_NAME, residual_name):
        rest.pop(name, None)
    if set(rest) in ({UNNAMED}, {VLLM_NAME}):
        array = _summed(foreign, rest, residual, residual_name)
        tokens_first = _has_tokens_first(foreign, array, len(rows.tokens))
        by_site = _layers(foreign, array, tokens_first, sites, known)
    else:
        if RESIDUAL_NAME in foreign.tensors or residual is not None:
            raise StatesError(
                foreign.problem,
                "a residual stands beside tensors with names of their own",
                "Add the residual to each of them, and leave `residual` out.",
            )
        by_site, notes = _by_name(foreign, rest, sites, known)
    ordered = sorted(by_site)
    _check_depth(foreign, ordered, known)
    values = [_rows(foreign, site, by_site[site], rows) for site in ordered]
    dtypes = sorted({str(value.dtype) for value in values})
    if len(dtypes) > 1:
        raise StatesError(
            foreign.problem,
            f"its tensors are of {len(dtypes)} dtypes ({listed(dtypes)})",
            "Give them in one dtype.",
        )
    notes = (*known.notes, *foreign.notes, *notes, *_centred(values, ordered))
    dtype = known.dtype or str(values[0].dtype).removeprefix("torch.")
    complete = replace(known, dtype=dtype, notes=notes)
    return StackParts(
        tuple(ordered), stack_sites(ordered, values), rows.tokens, complete
    )


def _complete(source: Source, foreign: ForeignTensors) -> Source:
    """Add the depth that the program itself says."""
    if source.depth is not None:
        return source
    return replace(source, depth=foreign.depth)


def _summed(
    foreign: ForeignTensors,
    tensors: Mapping[str, Tensor],
    residual: Any,
    residual_name: str,
) -> Tensor:
    """Return the array of all layers, with the residual added if it is kept apart."""
    (array,) = tensors.values()
    apart = foreign.tensors.get(residual_name)
    if residual is None:
        if apart is not None:
            raise StatesError(
                foreign.problem,
                "it keeps the residual apart from what the MLPs return, and the hidden"
                " state is their sum",
                f"Give residual={residual_name!r} to add it.",
            )
        return array
    if not isinstance(residual, str):
        apart = torch.as_tensor(residual)
    assert apart is not None
    if apart.shape != array.shape:
        raise StatesError(
            foreign.problem,
            f"the residual is {list(apart.shape)} and the rest {list(array.shape)}",
            "Give the residual of the same tokens and layers.",
        )
    # In the dtype of the engine, which rounds the sum too.
    return array + apart.to(array.dtype)


def _has_tokens_first(foreign: ForeignTensors, array: Tensor, count: int) -> bool:
    """Tell whether an array is `[token, layer, width]`, as vLLM keeps its layers.

    `count` is the number of tokens. An array without a name is `[layer, token, width]`
    by our convention. Others give the same name to either order, so that the name
    alone says nothing.
    """
    if VLLM_NAME not in foreign.tensors or array.ndim != 3:
        return False
    first, second = array.shape[:2]
    if (first == count) != (second == count):
        return first == count
    # With ids of this name beside it, it is what vLLM writes.
    if ID_NAMES[0] in foreign.tensors:
        return True
    if first == count:
        raise StatesError(
            foreign.problem,
            f"its {VLLM_NAME!r} are {list(array.shape)}, and nothing says whether"
            " tokens or layers come first",
            "Give the array by itself, as [layer, token, width].",
        )
    return False


def _layers(
    foreign: ForeignTensors,
    array: Tensor,
    tokens_first: bool,
    sites: Any,
    source: Source,
) -> dict[Site, Tensor]:
    """Return the tensor of each layer of an array that holds all of them."""
    shape = "[token, layer, width]" if tokens_first else "[layer, token, width]"
    if array.ndim not in (3, 4):
        raise StatesError(
            foreign.problem,
            f"the array is {list(array.shape)}",
            f"Give one of the shape {shape}, or [layer, text, token, width].",
        )
    if sites is None:
        raise StatesError(
            foreign.problem,
            f"it holds {array.shape[int(tokens_first)]} layers and does not say which",
            _GIVE_SITES,
        )
    if isinstance(sites, Mapping):
        raise SiteError(
            foreign.problem, "its layers have no names to map from", _GIVE_SITES
        )
    named = sites_in_order(sites, source)
    layers = array.movedim(1, 0) if tokens_first else array
    if len(layers) != len(named):
        reason = (
            f"it is {list(array.shape)}, read as {shape}, and {len(named)} sites are"
            f" named ({summarise(named)})"
        )
        remedy = "Name every layer that it holds, and no other."
        if array.ndim == 3 and array.shape[int(not tokens_first)] == len(named):
            remedy = f"If its axes are in another order, give it as {shape}."
        raise StatesError(foreign.problem, reason, remedy)
    return dict(zip(named, layers, strict=True))


def _by_name(
    foreign: ForeignTensors, tensors: Mapping[str, Tensor], sites: Any, source: Source
) -> tuple[dict[Site, Tensor], tuple[str, ...]]:
    """Return the tensor of each site, by the names of the tensors, and notes."""
    named = _named(foreign, tensors, sites, source)
    if not named.sites:
        raise StatesError(
            foreign.problem,
            f"none of its tensors is a site ({listed(list(tensors))})",
            "Say what they are: sites={'name': 'layer.3'}.",
        )
    notes = []
    if any("hook_" in name for name in named.sites):
        notes.append(
            "TransformerLens may have folded norms and centred what is written to the"
            " residual stream (HookedTransformer does, and a bridge in compatibility"
            " mode): its states may differ from Hugging Face's."
        )
    if named.left_out:
        notes.append(
            f"{len(named.left_out)} tensors are no states of a token and were left out:"
            f" {listed(named.left_out)}."
        )
    by_site: dict[Site, Tensor] = {}
    for name, site in named.sites.items():
        known = by_site.setdefault(site, tensors[name])
        # A block's output is the next block's input, which has a name too.
        if known is not tensors[name] and not torch.equal(known, tensors[name]):
            raise StatesError(
                foreign.problem,
                f"two of its tensors are {site} and differ, one of them {name!r}",
                "Choose one: sites={'name': 'layer.3'}.",
            )
    if source.final is None and any("hook_" in name for name in named.sites):
        _check_sums(foreign, by_site)
    return by_site, tuple(notes)


def _check_sums(foreign: ForeignTensors, by_site: Mapping[Site, Tensor]) -> None:
    """Require that a block's output is the sum of its middle and what its MLP adds.

    Where a block norms its output, as in BERT, hooks of TransformerLens are other
    states than their names say, and some of its classes call BERT's head `ln_final`.
    """
    for site, output in by_site.items():
        if site.part or not site.layer:
            continue
        middle = by_site.get(Site(site.layer, "mid", site.stack))
        added = by_site.get(Site(site.layer, "mlp", site.stack))
        if middle is None or added is None:
            continue
        expected = output.double()
        error = (middle.double() + added.double() - expected).norm()
        if error > _SUM_TOLERANCE * expected.norm():
            raise StatesError(
                foreign.problem,
                f"block {site.layer - 1} does not add what its MLP returns to its"
                " middle, so it norms its output and its hooks are other states",
                "Give source=hs.Source(name, depth=..., final=False), or sites= for the"
                " names that you know.",
            )


def _named(
    foreign: ForeignTensors, tensors: Mapping[str, Tensor], sites: Any, source: Source
) -> NamedSites:
    """Return the sites of the names: all, some of them, or as a mapping says."""
    if sites is None:
        return sites_of_names(list(tensors), source)
    if not isinstance(sites, Mapping):
        named = sites_of_names(list(tensors), source)
        selected = set(sites_in_order(sites, source))
        missing = selected - set(named.sites.values())
        if missing:
            raise SiteError(
                foreign.problem,
                f"it has no {summarise(missing)}",
                f"It has {summarise(named.sites.values())}.",
            )
        by_name = {}
        for name, site in named.sites.items():
            if site in selected:
                by_name[name] = site
        return NamedSites(by_name)
    unknown = [str(name) for name in sites if name not in tensors]
    if unknown:
        raise SiteError(
            foreign.problem,
            f"it has no tensor {listed(unknown)}",
            f"It has {listed(list(tensors))}.",
        )
    return NamedSites({name: site_of(site, source) for name, site in sites.items()})


def _check_depth(
    foreign: ForeignTensors, sites: Sequence[Site], source: Source
) -> None:
    """Refuse layers that the model does not have."""
    if source.depth is None:
        return
    for site in sites:
        if site.layer is not None and site.layer > source.depth:
            raise SiteError(
                foreign.problem,
                f"it holds {site}, and the model has {source.depth} blocks",
                "Give states of this model, or its true depth.",
            )


def _rows(
    foreign: ForeignTensors, site: Site, values: Tensor, rows: ForeignRows
) -> Tensor:
    """Return the rows of one site, `[token, width]`, of real tokens alone."""
    # A head's numbers have an axis of their own in TransformerLens.
    if site.is_inner and values.ndim == 4:
        values = values.flatten(2)
    if not values.dtype.is_floating_point:
        raise StatesError(
            foreign.problem,
            f"the values at {site} are {values.dtype}",
            "Give them in a floating-point dtype.",
        )
    tokens, mask = rows
    if values.ndim == 3 and mask is not None and values.shape[:2] == mask.shape:
        return values[mask]
    if values.ndim == 3 and _is_unpadded(values, tokens.lengths.tolist()):
        return values.flatten(0, 1)
    if values.ndim == 2 and len(values) == len(tokens):
        return values
    lengths = tokens.lengths.tolist()
    reason = (
        f"the values at {site} are {list(values.shape)}, and there are {len(tokens)}"
        f" tokens in {tokens.count} texts"
    )
    remedy = GIVE_TOKENS
    if (
        values.ndim == 2
        and len(values) < len(tokens)
        and "token_ids" in foreign.tensors
    ):
        reason += ": vLLM gives no states of tokens that it took from its prefix cache"
        remedy = "Run it with enable_prefix_caching=False."
    if values.ndim == 3 and values.shape[0] == tokens.count:
        reason = (
            f"the values at {site} are {list(values.shape)}, padded, and the texts have"
            f" {min(lengths)} to {max(lengths)} tokens"
        )
        remedy = (
            "Give tokens={'input_ids': ..., 'attention_mask': ...}, which says where"
            " the padding is."
        )
    raise StatesError(foreign.problem, reason, remedy)


def _is_unpadded(values: Tensor, lengths: Sequence[int]) -> bool:
    return [values.shape[1]] * values.shape[0] == list(lengths)


def _centred(values: Sequence[Tensor], sites: Sequence[Site]) -> list[str]:
    """Note residual streams whose rows all have mean zero."""
    rows = []
    for site, site_values in zip(sites, values, strict=True):
        if site.layer and not site.part:
            rows.append(site_values.float())
    if not rows or not all(map(_is_centred, rows)):
        return []
    return [
        "The numbers of every layer have mean zero for each token, as TransformerLens"
        " makes them (center_writing_weights)."
    ]


def _is_centred(rows: Tensor) -> bool:
    size = rows.square().mean(1).sqrt()
    return bool((rows.mean(1).abs() <= _CENTRED * size).all())

"""States of other programs: what vLLM, TransformerLens, nnsight and plain arrays hold.

What a file does not say is asked for and never guessed: which layers it holds, which
tokens they are of, and whether the residual was kept apart.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.arguments import shown
from hiddenscope.errors import SiteError
from hiddenscope.files import PathLike
from hiddenscope.sites import Site, summarise
from hiddenscope.states.files import UNNAMED, ForeignTensors, StackParts, open_foreign
from hiddenscope.states.foreign_names import (
    listed,
    site_of,
    sites_in_order,
    sites_of_names,
)
from hiddenscope.states.mixed import stack_sites
from hiddenscope.states.tokens import Source, Tokens

VLLM_NAME = "hidden_states"
RESIDUAL_NAME = "residual"
# What files call the ids of tokens: vLLM, then tokenizers.
ID_NAMES = ("token_ids", "input_ids")
MASK_NAME = "attention_mask"
_GIVE_TOKENS = (
    "Give tokens=, the ids of each text, or what the tokenizer returned with its"
    " attention_mask."
)
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


ForeignRows: TypeAlias = tuple[Tokens, Tensor | None]
"""The tokens, and a mask `[text, token]` of the real ones if texts were padded."""


def unnamed_layers(path: PathLike) -> UnnamedLayers | None:
    """Return the layers of a file that vLLM wrote; None if it is another file.

    Such a file does not say which layers they are.
    """
    foreign = open_foreign(path)
    tensors = foreign.tensors
    if set(tensors) != {VLLM_NAME, ID_NAMES[0]} or tensors[VLLM_NAME].ndim != 3:
        return None
    tokens, _ = _foreign_rows(None, foreign)
    values = tensors[VLLM_NAME]
    if _has_tokens_first(foreign, values, len(tokens)):
        values = values.movedim(1, 0)
    return UnnamedLayers(values, tokens.ids.tolist())


def read_foreign(
    foreign: ForeignTensors, tokens: Any, sites: Any, residual: Any, source: Source
) -> StackParts:
    """Return the parts of the states that another program computed."""
    if source.depth is None:
        source = replace(source, depth=foreign.depth)
    rows = _foreign_rows(tokens, foreign)
    residual_name = residual if isinstance(residual, str) else RESIDUAL_NAME
    if isinstance(residual, str) and residual not in foreign.tensors:
        raise foreign.error(
            f"it has no tensor {residual!r}, but {listed(list(foreign.tensors))}",
            "Name the tensor of the residual as the file does.",
        )
    notes: tuple[str, ...] = ()
    rest = dict(foreign.tensors)
    for name in (*ID_NAMES, MASK_NAME, residual_name):
        rest.pop(name, None)
    if set(rest) in ({UNNAMED}, {VLLM_NAME}):
        (array,) = rest.values()
        array = _summed(foreign, array, residual, residual_name)
        tokens_first = _has_tokens_first(foreign, array, len(rows[0]))
        by_site = _layers(foreign, array, tokens_first, sites, source)
    elif RESIDUAL_NAME in foreign.tensors or residual is not None:
        raise foreign.error(
            "a residual stands beside tensors with names of their own",
            "Add the residual to each of them, and leave `residual` out.",
        )
    else:
        by_site, notes = _by_name(foreign, rest, sites, source)
    ordered = sorted(by_site)
    for site in ordered:
        if source.depth is not None and (site.layer or 0) > source.depth:
            raise foreign.error(
                f"it holds {site}, and the model has {source.depth} blocks",
                "Give states of this model, or its true depth.",
                SiteError,
            )
    values = [_rows(foreign, site, by_site[site], rows) for site in ordered]
    dtypes = sorted({str(value.dtype) for value in values})
    if len(dtypes) > 1:
        raise foreign.error(
            f"its tensors are of {len(dtypes)} dtypes ({listed(dtypes)})",
            "Give them in one dtype.",
        )
    notes = (*source.notes, *foreign.notes, *notes)
    # Whether all rows of the residual stream have mean zero.
    centred = []
    for site, site_values in zip(ordered, values, strict=True):
        if site.layer and not site.part:
            numbers = site_values.float()
            size = numbers.square().mean(1).sqrt()
            centred.append(bool((numbers.mean(1).abs() <= _CENTRED * size).all()))
    if centred and all(centred):
        notes += (
            "The numbers of every layer have mean zero for each token, as"
            " TransformerLens makes them (center_writing_weights).",
        )
    dtype = source.dtype or dtypes[0].removeprefix("torch.")
    complete = replace(source, dtype=dtype, notes=notes)
    stacked = stack_sites(ordered, values)
    return StackParts(tuple(ordered), stacked, rows[0], complete)


def _foreign_rows(tokens: Any, foreign: ForeignTensors) -> ForeignRows:
    """Return the tokens as the caller says them, or as the file holds them."""
    held = None
    names = [name for name in ID_NAMES if name in foreign.tensors]
    if names:
        mask = foreign.tensors.get(MASK_NAME)
        held = _from_ids(foreign.tensors[names[0]], mask, foreign)
    if tokens is None:
        if held is None:
            reason = "nothing says which tokens they are of"
            raise foreign.error(reason, _GIVE_TOKENS)
        return held
    if isinstance(tokens, Tokens):
        rows: ForeignRows = (tokens, None)
    elif isinstance(tokens, Mapping):
        if "input_ids" not in tokens:
            reason = "the tokens have no 'input_ids'"
            raise foreign.error(reason, _GIVE_TOKENS)
        rows = _from_ids(tokens["input_ids"], tokens.get(MASK_NAME), foreign)
    # What `model.encode` returned.
    elif hasattr(tokens, "ids") and hasattr(tokens, "lengths"):
        texts = getattr(tokens, "texts", None)
        rows = (_tokens(tokens.ids, texts), None)
    else:
        rows = _from_ids(tokens, None, foreign)
    if held is None:
        return rows
    (held_tokens, held_mask), (given_tokens, mask) = held, rows
    if held_tokens.ids.tolist() != given_tokens.ids.tolist():
        raise foreign.error(
            "it holds other token ids than those given, as of another tokenizer or"
            " other texts",
            "Give the texts that it was made of, or leave tokens out.",
        )
    return given_tokens, held_mask if mask is None else mask


def _from_ids(ids: Any, mask: Any, foreign: ForeignTensors) -> ForeignRows:
    """Return the tokens of ids `[token]`, `[text, token]` or a list of each text's."""
    first = ids
    if isinstance(ids, list | tuple) and ids:
        first = ids[0]
    if isinstance(first, str):
        reason = "the tokens are texts, which only a tokenizer turns into ids"
        raise foreign.error(reason, "Give tokens=model.encode(texts), or the ids.")
    try:
        rows = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not rows or not isinstance(rows[0], list | tuple | np.ndarray | Tensor):
            rows = [rows]
        texts = [[operator.index(token) for token in row] for row in rows]
    except (TypeError, ValueError) as error:
        reason = f"the tokens are a {type(ids).__name__} and not ids"
        raise foreign.error(reason, _GIVE_TOKENS) from error
    is_real = None
    if mask is not None:
        # The attention mask of texts of these lengths as one of bools.
        lengths = [len(text) for text in texts]
        values = torch.as_tensor(np.atleast_2d(np.asarray(mask)))
        # A mask that is added to attention scores is 0 for real tokens.
        if not ((values == 0) | (values == 1)).all():
            raise foreign.error(
                "the attention mask has other numbers than 1 for a token and 0 for"
                " padding",
                "Give the tokenizer's mask, and not one that is added to attention"
                " scores.",
            )
        if values.ndim != 2 or [values.shape[1]] * values.shape[0] != lengths:
            raise foreign.error(
                f"the attention mask is {list(values.shape)}, and there are"
                f" {len(lengths)} texts of {max(lengths, default=0)} ids",
                "Give the mask that belongs to these ids.",
            )
        is_real = values.bool()
        pairs = zip(texts, is_real.tolist(), strict=True)
        texts = [list(compress(text, row)) for text, row in pairs]
    # A negative id marks padding, or what no token stands for.
    lowest = min(chain.from_iterable(texts), default=0)
    if lowest < 0:
        reason = f"{lowest} is not the id of a token"
        raise foreign.error(reason, _GIVE_TOKENS)
    return _tokens(texts, None), is_real


def _tokens(ids: Sequence[Sequence[int]], texts: Sequence[str] | None) -> Tokens:
    lengths = [len(text) for text in ids]
    flat = list(chain.from_iterable(ids))
    places = chain.from_iterable(map(range, lengths))
    return Tokens(
        None if texts is None else tuple(texts),
        text=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.array(list(places), dtype=np.int64),
        ids=np.array(flat, dtype=np.int64),
        strings=tuple(map(str, flat)),
        count=len(lengths),
    )


def _summed(
    foreign: ForeignTensors, array: Tensor, residual: Any, residual_name: str
) -> Tensor:
    """Return the array of all layers, with the residual added if it is kept apart."""
    apart = foreign.tensors.get(residual_name)
    if residual is None and apart is None:
        return array
    if residual is None:
        raise foreign.error(
            "it keeps the residual apart from what the MLPs return, and the hidden"
            " state is their sum",
            f"Give residual={residual_name!r} to add it.",
        )
    if not isinstance(residual, str):
        try:
            apart = torch.as_tensor(residual)
        except (TypeError, ValueError, RuntimeError) as error:
            raise foreign.error(
                f"the residual is {shown(residual)}", "Give its name, or a tensor."
            ) from error
    assert apart is not None
    if apart.shape != array.shape:
        raise foreign.error(
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
        raise foreign.error(
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
        raise foreign.error(
            f"the array is {list(array.shape)}",
            f"Give one of the shape {shape}, or [layer, text, token, width].",
        )
    layers = array.movedim(1, 0) if tokens_first else array
    if sites is None:
        reason = f"it holds {len(layers)} layers and does not say which"
        raise foreign.error(reason, _GIVE_SITES)
    if isinstance(sites, Mapping):
        reason = "its layers have no names to map from"
        raise foreign.error(reason, _GIVE_SITES, SiteError)
    named = sites_in_order(sites, source)
    if len(layers) != len(named):
        reason = (
            f"it is {list(array.shape)}, read as {shape}, and {len(named)} sites are"
            f" named ({summarise(named)})"
        )
        remedy = "Name every layer that it holds, and no other."
        if array.ndim == 3 and layers.shape[1] == len(named):
            remedy = f"If its axes are in another order, give it as {shape}."
        raise foreign.error(reason, remedy)
    return dict(zip(named, layers, strict=True))


def _by_name(
    foreign: ForeignTensors, tensors: Mapping[str, Tensor], sites: Any, source: Source
) -> tuple[dict[Site, Tensor], tuple[str, ...]]:
    """Return the tensor of each site, by the names of the tensors, and notes."""
    if isinstance(sites, Mapping):
        unknown = [str(name) for name in sites if name not in tensors]
        if unknown:
            reason = f"it has no tensor {listed(unknown)}"
            raise foreign.error(reason, f"It has {listed(list(tensors))}.", SiteError)
        named = {name: site_of(sites[name], source) for name in sites}
        left_out: list[str] = []
    else:
        named, left_out = sites_of_names(list(tensors), source)
    selected = set(named.values())
    if sites is not None and not isinstance(sites, Mapping):
        selected = set(sites_in_order(sites, source))
    missing = selected - set(named.values())
    if missing:
        raise foreign.error(
            f"it has no {summarise(missing)}",
            f"It has {summarise(named.values())}.",
            SiteError,
        )
    if not named:
        raise foreign.error(
            f"none of its tensors is a site ({listed(list(tensors))})",
            "Say what they are: sites={'name': 'layer.3'}.",
        )
    by_site: dict[Site, Tensor] = {}
    for name, site in named.items():
        if site not in selected:
            continue
        known = by_site.setdefault(site, tensors[name])
        # A block's output is the next block's input, which has a name too.
        if known is not tensors[name] and not torch.equal(known, tensors[name]):
            raise foreign.error(
                f"two of its tensors are {site} and differ, one of them {name!r}",
                "Choose one: sites={'name': 'layer.3'}.",
            )
    notes = []
    if any("hook_" in name for name in named):
        notes.append(
            "TransformerLens may have folded norms and centred what is written to the"
            " residual stream (HookedTransformer does, and a bridge in compatibility"
            " mode): its states may differ from Hugging Face's."
        )
        if source.final is None:
            _check_sums(foreign, by_site)
    if left_out:
        notes.append(
            f"{len(left_out)} tensors are no states of a token and were left out:"
            f" {listed(left_out)}."
        )
    return by_site, tuple(notes)


def _check_sums(foreign: ForeignTensors, by_site: Mapping[Site, Tensor]) -> None:
    """Require that a block's output is the sum of its middle and what its MLP adds.

    Where a block norms its output, as in BERT, hooks of TransformerLens are other
    states than their names say, and some of its classes call BERT's head `ln_final`.
    """
    for site, output in by_site.items():
        if site.part or not site.layer:
            continue
        middle = by_site.get(replace(site, part="mid"))
        added = by_site.get(replace(site, part="mlp"))
        if middle is None or added is None:
            continue
        expected = output.double()
        error = (middle.double() + added.double() - expected).norm()
        if error > _SUM_TOLERANCE * expected.norm():
            raise foreign.error(
                f"block {site.layer - 1} does not add what its MLP returns to its"
                " middle, so it norms its output and its hooks are other states",
                "Give source=hs.Source(name, depth=..., final=False), or sites= for the"
                " names that you know.",
            )


def _rows(
    foreign: ForeignTensors, site: Site, values: Tensor, rows: ForeignRows
) -> Tensor:
    """Return the rows of one site, `[token, width]`, of real tokens alone."""
    # A head's numbers have an axis of their own in TransformerLens.
    if site.is_inner and values.ndim == 4:
        values = values.flatten(2)
    if not values.dtype.is_floating_point:
        raise foreign.error(
            f"the values at {site} are {values.dtype}",
            "Give them in a floating-point dtype.",
        )
    tokens, mask = rows
    lengths = tokens.lengths.tolist()
    is_padded = values.ndim == 3
    if is_padded and mask is not None and values.shape[:2] == mask.shape:
        return values[mask]
    if is_padded and [values.shape[1]] * len(values) == lengths:
        return values.flatten(0, 1)
    if values.ndim == 2 and len(values) == len(tokens):
        return values
    shape = f"the values at {site} are {list(values.shape)}"
    reason = f"{shape}, and there are {len(tokens)} tokens in {tokens.count} texts"
    remedy = _GIVE_TOKENS
    if (
        values.ndim == 2
        and len(values) < len(tokens)
        and ID_NAMES[0] in foreign.tensors
    ):
        reason += ": vLLM gives no states of tokens that it took from its prefix cache"
        remedy = "Run it with enable_prefix_caching=False."
    if is_padded and len(values) == tokens.count:
        reason = (
            f"{shape}, padded, and the texts have {min(lengths)} to {max(lengths)}"
            " tokens"
        )
        remedy = (
            "Give tokens={'input_ids': ..., 'attention_mask': ...}, which says where"
            " the padding is."
        )
    raise foreign.error(reason, remedy)

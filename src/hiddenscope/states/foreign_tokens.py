"""The tokens of states that another program computed, and where their padding is."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import StatesError
from hiddenscope.states.foreign_tensors import ForeignTensors
from hiddenscope.states.tokens import Tokens

# What files call the ids of tokens: vLLM, then tokenizers.
ID_NAMES = ("token_ids", "input_ids")
MASK_NAME = "attention_mask"
GIVE_TOKENS = (
    "Give tokens=, the ids of each text, or what the tokenizer returned with its"
    " attention_mask."
)


class ForeignRows(NamedTuple):
    """The tokens, and a mask `[text, token]` of the real ones if texts were padded."""

    tokens: Tokens
    mask: Tensor | None


def foreign_rows(tokens: Any, foreign: ForeignTensors) -> ForeignRows:
    """Return the tokens as they are given, or as the file holds them."""
    held = _held_ids(foreign)
    if tokens is None:
        if held is None:
            raise StatesError(
                foreign.problem, "nothing says which tokens they are of", GIVE_TOKENS
            )
        return held
    rows = _given_rows(tokens, foreign)
    if held is not None and held.tokens.ids.tolist() != rows.tokens.ids.tolist():
        raise StatesError(
            foreign.problem,
            "it holds other token ids than those given, as of another tokenizer or"
            " other texts",
            "Give the texts that it was made of, or leave tokens out.",
        )
    if rows.mask is None and held is not None:
        return ForeignRows(rows.tokens, held.mask)
    return rows


def _held_ids(foreign: ForeignTensors) -> ForeignRows | None:
    for name in ID_NAMES:
        if name in foreign.tensors:
            mask = foreign.tensors.get(MASK_NAME)
            return _from_ids(foreign.tensors[name], mask, foreign)
    return None


def _given_rows(tokens: Any, foreign: ForeignTensors) -> ForeignRows:
    if isinstance(tokens, Tokens):
        return ForeignRows(tokens, None)
    if isinstance(tokens, Mapping):
        if "input_ids" not in tokens:
            raise StatesError(
                foreign.problem, "the tokens have no 'input_ids'", GIVE_TOKENS
            )
        return _from_ids(tokens["input_ids"], tokens.get(MASK_NAME), foreign)
    # What `model.encode` returned.
    if hasattr(tokens, "ids") and hasattr(tokens, "lengths"):
        texts = getattr(tokens, "texts", None)
        return ForeignRows(_tokens(tokens.ids, texts), None)
    return _from_ids(tokens, None, foreign)


def _from_ids(ids: Any, mask: Any, foreign: ForeignTensors) -> ForeignRows:
    """Return the tokens of ids `[token]`, `[text, token]` or a list of each text's."""
    texts = _id_lists(ids, foreign)
    if mask is None:
        _check_ids(texts, foreign)
        return ForeignRows(_tokens(texts, None), None)
    is_real = _real_tokens(mask, foreign)
    if is_real.ndim == 1:
        is_real = is_real[None]
    lengths = [len(text) for text in texts]
    if is_real.ndim != 2 or [is_real.shape[1]] * is_real.shape[0] != lengths:
        raise StatesError(
            foreign.problem,
            f"the attention mask is {list(is_real.shape)}, and there are"
            f" {len(texts)} texts of {max(lengths, default=0)} ids",
            "Give the mask that belongs to these ids.",
        )
    real = []
    for text, row in zip(texts, is_real.tolist(), strict=True):
        real.append([token for token, keep in zip(text, row, strict=True) if keep])
    _check_ids(real, foreign)
    return ForeignRows(_tokens(real, None), is_real)


def _real_tokens(mask: Any, foreign: ForeignTensors) -> Tensor:
    """Return an attention mask as one of bools."""
    values = torch.as_tensor(np.asarray(mask))
    # A mask that is added to attention scores is 0 for real tokens.
    if not bool(((values == 0) | (values == 1)).all()):
        raise StatesError(
            foreign.problem,
            "the attention mask has other numbers than 1 for a token and 0 for padding",
            "Give the tokenizer's mask, and not one that is added to attention scores.",
        )
    return values.bool()


def _check_ids(texts: Sequence[Sequence[int]], foreign: ForeignTensors) -> None:
    """Refuse negative ids: they mark padding, or what no token stands for."""
    lowest = min(chain.from_iterable(texts), default=0)
    if lowest < 0:
        raise StatesError(
            foreign.problem, f"{lowest} is not the id of a token", GIVE_TOKENS
        )


def _id_lists(ids: Any, foreign: ForeignTensors) -> list[list[int]]:
    reason = f"the tokens are a {type(ids).__name__} and not ids"
    if isinstance(ids, str) or (isinstance(ids, list | tuple) and _holds_texts(ids)):
        reason = "the tokens are texts, which only a tokenizer turns into ids"
        raise StatesError(
            foreign.problem, reason, "Give tokens=model.encode(texts), or the ids."
        )
    try:
        rows = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        if not rows or not isinstance(rows[0], list | tuple | np.ndarray | Tensor):
            rows = [rows]
        texts = []
        for row in rows:
            array = np.asarray(row)
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise TypeError("not integers")
            texts.append(array.tolist())
    except (TypeError, ValueError) as error:
        raise StatesError(foreign.problem, reason, GIVE_TOKENS) from error
    return texts


def _holds_texts(ids: Sequence[Any]) -> bool:
    return bool(ids) and isinstance(ids[0], str)


def _tokens(ids: Sequence[Sequence[int]], texts: Sequence[str] | None) -> Tokens:
    lengths = [len(text) for text in ids]
    flat = list(chain.from_iterable(ids))
    places = [np.arange(length) for length in lengths]
    return Tokens(
        None if texts is None else tuple(texts),
        text=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.concatenate([np.empty(0, np.int64), *places]),
        ids=np.array(flat, dtype=np.int64),
        strings=tuple(map(str, flat)),
        count=len(lengths),
    )

"""The limits that a model's configuration sets to its texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from hiddenscope.discovery import vocabulary, window
from hiddenscope.passes import TextEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def text_encoder(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase | None, name: str
) -> TextEncoder:
    """Return the encoder of a model's texts, within the limits of its configuration."""
    config: Any = getattr(module, "config", None)
    text_config: Any = config
    if hasattr(config, "get_text_config"):
        text_config = config.get_text_config()
    size = vocabulary(module)
    pads = (
        getattr(tokenizer, "pad_token_id", None),
        getattr(text_config, "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    # CANINE pools this many characters into one position, and needs at least one.
    shortest = getattr(config, "downsampling_rate", 1)
    return TextEncoder(
        tokenizer,
        window(module),
        size,
        name,
        start=_decoder_start(module, config, size),
        pad=_first_id(pads, size) or 0,
        target_window=getattr(config, "max_decoder_position_embeddings", None),
        shortest=shortest if isinstance(shortest, int) else 1,
    )


def _decoder_start(module: nn.Module, config: Any, size: int) -> int | None:
    """Return the id that opens a decoder's text; None where nothing names it."""
    # The decoder may have a larger vocabulary than the encoder.
    sizes = (
        size,
        getattr(config, "tgt_vocab_size", None),
        getattr(config, "decoder_vocab_size", None),
        getattr(getattr(config, "decoder", None), "vocab_size", None),
    )
    largest = max(number for number in sizes if isinstance(number, int))
    starts = []
    for part in (config, getattr(module, "generation_config", None)):
        starts.append(getattr(part, "decoder_start_token_id", None))
    return _first_id(starts, largest)


def _first_id(ids: Iterable[object], size: int) -> int | None:
    """Return the first id that is in a vocabulary of this size."""
    for token in ids:
        if isinstance(token, int) and 0 <= token < size:
            return token
    return None

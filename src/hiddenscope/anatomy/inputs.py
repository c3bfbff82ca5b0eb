"""What a module's forward is called with: the arguments that it names, and no others."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def arguments(
    module: nn.Module, ids: Tensor, mask: Tensor | None = None, targets: Tensor | None = None
) -> dict[str, Any]:
    """The keyword arguments for one pass over `ids` [text, token]; `targets` are an encoder-decoder's decoder ids."""
    named = accepts(module)
    given: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in named:
        given["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    if "use_cache" in named:
        given["use_cache"] = False
    if "bbox" in named:
        given["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long, device=ids.device)
    if targets is not None:
        given["decoder_input_ids"] = targets
    return given


def accepts(module: nn.Module) -> frozenset[str]:
    """The names of the arguments that a module's forward takes."""
    return _parameters(type(module).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def ordinary_ids(module: nn.Module) -> list[int]:
    """Ids that every text could hold: in the vocabulary, and none that the configuration gives a meaning of its own.

    Spread over the vocabulary, most of the first hundred left out, because control tokens live there.
    """
    config: Any = getattr(module, "config", None)
    configs = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", {}))]
    reserved: set[int] = set()
    for part in configs:
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index")):
                reserved.update(value if isinstance(value, list) else [value])
    size = vocabulary(module)
    start = min(100, size // 8)
    step = max(1, (size - start) // 512)
    return [i for i in range(start, size, step) if i not in reserved]


def vocabulary(module: nn.Module) -> int:
    """How many ids the module's token embedding knows."""
    try:
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        embedding = None
    weight = getattr(embedding, "weight", None)
    known = [] if weight is None else [int(weight.shape[0])]
    config: Any = getattr(module, "config", None)
    if config is not None:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        known += [size for size in (getattr(text, "vocab_size", None),) if isinstance(size, int)]
    return min(known, default=256)


def probe(module: nn.Module, texts: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Ids for a trial pass, the same each time."""
    pool = torch.tensor(ordinary_ids(module))
    picks = torch.randint(len(pool), (texts, tokens), generator=torch.Generator().manual_seed(seed))
    return pool[picks]

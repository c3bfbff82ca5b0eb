"""Read the depth, size and dtype of a checkpoint before its weights.

The command line uses this to say at once what it loads and to refuse a layer that does
not exist. Config and weight headers are read in a few milliseconds. Whatever is not
certain is None and refuses nothing: the loaded model decides.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenscope.errors import Error, SiteError
from hiddenscope.loading.cache import is_complete
from hiddenscope.loading.folder import (
    check_files,
    read_json,
    weight_files,
    weight_totals,
)
from hiddenscope.loading.zoo import DEFAULT, ZOO
from hiddenscope.sites import Site, select

HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Types whose blocks are more than the config counts.
OTHER_DEPTHS = {"canine", "funnel", "hrm_text"}
# The base classes of transformers, by name.
HEADLESS = re.compile(r"[A-Z]\w*(?<!LMHead)(?<!DoubleHeads)(?<!MT)Model")
LAYER = re.compile(r"layer\.([0-9]{1,6})(?:\.\w+)?")


@dataclass(frozen=True)
class Outline:
    """A model by its name, with what is known of it before it is loaded.

    >>> Outline("smollm2", 30, 134_515_008, "float32").described()
    'smollm2 (135M, float32)'
    """

    name: str
    layers: int | None = None
    parameters: int | None = None
    dtype: str | None = None
    headless: bool = False
    heads: int | None = None

    def described(self, dtype: str | None = None) -> str:
        """Return the name with the size and the requested or stored dtype."""
        known = []
        if self.parameters:
            known.append(in_short(self.parameters))
        if dtype or self.dtype:
            known.append(str(dtype or self.dtype))
        if not known:
            return self.name
        return f"{self.name} ({', '.join(known)})"


def outline(source: str | None) -> Outline:
    """Return what is known of a zoo model or a folder; of other sources, the name."""
    name = source or DEFAULT
    folder = local_folder(name)
    short = name
    if folder is not None and name not in ZOO:
        short = folder.resolve().name
    elif os.sep in name:
        short = Path(name).name
    bare = Outline(short)
    if folder is None:
        return bare
    try:
        check_files(folder)
        config = read_json(folder / "config.json")
        dtype, parameters, _ = weight_totals(weight_files(folder, config))
        depth = _depth(config)
    except (Error, OSError, TypeError):
        # Loading the model will report what is wrong with it.
        return bare
    headless = False
    match config.get("architectures"):
        case [str(name)]:
            headless = HEADLESS.fullmatch(name) is not None
    heads = max(_counts(config, HEADS), default=None)
    return Outline(short, depth, parameters or None, dtype, headless, heads)


def check_sites(model: Outline, patterns: str) -> None:
    """Refuse a layer above the last one of a model, where its depth is known.

    >>> check_sites(Outline("t5", 9), "layer.3,layer.20")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No site 'layer.20' in t5: it has layer.0 to
    layer.9 and final. The last is 'layer.9'.
    """
    if model.layers is None:
        return
    known = [Site(layer) for layer in range(model.layers + 1)]
    for item in patterns.split(","):
        numbered = LAYER.fullmatch(item.strip())
        if numbered and int(numbered[1]) > model.layers:
            select(item, [*known, Site(None)], owner=model.name)


def check_attention(model: Outline, layers: str | None, heads: str | None) -> None:
    """Refuse layers and heads above the last ones of a model, where they are known.

    >>> check_attention(Outline("gpt2", 12, heads=12), "2-4,-1", "7,12")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No head 12 in gpt2: an attention has 12 heads, counted
    from 0. Choose others.
    """
    for number in re.findall("[0-9]+", layers or ""):
        check_sites(model, f"layer.{number}")
    for number in re.findall("[0-9]+", heads or ""):
        if model.layers and model.heads and int(number) >= model.heads:
            raise SiteError(
                f"No head {number} in {model.name}",
                f"an attention has {model.heads} heads, counted from 0",
                "Choose others.",
            )


def in_short(count: int) -> str:
    """Return a count of parameters as people write it.

    >>> in_short(134_515_008), in_short(1_540_000_000), in_short(22_714)
    ('135M', '1.5B', '23K')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size * 0.9995:
            digits = int(unit == "B" and count < 9.95 * size)
            return f"{count / size:.{digits}f}{unit}"
    return str(count)


def local_folder(name: str) -> Path | None:
    """Return the folder of a zoo model or a path; None if it is not on this machine."""
    if name in ZOO:
        path = ZOO[name].folder
        exists = is_complete(path)
    else:
        path = Path(name).expanduser()
        exists = os.path.isdir(path)
    return path if exists else None


def _depth(config: dict[str, Any]) -> int | None:
    """Return the depth of a model if the config counts all blocks of one stack."""
    if config.get("is_encoder_decoder") or "auto_map" in config:
        return None
    if config.get("model_type") in OTHER_DEPTHS:
        return None
    for part in config.values():
        # A nested config with a depth of its own: the model has several stacks.
        if isinstance(part, dict) and _counts(part, DEPTHS):
            return None
    depths = _counts(config, DEPTHS)
    return depths.pop() if len(depths) == 1 else None


def _counts(config: dict[str, Any], keys: Sequence[str]) -> set[int]:
    values = [config.get(key) for key in keys]
    return {value for value in values if isinstance(value, int) and value > 0}

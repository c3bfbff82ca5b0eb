"""What a checkpoint says of itself, before its weights are read: how deep and how large
it is, and in which dtype.

It serves to say at once what is being loaded, and to refuse at once a layer that is not
there. It is read from the config and from the headers of the weight files, in a few
milliseconds. What is not known for certain is None, and nothing is refused for that:
the model itself is asked when it is loaded.
"""

import json
import os
import re
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from hiddenscope.loading.cache import is_complete
from hiddenscope.loading.folder import INDEX, WEIGHTS
from hiddenscope.loading.zoo import DEFAULT, ZOO
from hiddenscope.sites import Site, select

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
# Types whose blocks are more than the config counts.
OTHER_DEPTHS = {
    "canine",
    "funnel",
    "hrm_text",
}
# The base classes of transformers, by name.
HEADLESS = re.compile(r"[A-Z]\w*(?<!LMHead)(?<!DoubleHeads)(?<!MT)Model")
LAYER = re.compile(r"layer\.([0-9]{1,6})(?:\.\w+)?")
LARGEST_CONFIG, LARGEST_HEADER = 16 * 2**20, 100 * 2**20
STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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

    def described(self, dtype: str | None = None) -> str:
        """The name, the size, and the dtype that was asked for, or else the one that it
        is stored in.
        """
        known = [
            in_short(self.parameters) if self.parameters else None,
            dtype or self.dtype,
        ]
        return (
            f"{self.name} ({', '.join(filter(None, known))})"
            if any(known)
            else self.name
        )


def outline(source: str | None) -> Outline:
    """What is known of a model: a zoo name, a folder; of a hub id or a GGUF file, the
    name.
    """
    name = source or DEFAULT
    folder = _folder(name)
    short = folder.resolve().name if folder is not None and name not in ZOO else name
    bare = Outline(short if os.sep not in short else Path(short).name)
    if folder is None:
        return bare
    try:
        return _with_weights(_with_config(bare, folder), folder)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return bare  # whatever is wrong with it is said when it is loaded


def check_sites(model: Outline, patterns: str) -> None:
    """Refuse a layer above the last one of a model, where its depth is known.

    >>> check_sites(Outline("t5", 9), "layer.3,layer.20")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No site 'layer.20' in t5: it has layer.0 to layer.9 and final. Did you mean 'layer.2'?
    """
    if model.layers is None:
        return
    known = [Site(layer) for layer in range(model.layers + 1)]
    for item in patterns.split(","):
        numbered = LAYER.fullmatch(item.strip())
        if numbered and int(numbered[1]) > model.layers:
            select(item, [*known, Site(None)], owner=model.name)


def in_short(count: int) -> str:
    """A count of parameters as people say it.

    >>> in_short(134_515_008), in_short(1_540_000_000), in_short(22_714)
    ('135M', '1.5B', '23K')
    """
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size * 0.9995:
            return (
                f"{count / size:.1f}{unit}"
                if count < 9.95 * size and unit == "B"
                else f"{count / size:.0f}{unit}"
            )
    return str(count)


def _folder(name: str) -> Path | None:
    if name in ZOO:
        return ZOO[name].folder if is_complete(ZOO[name].folder) else None
    path = Path(name).expanduser()
    return path if os.path.isdir(path) else None


def _with_config(bare: Outline, folder: Path) -> Outline:
    path = folder / "config.json"
    if not path.is_file() or path.stat().st_size > LARGEST_CONFIG:
        return bare
    config = json.loads(path.read_text("utf-8"))
    classes = config.get("architectures")
    headless = (
        isinstance(classes, list)
        and len(classes) == 1
        and HEADLESS.fullmatch(str(classes[0])) is not None
    )
    return replace(bare, layers=_depth(config), headless=headless)


def _depth(config: dict[str, Any]) -> int | None:
    """The depth of a model with one stack of blocks, all of which the config counts."""
    stacked = config.get("is_encoder_decoder") or any(
        isinstance(part, dict) and _depths(part) for part in config.values()
    )
    depths = _depths(config)
    if (
        stacked
        or len(depths) != 1
        or config.get("model_type") in OTHER_DEPTHS
        or "auto_map" in config
    ):
        return None
    return depths.pop()


def _depths(config: dict[str, Any]) -> set[int]:
    return {
        config[key]
        for key in DEPTHS
        if isinstance(config.get(key), int) and config[key] > 0
    }


def _with_weights(known: Outline, folder: Path) -> Outline:
    files = [folder / WEIGHTS]
    if not files[0].is_file():
        index = folder / INDEX
        if not index.is_file() or index.stat().st_size > LARGEST_HEADER:
            return known
        files = [
            folder / Path(str(name)).name
            for name in set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        ]
    counts: dict[str, int] = {}
    for file in files:
        for tensor in _header(file).values():
            counts[tensor["dtype"]] = counts.get(tensor["dtype"], 0) + prod(
                tensor["shape"]
            )
    floats = {dtype: count for dtype, count in counts.items() if dtype in STORED}
    dtype = STORED[max(floats, key=lambda name: floats[name])] if floats else None
    return replace(known, parameters=sum(counts.values()) or None, dtype=dtype)


def _header(file: Path) -> dict[str, Any]:
    """The tensors of a safetensors file: a length, and then JSON."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if size > LARGEST_HEADER:
            raise ValueError("its header is too long")
        header: dict[str, Any] = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    return header

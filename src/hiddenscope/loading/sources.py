"""Which kind of source is this? A live pair, a zoo name, a GGUF file, a folder, or a hub id, in that order."""

from __future__ import annotations

import hashlib
import os
import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope import progress
from hiddenscope.errors import FileError, LoadError, UnknownModel, Unsafe
from hiddenscope.loading import zoo
from hiddenscope.loading.cache import cache_folder, finished, settle
from hiddenscope.loading.checkpoint import Loaded, Wanted, load_folder
from hiddenscope.loading.folder import PICKLES, check_folder
from hiddenscope.loading.gguf import convert, read_header
from hiddenscope.loading.hub import hub_folder

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    Source = str | os.PathLike[str] | tuple[nn.Module, PreTrainedTokenizerBase | None] | None

_CHUNK = 2**22


def open_source(
    source: Source = None,
    *,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Loaded:
    """A module and its tokenizer, from a zoo name, a hub id, a folder, a GGUF file or a live pair.

    >>> import torch
    >>> open_source((torch.nn.Linear(2, 2), None)).name
    'Linear'
    """
    if isinstance(source, tuple) or not isinstance(source, (str, os.PathLike, type(None))):
        given = {"task": task, "dtype": dtype, "device": device, "attention": attention, "revision": revision}
        return _live(source, [name for name, value in given.items() if value is not None])
    wanted = Wanted(task, dtype, device, attention)
    if source is None or (isinstance(source, str) and source in zoo.ZOO):
        name = source or zoo.DEFAULT
        _no_revision(name, revision)
        return _load(zoo.zoo_folder(str(name)), str(name), zoo.ZOO[str(name)].revision, wanted)
    path = _local_path(source)
    if path is None:
        folder, commit, note = hub_folder(str(source), revision)
        return _load(folder, str(source), commit, wanted, note)
    _no_revision(str(source), revision)
    if path.suffix.lower() == ".gguf":
        folder, digest = _gguf_folder(path)
        return _load(folder, path.name, f"sha256:{digest}", wanted)
    return _load(path, path.resolve().name, None, wanted)


def _load(path: Path, name: str, revision: str | None, wanted: Wanted, *notes: str) -> Loaded:
    module, tokenizer, chosen = load_folder(check_folder(path), wanted)
    return Loaded(module, tokenizer, name, revision, (*(note for note in notes if note), *chosen), path)


def _live(source: Any, given: list[str]) -> Loaded:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    problem = "Cannot take the live pair"
    if not isinstance(source, tuple) or len(source) != 2 or not isinstance(source[0], nn.Module):
        reason = f"a {type(source).__name__} is no name, no path and no (module, tokenizer)"
        raise LoadError(problem, reason, "Pass (module, tokenizer), or (module, None).")
    module, tokenizer = source
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        reason = f"its second part is a {type(tokenizer).__name__} and no tokenizer of transformers"
        raise LoadError(problem, reason, "Pass (module, tokenizer), or (module, None).")
    if given:
        reason = f"{', '.join(given)} would change your module, which is used as it is"
        raise LoadError(problem, reason, "Change it before you pass it.")
    return Loaded(module, tokenizer, type(module).__name__, None, ())


def _local_path(source: str | os.PathLike[str]) -> Path | None:
    """The path that a source is, or None where it can only be a hub id."""
    text = os.fspath(source)
    if not text.isprintable() or not text.strip():
        raise Unsafe(f"Cannot load {text[:80]!r}", "it has characters that no name has", "Name a model or a folder.")
    path = Path(text).expanduser()
    written_as_path = isinstance(source, os.PathLike) or text.startswith((".", "/", "~")) or path.is_absolute()
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if path.is_file():
        if path.suffix in PICKLES:
            reason, remedy = (
                "it is a pickle, and unpickling can run code",
                "Save it as safetensors, and load the folder.",
            )
            raise Unsafe(f"Cannot load {text}", reason, remedy)
        raise UnknownModel(f"Cannot load {text}", "it is a file and not .gguf", f"Load its folder: {path.parent}.")
    if written_as_path or path.suffix.lower() == ".gguf":
        raise UnknownModel(f"No model at {text[:200]}", "there is no such folder or file", "Check the path.")
    if close := get_close_matches(text.lower(), zoo.ZOO, n=1, cutoff=0.8):
        raise UnknownModel(f"No model {text!r}", f"the zoo has {', '.join(zoo.ZOO)}", f"Did you mean {close[0]!r}?")
    return None


def _gguf_folder(path: Path) -> tuple[Path, str]:
    """The converted folder of a GGUF file, found again by the file's content, and that content's SHA-256."""
    header = read_header(path)
    digest = _sha256(path)
    place = cache_folder() / "gguf" / digest[:32]
    if not finished(place):
        needed = 4 * header.elements
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
        if needed > free:
            reason = f"in float32 it takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free in {place.parent}"
            raise FileError(
                f"Cannot convert {path.name}", reason, "Set HIDDENSCOPE_CACHE to a folder on a larger disk."
            )
        settle(place, lambda part: convert(path, part))
    return place, digest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file, progress.track(f"Reading {path.name}", path.stat().st_size, unit="bytes") as advance:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        reason = "only a model on the hub has revisions"
        raise LoadError(f"Cannot load revision {revision!r} of {name}", reason, "Leave revision out.")

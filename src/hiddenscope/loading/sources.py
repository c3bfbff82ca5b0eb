"""Where a model comes from: a live pair, a zoo name, a GGUF file, a folder, or a hub
id, tried in that order.

Of a hub repository only the files that will be read are downloaded, and the local cache
serves when the hub cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope import progress
from hiddenscope.errors import FileError, LoadError, UnknownModel, Unreachable, Unsafe
from hiddenscope.loading import zoo
from hiddenscope.loading.cache import (
    build_once,
    cache_folder,
    is_complete,
    make_parent,
    verify,
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
from hiddenscope.texts import FORMATS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    Source = (
        str | os.PathLike[str] | tuple[nn.Module, PreTrainedTokenizerBase | None] | None
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
    device: str | torch.device | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Loaded:
    """A module and its tokenizer, from a zoo name, a hub id, a folder, a GGUF file or a
    live pair.

    >>> import torch
    >>> open_source((torch.nn.Linear(2, 2), None)).name
    'Linear'
    """
    if isinstance(source, tuple) or not isinstance(
        source, (str, os.PathLike, type(None))
    ):
        given = {
            "task": task,
            "dtype": dtype,
            "device": device,
            "attention": attention,
            "revision": revision,
        }
        return _live(
            source, [name for name, value in given.items() if value is not None]
        )
    options = LoadOptions(task, dtype, device, attention)
    if source is None or (isinstance(source, str) and source in zoo.ZOO):
        name = str(source or zoo.DEFAULT)
        _refuse_revision(name, revision)
        return _load(zoo.zoo_folder(name), name, zoo.ZOO[name].revision, options)
    path = _local_path(source)
    if path is None:
        folder, commit, note = _hub_folder(str(source), revision)
        return _load(folder, str(source), commit, options, note)
    _refuse_revision(str(source), revision)
    if path.suffix.lower() == ".gguf":
        folder, digest = _gguf_folder(path)
        return _load(folder, path.name, f"sha256:{digest}", options)
    return _load(path, path.resolve().name, None, options)


def _load(
    path: Path, name: str, revision: str | None, options: LoadOptions, note: str = ""
) -> Loaded:
    verify(path)
    folder = check_folder(path)
    module, choices = load_folder(folder, options)
    notes = (*([note] if note else []), *choices)
    sentences = (
        zoo.ZOO[name].sentences
        if name in zoo.ZOO and path == zoo.ZOO[name].folder
        else sentence_modules(path)
    )
    return Loaded(
        module, lambda: load_tokenizer(folder), name, revision, notes, path, sentences
    )


def _live(source: Any, options: list[str]) -> Loaded:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    problem, remedy = (
        "Cannot use this live model",
        "Pass (module, tokenizer), or (module, None).",
    )
    if (
        not isinstance(source, tuple)
        or len(source) != 2
        or not isinstance(source[0], nn.Module)
    ):
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
    """The path that a source is, or None where it can only be a hub id."""
    text = os.fspath(source)
    if not text.isprintable() or not text.strip():
        reason = "it is empty or has characters that cannot be printed"
        raise Unsafe(f"Cannot load {text[:80]!r}", reason, "Name a model or a folder.")
    path = Path(text).expanduser()
    written_as_path = (
        isinstance(source, os.PathLike)
        or text.startswith((".", "/", "~"))
        or path.is_absolute()
    )
    # Those of os.path are False, where those of Path raise, if a name is too long or a
    # folder may not be looked into.
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
    if written_as_path or path.suffix.lower() == ".gguf":
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
    """The converted folder of a GGUF file, found again by the file's content, and that
    content's SHA-256.
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
    with (
        path.open("rb") as file,
        progress.track(
            f"Reading {path.name}", path.stat().st_size, unit="bytes"
        ) as advance,
    ):
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _hub_folder(name: str, revision: str | None) -> tuple[Path, str, str]:
    """The local folder of a hub id, its commit, and a note if the hub could not be
    reached.
    """
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
        no_model = isinstance(error, RepositoryNotFoundError)
        reason = (
            "the hub has no such model"
            if no_model
            else f"it has no revision {revision!r}"
        )
        remedy = "Check the spelling; a private one needs `hf auth login`."
        raise UnknownModel(f"No model {name!r}", reason, remedy) from error
    except LoadError:
        raise
    except Exception as error:
        # The hub's client raises the errors of whatever HTTP library it is built on.
        return _from_hub_cache(name, revision, error)


def _check_id(what: str, name: str, text: str, pattern: re.Pattern[str]) -> None:
    """Refuse an id or a revision that is really a path."""
    tricky = (
        any(trick in text for trick in ("..", "\\", "//"))
        or text.startswith(("/", "~"))
        or not text.isprintable()
    )
    if tricky:
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

    every = {sibling.rfilename for sibling in info.siblings or ()}
    files = {file for file in every if "/" not in file}
    needed = {file for file in files if file.endswith(_SMALL)} | set(
        filter(_MODULE_CONFIG.fullmatch, every)
    )
    if WEIGHTS in files:
        needed.add(WEIGHTS)
    elif INDEX in files:
        index = json.loads(
            Path(hf_hub_download(name, INDEX, revision=info.sha)).read_text(
                encoding="utf-8"
            )
        )
        needed |= files & {str(shard) for shard in index.get("weight_map", {}).values()}
    else:
        raise _no_weights(name, sorted(files))
    return Path(
        snapshot_download(name, revision=info.sha, allow_patterns=sorted(needed))
    )


def _from_hub_cache(
    name: str, revision: str | None, error: Exception
) -> tuple[Path, str, str]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as absent:
        raise Unreachable(
            f"Cannot download {name!r}",
            f"the hub cannot be reached ({type(error).__name__}: {error}"[:200]
            + ") and it is not in the local cache",
            "Check the network, or name a local folder, a .gguf file, or a zoo model"
            " (smollm2, gemma3-270m, minilm), which comes from a package index.",
        ) from absent
    return (
        folder,
        folder.name,
        "The hub could not be reached: the copy in the local cache was used.",
    )


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

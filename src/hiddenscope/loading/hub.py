"""A hub id made into a folder: only files that will be read are fetched; the cache serves when the hub cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hiddenscope.errors import LoadError, UnknownModel, Unreachable, Unsafe
from hiddenscope.loading.folder import INDEX, PICKLES, WEIGHTS

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./+-]*")
_SMALL = (".json", ".txt", ".model", ".jinja", ".vocab", ".codes")
_SECONDS = 10.0


def check_id(name: str, revision: str | None) -> None:
    """Refuse an id or a revision that is a path in disguise.

    >>> check_id("openai-community/gpt2", "main")
    """
    for what, text, pattern in (("id", name, _ID), ("revision", revision or "main", _REVISION)):
        tricky = (
            any(trick in text for trick in ("..", "\\", "//")) or text.startswith(("/", "~")) or not text.isprintable()
        )
        if tricky:
            raise Unsafe(f"Cannot load {name[:80]!r}", f"its {what} is a path in disguise", "Use owner/name.")
        if not pattern.fullmatch(text) or len(text) > 96:
            reason = f"there is no folder of that name, and it is no {what} on the hub, which would be owner/name"
            raise UnknownModel(f"No model {name[:80]!r}", reason, "Check the spelling.")


def hub_folder(name: str, revision: str | None) -> tuple[Path, str, str]:
    """The local folder of a hub id, its commit, and a note on whether the hub was asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    check_id(name, revision)
    try:
        info = HfApi().model_info(name, revision=revision, timeout=_SECONDS)
        folder = _download(name, info)
    except GatedRepoError as error:
        remedy = "Accept its terms on the hub, log in with `hf auth login`, and try again."
        raise Unreachable(f"Cannot fetch {name!r}", "its owner gives it only to those who ask", remedy) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        what = (
            "the hub has no such model" if isinstance(error, RepositoryNotFoundError) else f"no revision {revision!r}"
        )
        raise UnknownModel(
            f"No model {name!r}", what, "Check the spelling; a private one needs `hf auth login`."
        ) from error
    except LoadError:
        raise
    except Exception as error:
        # The hub's client raises the errors of whatever HTTP library it is built on.
        return _from_cache(name, revision, error)
    return folder, str(info.sha), ""


def _download(name: str, info: Any) -> Path:
    from huggingface_hub import hf_hub_download, snapshot_download

    files = {sibling.rfilename for sibling in info.siblings or () if "/" not in sibling.rfilename}
    wanted = {file for file in files if file.endswith(_SMALL)}
    if WEIGHTS in files:
        wanted.add(WEIGHTS)
    elif INDEX in files:
        index = json.loads(Path(hf_hub_download(name, INDEX, revision=info.sha)).read_text(encoding="utf-8"))
        wanted |= files & {str(shard) for shard in index.get("weight_map", {}).values()}
    else:
        raise _no_weights(name, sorted(files))
    return Path(snapshot_download(name, revision=info.sha, allow_patterns=sorted(wanted)))


def _from_cache(name: str, revision: str | None, error: Exception) -> tuple[Path, str, str]:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception as absent:
        raise Unreachable(
            f"Cannot fetch {name!r}",
            f"it cannot be had from the hub ({type(error).__name__}: {error}"[:200] + ") and is not in the local cache",
            "Check the network, or name a local folder, a .gguf file, or a zoo model (smollm2, gemma3-270m, minilm), "
            "which comes from a package index.",
        ) from absent
    return folder, folder.name, "The hub could not be reached: the copy in the local cache was used."


def _no_weights(name: str, files: list[str]) -> LoadError:
    pickles = [file for file in files if file.endswith(PICKLES)]
    if pickles:
        reason = f"its weights are in {pickles[0]} and not in safetensors; unpickling can run code"
        remedy = "If you trust it, load it with transformers, save_pretrained() it to a folder, and load that folder."
        return Unsafe(f"Cannot load {name!r}", reason, remedy)
    remedy = "Name the repository that holds the safetensors, or a local .gguf file."
    return UnknownModel(f"Cannot load {name!r}", "the hub has no safetensors of it", remedy)

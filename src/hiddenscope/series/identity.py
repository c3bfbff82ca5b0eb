"""What decides the numbers of a member: its weights, and everything else.

Both are found before the model runs, and of a folder before it is loaded: published
checkpoints are known to hold the same weights under two names. Of files the tensors are
hashed and not the bytes: the same weights in other shards, in another order or with
another header have the same hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from hiddenscope import progress
from hiddenscope.errors import Damaged
from hiddenscope.extract.planning import tokenizer_identity
from hiddenscope.files import identity
from hiddenscope.loading.adapters import check_adapter, is_adapter
from hiddenscope.loading.folder import (
    TOKENIZER_FILES,
    check_folder,
    read_json,
    stored_tensors,
    weight_files,
)
from hiddenscope.loading.sources import adapter_path, locate
from hiddenscope.loading.variants import Adapted, Quantised
from hiddenscope.model import Model
from hiddenscope.model.model import adapter_sources
from hiddenscope.modules.hooks import foreign_hooks
from hiddenscope.modules.weights import Fingerprint
from hiddenscope.series.member import Member

# Of a config, what names a file or a library and decides no number.
UNDECIDING = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}


@dataclass(frozen=True)
class MemberIdentity:
    """The hash of a member's weights, and all else that decides its numbers.

    `name` is the model's own, as its results carry it. Two members with the same
    identity give the same numbers; two with the same `weights` alone need not: they may
    differ in dtype, config or tokenizer.
    """

    name: str
    weights: str
    others: str
    # The weight files, and their times and sizes when they were hashed.
    files: tuple[Path, ...] = ()
    stamp: str = ""

    def require_unchanged(self) -> None:
        """Raise Damaged if a weight file was replaced since it was hashed."""
        if self.files and identity(list(self.files)) != self.stamp:
            raise Damaged(
                f"Cannot use {self.name} in a series",
                "its files were changed while the series ran",
                "Ask again; nothing of it was kept.",
            )

    @property
    def key(self) -> str:
        """Return one hash of both."""
        return hash_of([self.weights, self.others])


def identify(member: Member) -> MemberIdentity:
    """Hash the weights of a member, and what else decides its numbers."""
    identified = _identify(member.source, member.revision)
    others = hash_of([identified.others, member.dtype, member.device])
    return replace(identified, others=others)


def hash_of(value: Any) -> str:
    """Return the hash of a plain value.

    >>> hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _identify(source: Any, revision: str | None = None) -> MemberIdentity:
    if isinstance(source, Model):
        return _of_module(source.module, source.tokenizer, source.name)
    if isinstance(source, nn.Module):
        source = (source, None)
    if isinstance(source, tuple):
        module, tokenizer = source
        return _of_module(module, tokenizer, type(module).__name__)
    if isinstance(source, Quantised):
        base = _identify(source.base, revision)
        weights = f"sha256:{hash_of([base.weights, source.scheme])}"
        return replace(base, weights=weights)
    if isinstance(source, str | os.PathLike) and is_adapter(Path(source)):
        source = Adapted(None, source)
    if isinstance(source, Adapted):
        return _of_adapted(source, revision)
    located = locate(source, revision)
    config = check_folder(located.folder).config
    files = weight_files(located.folder, config)
    others = [_deciding(config), _tokenizer_files(located.folder)]
    # Before they are read, so that a later change shows.
    stamp = identity(files)
    weights = hash_tensors(files)
    return MemberIdentity(located.name, weights, hash_of(others), tuple(files), stamp)


def _of_adapted(source: Adapted, revision: str | None) -> MemberIdentity:
    folders = [check_adapter(adapter_path(path)) for path in source.folders]
    base = _identify(source.base or folders[0].base, revision)
    weights: list[Any] = [base.weights, float(source.strength), source.merged]
    configs = []
    files = list(base.files)
    for folder in folders:
        tensors = sorted(folder.path.glob("*.safetensors"))
        weights.append(hash_tensors(tensors))
        configs.append(_deciding(folder.config))
        files += [*tensors, *folder.path.glob("*.json")]
    return MemberIdentity(
        base.name,
        f"sha256:{hash_of(weights)}",
        hash_of([base.others, configs]),
        tuple(files),
        identity(files),
    )


def _tokenizer_files(folder: Path) -> dict[str, Any]:
    """Return the hashes of the files of a tokenizer, or their content, by name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.name == "tokenizer_config.json":
            files[path.name] = _deciding(read_json(path))
        elif path.name in TOKENIZER_FILES or path.suffix == ".model":
            files[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return files


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a config that may decide a number."""
    return {key: value for key, value in config.items() if key not in UNDECIDING}


def _of_module(module: nn.Module, tokenizer: Any, name: str) -> MemberIdentity:
    weights = Fingerprint(module).value
    if weights.startswith("partial-"):
        # Weights that are kept elsewhere are not hashed, so nothing can be said of
        # them: this identity is like no other.
        weights = f"unknown:{secrets.token_hex(16)}"
    _, adapters = adapter_sources(module, {})
    config: Any = getattr(module, "config", None)
    entries: Any = None
    if config is not None:
        entries = _deciding(json.loads(config.to_json_string(use_diff=False)))
    weight = next(module.parameters(), None)
    others = [
        type(module).__name__,
        entries,
        getattr(config, "_attn_implementation", None),
        None if weight is None else [str(weight.dtype), str(weight.device)],
        module.training,
        tokenizer_identity(tokenizer),
        [asdict(adapter) for adapter in adapters],
        # What somebody's hooks do cannot be hashed: such a module is like no other.
        secrets.token_hex(16) if any(map(foreign_hooks, module.modules())) else "",
    ]
    return MemberIdentity(name, weights, hash_of(others))


def hash_tensors(paths: Sequence[Path]) -> str:
    """Return the hash of all tensors of some safetensors files.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> a, b = torch.ones(2), torch.zeros(3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     whole, first, second = (Path(folder, name) for name in "wfs")
    ...     save_file({"a": a, "b": b}, whole, {"step": "1000"})
    ...     save_file({"b": b}, first)
    ...     save_file({"a": a}, second)
    ...     hash_tensors([whole]) == hash_tensors([first, second])
    True
    """
    digests = []
    total = sum(path.stat().st_size for path in paths)
    with progress.track("Hashing weights", total=total, unit="bytes") as advance:
        for path in paths:
            tensors = stored_tensors(path)
            with safe_open(path, framework="pt") as file:
                for name, (dtype, shape) in tensors.items():
                    digest = hashlib.sha256(f"{name} {dtype} {shape}".encode())
                    content = file.get_tensor(name).reshape(-1).view(torch.uint8)
                    digest.update(content.numpy())
                    digests.append((name, digest.digest()))
                    advance(len(content))
    whole = b"".join(digest for _, digest in sorted(digests))
    return f"sha256:{hashlib.sha256(whole).hexdigest()}"

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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from hiddenscope import progress
from hiddenscope.errors import Damaged
from hiddenscope.files import identity
from hiddenscope.loading.adapters import check_adapter, is_adapter
from hiddenscope.loading.folder import INDEX, TOKENIZER_FILES, WEIGHTS, check_folder
from hiddenscope.loading.sources import adapter_path, locate
from hiddenscope.loading.variants import Adapted, Quantised
from hiddenscope.model import Model
from hiddenscope.model.model import adapter_sources
from hiddenscope.modules import hooks
from hiddenscope.modules.weights import Fingerprint
from hiddenscope.series.member import Member

# Of a config, what names a file or a library and decides no number.
UNDECIDING = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
# Bytes of a file that are held at a time.
PIECE = 2**22
LONGEST_HEADER = 100 * 2**20


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
    others = [identified.others, member.dtype, member.device]
    return replace(identified, others=hash_of(others))


def hash_of(value: Any) -> str:
    """Return the hash of a plain value.

    >>> hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _identify(source: Any, revision: str | None = None) -> MemberIdentity:
    if isinstance(source, Quantised):
        base = _identify(source.base, revision)
        weights = f"sha256:{hash_of([base.weights, source.scheme])}"
        return replace(base, weights=weights)
    if isinstance(source, Adapted):
        return _of_adapted(source, revision)
    if isinstance(source, Model):
        return _of_module(source.module, source.tokenizer, source.name)
    if isinstance(source, nn.Module):
        source = (source, None)
    if isinstance(source, tuple):
        module, tokenizer = source
        return _of_module(module, tokenizer, type(module).__name__)
    return _of_folder(source, revision)


def _of_adapted(source: Adapted, revision: str | None) -> MemberIdentity:
    folders = []
    for path in source.folders:
        folders.append(check_adapter(adapter_path(path)))
    base = _identify(source.base or folders[0].base, revision)
    parts: list[Any] = [base.weights, float(source.strength), source.merged]
    configs = []
    for folder in folders:
        parts.append(hash_tensors(sorted(folder.path.glob("*.safetensors"))))
        configs.append(_deciding(folder.config))
    files = list(base.files)
    for folder in folders:
        files += [*folder.path.glob("*.safetensors"), *folder.path.glob("*.json")]
    return MemberIdentity(
        base.name,
        f"sha256:{hash_of(parts)}",
        hash_of([base.others, configs]),
        tuple(files),
        identity(files),
    )


def _of_folder(
    source: str | os.PathLike[str] | None, revision: str | None
) -> MemberIdentity:
    if source is not None and is_adapter(Path(source)):
        return _of_adapted(Adapted(None, source), revision)
    located = locate(source, revision)
    folder = located.folder
    config = check_folder(folder).config
    files = [folder / WEIGHTS]
    if not files[0].is_file():
        index = json.loads((folder / INDEX).read_text("utf-8"))
        names = sorted(set(index["weight_map"].values()))
        files = [folder / name for name in names]
    others = [_deciding(config), _tokenizer_files(folder)]
    # Before they are read, so that a later change shows.
    stamp = identity(files)
    weights = hash_tensors(files)
    return MemberIdentity(located.name, weights, hash_of(others), tuple(files), stamp)


def _tokenizer_files(folder: Path) -> dict[str, Any]:
    """Return the content of the files of a tokenizer, or their hashes, by name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.name == "tokenizer_config.json":
            try:
                content = json.loads(path.read_text("utf-8"))
            except (OSError, ValueError) as error:
                raise Damaged(
                    f"Cannot read {path.name}",
                    "it is missing, or it is not JSON",
                    "Save or download the model again.",
                ) from error
            files[path.name] = _deciding(content) if isinstance(content, dict) else {}
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
    parts = module.modules()
    others = [
        type(module).__name__,
        entries,
        getattr(config, "_attn_implementation", None),
        None if weight is None else [str(weight.dtype), str(weight.device)],
        module.training,
        _live_tokenizer(tokenizer),
        [asdict(adapter) for adapter in adapters],
        # What somebody's hooks do cannot be hashed: such a module is like no other.
        secrets.token_hex(16) if any(map(hooks.foreign_hooks, parts)) else "",
    ]
    return MemberIdentity(name, weights, hash_of(others))


def _live_tokenizer(tokenizer: Any) -> str | None:
    """Return the hash of a tokenizer in memory; None without one."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return hash_of([type(tokenizer).__name__, backend.to_str()])
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hash_of([type(tokenizer).__name__, vocabulary])


class StoredTensor(NamedTuple):
    """One tensor of a safetensors file: its name, what it is, and where it lies."""

    name: str
    kind: str
    path: Path
    start: int
    stop: int


def hash_tensors(paths: Iterable[Path]) -> str:
    """Return the hash of all tensors of some safetensors files.

    >>> import tempfile, torch
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
    tensors: list[StoredTensor] = []
    for path in paths:
        tensors += _tensors_of(path)
    total = sum(tensor.stop - tensor.start for tensor in tensors)
    hashed = hashlib.sha256()
    with progress.track("Hashing weights", total=total, unit="bytes") as advance:
        for tensor in sorted(tensors):
            digest = hashlib.sha256(f"{tensor.name} {tensor.kind}".encode())
            for piece in _pieces(tensor):
                digest.update(piece)
                advance(len(piece))
            hashed.update(digest.digest())
    return f"sha256:{hashed.hexdigest()}"


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    """Read the table of a safetensors file: its length in 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > LONGEST_HEADER:
                raise ValueError("its header is too long")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, stop = tensor["data_offsets"]
            kind = f"{tensor['dtype']} {tensor['shape']}"
            yield StoredTensor(name, kind, path, 8 + length + start, 8 + length + stop)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(
            f"Cannot read {path.name}",
            "it is not a whole safetensors file",
            "Save or download the model again.",
        ) from error


def _pieces(tensor: StoredTensor) -> Iterator[bytes]:
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        missing = tensor.stop - tensor.start
        while missing > 0:
            piece = file.read(min(PIECE, missing))
            if not piece:
                raise Damaged(
                    f"Cannot read {tensor.path.name}",
                    f"it ends within the tensor {tensor.name[:80]!r}",
                    "Save or download the model again.",
                )
            missing -= len(piece)
            yield piece

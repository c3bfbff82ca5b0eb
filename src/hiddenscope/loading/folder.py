"""What a folder with a checkpoint holds, checked before any library loads it.

Weights are read from safetensors alone, and no code comes with them: a pickle, an
`auto_map`, an attention kernel that would be downloaded, a weight file outside the
folder are refused here, by name. So are devices, pipes and files that are far too
large, which a library would open and read without end.
"""

import importlib.util
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from hiddenscope.errors import Damaged, UnknownModel, Unsafe
from hiddenscope.loading.limits import WeightTotals, check_counts, walk

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".msgpack", ".h5")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tekken.json",
)
_BYTES_OF = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# The largest files of their kind that may be read. The largest tokenizers of today have
# some 60 MB.
_LARGEST = {INDEX: 64 * 2**20, "tokenizer.json": 2**28, "vocab.json": 2**28}
_LARGEST_JSON, _LARGEST_OTHER = 16 * 2**20, 2**28
_LARGEST_TEMPLATES = 16 * 2**20  # all of them together
# The one folder below in which transformers reads by itself.
TEMPLATES = "additional_chat_templates"
_READ = (".json", ".txt", ".model", ".jinja", ".vocab", ".codes", ".safetensors")
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
_DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "decoder_layers",
)
# What transformers itself implements, for attention and for experts; any other name may
# be a kernel on the hub.
OWN_KERNELS = {
    "attn_implementation": ("eager", "sdpa", "flex_attention", "paged|eager"),
    "experts_implementation": ("eager", "batched_mm", "grouped_mm"),
}
# The packages that have these; without them transformers downloads a kernel, if the
# package `kernels` is there.
_FLASH_PACKAGES = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}


@dataclass(frozen=True)
class Folder:
    """A checkpoint that may be loaded: its path, its config, the dtype of its weights,
    and whether it has a tokenizer.

    `dtype` is as safetensors names it, "BF16", of whichever floating dtype most bytes
    are in. `remote_code` says where the folder names code of its own, which is never
    run. `held` is what its weight files hold.
    """

    path: Path
    config: dict[str, Any]
    dtype: str | None
    has_tokenizer: bool
    remote_code: tuple[str, ...]
    held: WeightTotals = field(default_factory=WeightTotals)


def check_folder(path: Path) -> Folder:
    """Check everything that can be checked before a library reads the folder."""
    if not path.is_dir():
        raise UnknownModel(f"No folder {path}", "it does not exist", "Check the path.")
    if not any(path.iterdir()):
        raise Damaged(
            f"Cannot load {path}",
            "the folder is empty",
            "Save or download the model again.",
        )
    check_files(path)
    config = _read_config(path)
    dtype, held = _check_weights(path, config)
    check_counts(walk(config), held, f"{path / 'config.json'}")
    tokenizer: dict[str, Any] = {}
    tokenizer_config = path / "tokenizer_config.json"
    if tokenizer_config.exists():
        tokenizer = read_json(tokenizer_config)
    check_counts(walk(tokenizer), held, str(tokenizer_config))
    has_tokenizer = any((path / name).exists() for name in TOKENIZER_FILES)
    if not has_tokenizer:
        has_tokenizer = any(path.glob("*.model"))
    remote_code = (
        *_remote_code("config.json", config),
        *_remote_code("tokenizer_config.json", tokenizer),
    )
    return Folder(path, config, dtype, has_tokenizer, remote_code, held)


def check_files(path: Path) -> None:
    """Refuse files that are too large for their kind, and what is not a file.

    Reading a pipe waits forever, and reading a device never ends. Links are followed,
    because a hub's cache consists of them.
    """
    with os.scandir(path) as entries:
        for entry in entries:
            _check_file(path, entry)
    if (path / TEMPLATES).is_dir():
        _check_templates(path)


def _check_templates(path: Path) -> None:
    """Refuse chat templates that are not files, or too large together."""
    # transformers reads all of them, whether they are used or not.
    total = 0
    with os.scandir(path / TEMPLATES) as entries:
        for entry in entries:
            _check_file(path / TEMPLATES, entry)
            if entry.name.endswith(".jinja"):
                total += max(1024, entry.stat().st_size)
    if total > _LARGEST_TEMPLATES:
        raise _no_file(path, TEMPLATES, f"has more than {_LARGEST_TEMPLATES:,} bytes")


def _check_file(path: Path, entry: "os.DirEntry[str]") -> None:
    try:
        status = entry.stat()
    except OSError as error:
        if entry.name.endswith(_READ):
            raise _no_file(
                path, entry.name, f"is a link that leads nowhere ({error.strerror})"
            ) from error
        return
    kind = stat.S_IFMT(status.st_mode)
    if kind in _KINDS:
        raise _no_file(path, entry.name, f"is {_KINDS[kind]} and not a file")
    if kind == stat.S_IFDIR and entry.name.endswith(_READ):
        raise _no_file(path, entry.name, "is a folder and not a file")
    if not entry.name.endswith(_READ) or entry.name.endswith(".safetensors"):
        return
    largest = _LARGEST_OTHER
    if entry.name.endswith((".json", ".jinja")):
        largest = _LARGEST_JSON
    largest = _LARGEST.get(entry.name, largest)
    if status.st_size > largest:
        reason = f"has {status.st_size:,} bytes, more than {largest:,}"
        raise _no_file(path, entry.name, reason)


def _no_file(path: Path, name: str, reason: str) -> Damaged:
    return Damaged(
        f"Cannot load {path}",
        f"its {name} {reason}",
        "Save or download the model again.",
    )


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        remedy = "Give the folder that save_pretrained wrote."
        if ggufs:
            remedy = f"Load the GGUF file itself: {path / ggufs[0]}."
        raise Damaged(f"Cannot load {path}", "it has no config.json", remedy)
    config = read_json(path / "config.json")
    for key, value in walk(config):
        if key in _DEPTHS and isinstance(value, int) and value < 0:
            raise Damaged(
                f"Cannot load {path}",
                f"its config has {key}={value}",
                "Download config.json again.",
            )
        kernel_key = key.removeprefix("_").removesuffix("_internal")
        if kernel_key not in OWN_KERNELS:
            continue
        for kernel in _kernels(value):
            if not is_own_kernel(kernel, kernel_key):
                raise Unsafe(
                    f"Cannot load {path}",
                    f"its config names the kernel {str(kernel)[:80]!r}, code that would"
                    " be downloaded and run",
                    f"Remove {key} from config.json.",
                )
    return config


def is_own_kernel(name: object, key: str = "attn_implementation") -> bool:
    """Tell whether transformers implements a kernel itself and downloads none.

    >>> is_own_kernel("sdpa"), is_own_kernel("someone/kernel")
    (True, False)
    """
    if not isinstance(name, str):
        return False
    if key == "attn_implementation" and name in _FLASH_PACKAGES:
        installed = importlib.util.find_spec(_FLASH_PACKAGES[name]) is not None
        return installed or importlib.util.find_spec("kernels") is None
    return name in OWN_KERNELS[key]


def _kernels(value: Any) -> Iterator[object]:
    """Yield every kernel that a config entry names.

    transformers takes a string, or a dict with a string for each sub-config.
    """
    if isinstance(value, dict):
        for part in value.values():
            yield from _kernels(part)
    elif value is not None:
        yield value


def _remote_code(name: str, content: dict[str, Any]) -> tuple[str, ...]:
    maps = [value for key, value in walk(content) if key == "auto_map" and value]
    return tuple(f"{name} names {json.dumps(value)[:120]}" for value in maps)


def _check_weights(
    path: Path, config: dict[str, Any]
) -> tuple[str | None, WeightTotals]:
    """Check every weight file; return the dtype of most bytes, and the totals."""
    named = config.get("transformers_weights")
    if named is not None and named not in (WEIGHTS, INDEX):
        raise Unsafe(
            f"Cannot load {path}",
            f"its config sends the loader to {str(named)[:80]!r}",
            f"Call the weights {WEIGHTS}, and remove transformers_weights from"
            " config.json.",
        )
    if (path / ".metadata").exists():
        raise _pickled(path, ".metadata, a distributed checkpoint,")
    if (path / WEIGHTS).exists():
        return _contents([path / WEIGHTS])
    if (path / INDEX).exists():
        return _contents(_shards(path))
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise _pickled(path, pickles[0])
    reason = f"it has neither {WEIGHTS} nor {INDEX}"
    raise Damaged(
        f"Cannot load {path}", reason, "Give the folder that save_pretrained wrote."
    )


def _shards(path: Path) -> list[Path]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Damaged(
            f"Cannot load {path}",
            f"{INDEX} has no weight_map",
            "Download that file again.",
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            reason = f"{INDEX} sends the loader to {name[:80]!r}"
            raise Unsafe(
                f"Cannot load {path}",
                reason,
                "Only safetensors files beside the index are read.",
            )
        if not (path / name).exists():
            raise Damaged(
                f"Cannot load {path}",
                f"{name} is missing",
                "Finish the download: it is one of the shards.",
            )
    for name in names:
        promised = {key for key, shard in weight_map.items() if shard == name}
        absent = promised - set(stored_tensors(path / name))
        if absent:
            reason = f"{name} lacks {min(absent)!r}, which the index promises"
            raise Damaged(
                f"Cannot load {path}",
                reason,
                "Download the shards and the index again.",
            )
    return [path / name for name in names]


def _contents(files: list[Path]) -> tuple[str | None, WeightTotals]:
    totals: Counter[str] = Counter()
    held = WeightTotals()
    for file in files:
        tensors = stored_tensors(file)
        for dtype, shape in tensors.values():
            totals[dtype] += prod(shape) * _BYTES_OF.get(dtype, 0)
        shapes = [shape for _, shape in tensors.values()]
        held += WeightTotals.of(shapes, file.stat().st_size)
    floats = [dtype for dtype in _BYTES_OF if totals[dtype]]
    if not floats:
        return None, held
    return max(floats, key=lambda dtype: totals[dtype]), held


def stored_tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Read the dtype and shape of each tensor from a safetensors header.

    safetensors checks the header against the length of the file: every byte must belong
    to exactly one tensor.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            tensors = {}
            # `file` has keys() but is not a mapping.
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                tensors[name] = (str(part.get_dtype()), part.get_shape())
            return tensors
    except (SafetensorError, OSError) as error:
        remedy = "Download the file again: it is cut short or was changed."
        raise Damaged(f"Cannot read {path.name}", str(error)[:200], remedy) from error


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(
            f"Cannot read {path}",
            f"it is not JSON ({error})"[:200],
            "Download the file again.",
        ) from error
    if not isinstance(content, dict):
        raise Damaged(
            f"Cannot read {path}", "it is not a JSON object", "Download the file again."
        )
    return content


def _pickled(path: Path, name: str) -> Unsafe:
    return Unsafe(
        f"Cannot load {path}",
        f"its weights are in {name} and not in safetensors, and unpickling can run"
        " code",
        "If you trust it, convert it once: load it with transformers and call"
        " module.save_pretrained(folder), which writes safetensors. Then load that"
        " folder.",
    )

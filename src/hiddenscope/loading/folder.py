"""What a folder with a checkpoint holds, checked before any library loads it.

Weights are read from safetensors alone, and no code comes with them: a pickle, an
`auto_map`, an attention kernel that would be downloaded, a weight file outside the
folder are refused here, by name. So are devices, pipes and files that are far too
large, which a library would open and read without end.

A folder of sentence-transformers also says how a text becomes a vector; `hs.embed` does
the same, or says that it cannot:

    modules.json                        Transformer, Pooling, Normalize, ... in order
    sentence_bert_config.json           longest text in tokens, lower-casing
    1_Pooling/config.json               how the states become one vector
    config_sentence_transformers.json   prompts that are put before a text

From version 6 on, the tokenizer has the longest text and the lower-casing.
"""

import importlib.util
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiddenscope.errors import Damaged, UnknownModel, Unsafe
from hiddenscope.files import check_file, open_tensors
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
# Dtypes as safetensors and torch name them, with their bytes.
_FLOATS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
}
# The largest files that may be read, by the end of their name. The largest tokenizers
# of today have some 60 MB.
_LARGEST = {
    ".safetensors": math.inf,
    INDEX: 64 * 2**20,
    "tokenizer.json": 2**28,
    "vocab.json": 2**28,
    ".json": 16 * 2**20,
    ".jinja": 16 * 2**20,
    "": 2**28,
}
_LARGEST_TEMPLATES = 16 * 2**20  # all of them together
_LARGEST_BELOW = 2**20  # a file in a folder below
# The one folder below in which transformers reads by itself.
TEMPLATES = "additional_chat_templates"
SMALL = (".json", ".txt", ".model", ".jinja", ".vocab", ".codes")
_READ = (*SMALL, ".safetensors")
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
SENTENCE_CONFIG = "config_sentence_transformers.json"
# Pooling names of sentence-transformers, and what hs.embed calls them.
POOLS = {"mean": "mean", "max": "max", "cls": "first", "lasttoken": "last"}
MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Modules that hs.embed covers; whether vectors have norm 1 is its caller's choice.
SUPPORTED = ("Transformer", "Pooling", "Normalize", "Dropout")
# Of the Transformer's settings, those that change no vector, and the one value of one
# that `hs.embed` has. Lengths of queries and documents are for those who ask for them.
_HARMLESS = {
    "max_seq_length",
    "do_lower_case",
    "modality_config",
    "module_output_name",
    "unpad_inputs",
    "query_length",
    "document_length",
}
_TASK = ("transformer_task", "feature-extraction")


@dataclass(frozen=True)
class Folder:
    """A checkpoint that may be loaded: its path, its config, the dtype of its weights,
    and whether it has a tokenizer.

    `dtype` is the floating dtype that most bytes are in, as torch names it.
    `remote_code` says where the folder names code of its own, which is never run.
    `held` is what its weight files hold.
    """

    path: Path
    config: dict[str, Any]
    dtype: str | None
    has_tokenizer: bool
    remote_code: tuple[str, ...]
    held: WeightTotals


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
    files = weight_files(path, config)
    if not files:
        raise Damaged(
            f"Cannot load {path}",
            f"it has neither {WEIGHTS} nor {INDEX}",
            "Give the folder that save_pretrained wrote.",
        )
    dtype, _, held = weight_totals(files)
    contents = {"config.json": config}
    if (path / "tokenizer_config.json").exists():
        contents["tokenizer_config.json"] = read_json(path / "tokenizer_config.json")
    remote_code = []
    for name, content in contents.items():
        check_counts(walk(content), held, str(path / name))
        for key, value in walk(content):
            if key == "auto_map" and value:
                remote_code.append(f"{name} names {json.dumps(value)[:120]}")
    has_tokenizer = any((path / name).exists() for name in TOKENIZER_FILES)
    has_tokenizer = has_tokenizer or any(path.glob("*.model"))
    return Folder(path, config, dtype, has_tokenizer, tuple(remote_code), held)


def check_files(path: Path) -> None:
    """Refuse files that are too large for their kind, and what is not a file.

    Reading a pipe waits forever, and reading a device never ends. Links are followed,
    because a hub's cache consists of them.
    """
    _file_sizes(path)
    if not (path / TEMPLATES).is_dir():
        return
    # transformers reads all templates, whether they are used or not.
    total = 0
    for name, size in _file_sizes(path / TEMPLATES):
        if name.endswith(".jinja"):
            total += max(1024, size)
    if total > _LARGEST_TEMPLATES:
        raise Damaged(
            f"Cannot load {path}",
            f"its {TEMPLATES} has more than {_LARGEST_TEMPLATES:,} bytes",
            "Save or download the model again.",
        )


def _file_sizes(path: Path) -> list[tuple[str, int]]:
    """Return the name and size of each file of a folder, if all may be opened."""
    sizes = []
    with os.scandir(path) as scanned:
        entries = list(scanned)
    for entry in entries:
        largest = math.inf
        if entry.name.endswith(_READ):
            largest = _LARGEST[next(filter(entry.name.endswith, _LARGEST))]
        elif entry.is_dir() or not os.path.exists(entry):
            continue
        size = check_file(entry.path, f"Cannot load {path}", largest)
        sizes.append((entry.name, size))
    return sizes


def _read_config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        remedy = "Give the folder that save_pretrained wrote."
        if ggufs:
            remedy = f"Load the GGUF file itself: {path / ggufs[0]}."
        raise Damaged(f"Cannot load {path}", "it has no config.json", remedy)
    config: dict[str, Any] = read_json(path / "config.json")
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
        # transformers takes a string, or a dict with a string for each sub-config.
        kernels = [value]
        if isinstance(value, dict):
            kernels = [part for _, part in walk(value) if not isinstance(part, dict)]
        for kernel in kernels:
            if kernel is not None and not is_own_kernel(kernel, kernel_key):
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


def weight_files(path: Path, config: Mapping[str, Any]) -> list[Path]:
    """Return the weight files of a folder, all there and beside each other."""
    problem = f"Cannot load {path}"
    named = config.get("transformers_weights")
    if named is not None and named not in (WEIGHTS, INDEX):
        raise Unsafe(
            problem,
            f"its config sends the loader to {str(named)[:80]!r}",
            f"Call the weights {WEIGHTS}, and remove transformers_weights from"
            " config.json.",
        )
    if (path / ".metadata").exists():
        raise pickled(problem, ".metadata, a distributed checkpoint,")
    if (path / WEIGHTS).exists():
        return [path / WEIGHTS]
    if not (path / INDEX).exists():
        refuse_pickles(problem, os.listdir(path))
        return []
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Damaged(
            problem, f"{INDEX} has no weight_map", "Download that file again."
        )
    promised: dict[str, set[str]] = {}
    for key, shard in weight_map.items():
        promised.setdefault(str(shard), set()).add(key)
    for name in sorted(promised):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            raise Unsafe(
                problem,
                f"{INDEX} sends the loader to {name[:80]!r}",
                "Only safetensors files beside the index are read.",
            )
        if not (path / name).exists():
            raise Damaged(
                problem,
                f"{name} is missing",
                "Finish the download: it is one of the shards.",
            )
        absent = promised[name] - set(stored_tensors(path / name))
        if absent:
            raise Damaged(
                problem,
                f"{name} lacks {min(absent)!r}, which the index promises",
                "Download the shards and the index again.",
            )
    return [path / name for name in sorted(promised)]


def weight_totals(files: list[Path]) -> tuple[str | None, int, WeightTotals]:
    """Return the dtype of most bytes, the number of parameters, and the totals."""
    sizes: Counter[str] = Counter()
    parameters = tensors = longest = 0
    for file in files:
        for stored, shape in stored_tensors(file).values():
            numbers = math.prod(shape)
            parameters += numbers
            tensors += 1
            # An empty tensor takes no byte of the file, whatever its other axes say.
            if numbers:
                longest = max([longest, *shape])
            if stored in _FLOATS:
                dtype, width = _FLOATS[stored]
                sizes[dtype] += numbers * width
    total = sum(file.stat().st_size for file in files)
    held = WeightTotals(tensors, total, longest)
    return max(sizes, key=sizes.__getitem__, default=None), parameters, held


def stored_tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    """Read the dtype and shape of each tensor from a safetensors header."""
    with open_tensors(path, f"Cannot read {path.name}", "np") as file:
        tensors = {}
        # `file` has keys() but is not a mapping.
        for name in file.keys():  # noqa: SIM118
            part = file.get_slice(name)
            tensors[name] = (str(part.get_dtype()), part.get_shape())
        return tensors


def read_json(path: Path, kind: type[Any] = dict, largest: float = math.inf) -> Any:
    """Read a JSON object, or another kind of value, from a file."""
    try:
        check_file(path, f"Cannot read {path}", largest)
        content = json.loads(path.read_text(encoding="utf-8"))
    except Damaged:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(
            f"Cannot read {path}",
            f"it is not JSON ({error})"[:200],
            "Download the file again.",
        ) from error
    if not isinstance(content, kind):
        raise Damaged(
            f"Cannot read {path}",
            f"it is a {type(content).__name__} and not a {kind.__name__}",
            "Download the file again.",
        )
    return content


def refuse_pickles(problem: str, names: Iterable[str]) -> None:
    """Raise Unsafe if a folder without safetensors has weights in a pickle."""
    for name in sorted(names):
        if name.endswith(PICKLES):
            raise pickled(problem, name)


def pickled(problem: str, name: str) -> Unsafe:
    """Return the refusal of weights in a pickle."""
    return Unsafe(
        problem,
        f"its weights are in {name} and not in safetensors, and unpickling can run"
        " code",
        "If you trust it, convert it once: load it with its library and call"
        " save_pretrained(folder), which writes safetensors. Then load that folder.",
    )


@dataclass(frozen=True)
class SentenceModules:
    """What sentence-transformers would do with a text, as far as it changes the vector.

    `longest` is in tokens, or None where the tokenizer says it; `prompt` is put before
    every text, and `prompts` names those that a caller may choose; `pool` is what
    `hs.embed` calls the pooling; `missing` says what it does not do.
    """

    longest: int | None = None
    lower: bool = False
    prompt: str = ""
    prompts: tuple[str, ...] = ()
    pool: str = "mean"
    missing: str = ""


def sentence_modules(folder: Path) -> SentenceModules | None:
    """Read the modules of a folder; return None if it lists none.

    >>> sentence_modules(Path("/nowhere")) is None
    True
    """
    # Of bert, roberta, distilbert, xlm-roberta, ...
    transformers = sorted(folder.glob("sentence_*_config.json"))
    modules, config_path = folder / "modules.json", folder / SENTENCE_CONFIG
    if not transformers and not modules.is_file():
        return None
    encoder = {}
    if transformers:
        encoder = read_json(transformers[0], dict, _LARGEST_BELOW)
    longest = encoder.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise _unreadable(transformers[0], f"max_seq_length is {str(longest)[:40]}")
    config = {}
    if config_path.is_file():
        config = read_json(config_path, dict, _LARGEST_BELOW)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or set(map(type, prompts.values())) - {str}:
        raise _unreadable(config_path, "prompts is not an object of strings")
    default = config.get("default_prompt_name")
    prompt = prompts.get(default, "") if isinstance(default, str) else ""
    pooling, missing = _pooling(modules) if modules.is_file() else ({}, "")
    missing = missing or _setting_missing(encoder)
    width = config.get("truncate_dim")
    if width is not None:
        missing = missing or f"keeps {str(width)[:20]} numbers of a vector"
    # In the words of sentence-transformers.
    modes = pooling.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in MODES.items() if pooling.get(key)]
    elif not isinstance(modes, list):
        modes = [modes]
    modes = [str(mode) for mode in modes] or ["mean"]
    if len(modes) > 1 or modes[0] not in POOLS:
        missing = missing or f"pools by {' and '.join(modes)[:80]}"
    elif prompt and pooling.get("include_prompt") is False:
        missing = missing or "leaves the prompt out of the mean"
    return SentenceModules(
        longest,
        bool(encoder.get("do_lower_case")),
        prompt,
        tuple(name for name, text in prompts.items() if text and name != default),
        POOLS.get(modes[0], "mean"),
        missing,
    )


def _pooling(modules: Path) -> tuple[dict[str, Any], str]:
    """Return the pooling's config, and the first module that `hs.embed` lacks."""
    pooling = {}
    missing = ""
    for module in read_json(modules, list, _LARGEST_BELOW):
        match module:
            case {"type": str(name), "path": str(path)}:
                pass
            case _:
                raise _unreadable(modules, "a module has no type or no path")
        if ".." in Path(path).parts or Path(path).is_absolute():
            raise _unreadable(modules, f"{path[:80]!r} lies outside the folder")
        # Without the package that the class is in.
        package, _, kind = name.rpartition(".")
        config = modules.parent / path / "config.json"
        if package.partition(".")[0] != "sentence_transformers":
            missing = missing or f"has a module of its own, {name[:80]}"
        elif kind == "Transformer" and path:
            missing = missing or f"keeps its Transformer in {path[:40]}"
        elif kind == "Pooling" and config.is_file():
            pooling = read_json(config, dict, _LARGEST_BELOW)
        elif kind not in SUPPORTED:
            missing = missing or f"has a module {kind[:40]}"
    if not pooling:
        missing = missing or "has no module Pooling"
    return pooling, missing


def _setting_missing(encoder: Mapping[str, Any]) -> str:
    """Return what a Transformer's settings ask for and `hs.embed` does not do."""
    if "message" in (encoder.get("modality_config") or ()):
        return "puts texts into a chat template"
    for key, value in encoder.items():
        if value and key not in _HARMLESS and (key, value) != _TASK:
            return f"sets {key[:40]}"
    return ""


def _unreadable(path: Path, reason: str) -> Damaged:
    remedy = "Download the file again, or remove it."
    return Damaged(f"Cannot read {path}", reason, remedy)

"""Load a module and a tokenizer from a checked folder, offline and without its code.

On a GPU the module computes in the dtype of the checkpoint. On a CPU it computes in
float32, unless bfloat16 is fast there. A CPU without native bfloat16 takes some hundred
times as long in it, so the cost is measured on the machine, once per process, and a
note names the choice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope.errors import (
    Damaged,
    Error,
    LoadError,
    UnknownModel,
    Unsafe,
    first_line,
    without_panic,
)
from hiddenscope.loading import limits
from hiddenscope.loading.devices import (
    Placement,
    offload_folder,
    place,
    remove_with,
    spread_map,
    summary,
)
from hiddenscope.loading.folder import Folder, is_own_kernel
from hiddenscope.loading.quantised import check_quantised, method_of, scheme_config
from hiddenscope.loading.sentences import SentenceModules
from hiddenscope.loading.tokenizer_file import check_tokenizer_file
from hiddenscope.loading.variants import ModelVariant
from hiddenscope.modules import autograd
from hiddenscope.modules.quantised import quantised_weights

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from hiddenscope.loading.devices import Devices

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "text-encoder": "AutoModelForTextEncoding",
    "base": "AutoModel",
}
_STORED = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16", "half": "float16"}
_SHORT |= {
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
}
# The size of the linear layer that is timed, how often, and when one run is enough: at
# 4 times the time, or 50 ms.
_ROWS, _WIDTH, _REPEATS = 32, 512, 5
_HOPELESS, _LONG = 4.0, 0.05


@dataclass(frozen=True)
class Loaded:
    """A module with its tokenizer, their source, and the choices made for the user.

    `read_tokenizer` is called when the tokenizer is first used: reading its files takes
    longer than mapping the weights. `folder` holds the files; a live module has none.
    `sentences` describes the modules of a sentence-transformers folder. `variant` is
    what was asked for, if that was more than the model of the folder, and `altered`
    names a weight of the base that an adapter brought with it.

    >>> import torch
    >>> Loaded(torch.nn.Linear(2, 2), lambda: None, "Linear", None, ()).name
    'Linear'
    """

    module: nn.Module
    read_tokenizer: Callable[[], PreTrainedTokenizerBase | None]
    name: str
    revision: str | None
    notes: tuple[str, ...]
    folder: Path | None = None
    sentences: SentenceModules | None = None
    variant: ModelVariant | None = None
    altered: str = ""

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """Return the tokenizer; its files are read on first use."""
        return self.read_tokenizer()


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is to be loaded; None leaves the choice to us.

    `scheme` says how its weights are to be quantised; None leaves them as they are.
    """

    task: str | None = None
    dtype: str | torch.dtype | None = None
    device: Devices = None
    attention: str | None = None
    scheme: str | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise LoadError(
                f"No task {self.task!r}",
                f"the tasks are {', '.join(TASKS)}",
                "Choose one of them.",
            )
        if self.attention is not None and not is_own_kernel(self.attention):
            raise Unsafe(
                f"Cannot use attention {str(self.attention)[:80]!r}",
                "transformers does not implement it: a kernel would be downloaded"
                " and run",
                "Choose 'sdpa', 'eager' or 'flex_attention'.",
            )


def load_folder(
    folder: Folder, options: LoadOptions
) -> tuple[nn.Module, tuple[str, ...]]:
    """Load a checked folder: the module in eval mode, and notes on the choices made."""
    placement = place(options.device)
    device = placement.device
    check_quantised(str(folder.path), folder.config, device)
    dtype, dtype_note = _choose_dtype(folder, options, device)
    arguments: dict[str, Any] = {"dtype": dtype}
    if options.attention is not None:
        arguments["attn_implementation"] = options.attention
    is_quantised = bool(method_of(folder.config))
    if options.scheme is not None:
        arguments["quantization_config"] = scheme_config(
            options.scheme, str(folder.path), folder.config, dtype
        )
        is_quantised = True
    if device is None:
        arguments["device_map"] = placement.device_map
    elif is_quantised:
        # A quantised module is placed while it is loaded and cannot be moved later.
        arguments["device_map"] = {"": device}
    with quiet_transformers():
        config = _load_config(folder)
        loader, class_note = _choose_class(folder, config, options.task)
        if isinstance(placement.device_map, dict):
            device_map = _spread(folder, config, loader, placement.device_map)
            arguments["device_map"] = device_map
        arguments["config"] = config
        module, info = _load_placed(loader, folder, arguments, placement)
    weights_note = _check_loaded(folder, module, info)
    if options.scheme is not None:
        _require_quantised(folder, module, options.scheme)
    if device is not None and device.type != "cpu" and not is_quantised:
        # from_pretrained leaves the module on the CPU, in eval mode.
        module.to(device)
    notes = [dtype_note, class_note, weights_note, summary(placement, module)]
    if not folder.has_tokenizer:
        notes.append("No tokenizer came with it: give it lists of token ids.")
    return module, tuple(filter(None, notes))


def _load_placed(
    loader: Any, folder: Folder, arguments: dict[str, Any], placement: Placement
) -> tuple[Any, dict[str, Any]]:
    """Load a module; weights that stay on the disk get a folder that lives with it."""
    if not placement.may_use_disk:
        return _from_pretrained(loader, folder, arguments)
    folder_on_disk = offload_folder()
    arguments["offload_folder"] = str(folder_on_disk)
    try:
        module, info = _from_pretrained(loader, folder, arguments)
    except BaseException:
        folder_on_disk.rmdir()
        raise
    remove_with(module, folder_on_disk)
    return module, info


def _spread(
    folder: Folder, config: Any, loader: Any, device_map: Mapping[str, str]
) -> dict[str, str]:
    """Hold a map of devices to the modules of the model, before weights are read."""
    import torch

    build = getattr(loader, "_from_config", None) or loader.from_config
    with (
        torch.device("meta"),
        limits.building(folder.held, folder.config, str(folder.path)),
    ):
        module = build(config)
    return spread_map(device_map, module)


def _require_quantised(folder: Folder, module: nn.Module, scheme: str) -> None:
    """Refuse a module of which the scheme left everything as it was."""
    if any(quantised_weights(module)):
        return
    raise LoadError(
        f"Cannot quantise {folder.path} to {scheme}",
        "torchao quantises nn.Linear, and its projections are modules of another kind,"
        " such as GPT-2's Conv1D",
        "Choose 'nf4', 'fp4' or 'bnb-int8'.",
    )


def load_tokenizer(folder: Folder) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer from the folder's files; return None if it has none."""
    from transformers import AutoTokenizer

    if not folder.has_tokenizer:
        return None
    check_tokenizer_file(folder.path / "tokenizer.json")
    try:
        problem = f"Cannot load the tokenizer of {folder.path}"
        with (
            quiet_transformers(),
            without_panic(Damaged, problem, "Use a tokenizer that you trust."),
        ):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                str(folder.path), local_files_only=True, trust_remote_code=False
            )
    except Damaged:
        raise
    except Exception as error:
        for place in folder.remote_code:
            if place.startswith("tokenizer_config.json"):
                remedy = "Load it yourself and pass the live (module, tokenizer)."
                raise _remote_code(folder, remedy) from error
        raise LoadError(
            f"Cannot load the tokenizer of {folder.path}",
            first_line(error),
            _remedy(error),
        ) from error
    longest: object = tokenizer.model_max_length
    if not isinstance(longest, int | float) or isinstance(longest, bool):
        reason = f"its model_max_length is {str(longest)[:80]!r} and not a number"
        raise Damaged(
            f"Cannot load the tokenizer of {folder.path}",
            reason,
            "Correct tokenizer_config.json.",
        )
    return tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep the progress bars and reports of transformers off stderr.

    What matters of them goes into notes and errors.
    """
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return the torch dtype of a name.

    >>> parse_dtype("bf16")
    torch.bfloat16
    """
    import torch

    name = str(dtype).removeprefix("torch.")
    parsed = getattr(torch, _SHORT.get(name, name), None)
    is_float = isinstance(parsed, torch.dtype) and parsed.is_floating_point
    # Float8 is a format for storage: torch computes next to nothing in it.
    if isinstance(parsed, torch.dtype) and is_float and parsed.itemsize >= 2:
        return parsed
    raise LoadError(
        f"Cannot use dtype {str(dtype)[:40]!r}",
        "it is not a floating-point dtype of torch with 16 bits or more",
        "Choose 'float32', 'bfloat16' or 'float16'.",
    )


def choose_dtype(stored: torch.dtype, device: torch.device) -> tuple[torch.dtype, str]:
    """Return the dtype to compute in, and a sentence that says why.

    >>> import torch
    >>> choose_dtype(torch.float32, torch.device("cpu"))
    (torch.float32, 'Computing in float32, the dtype of the checkpoint.')
    """
    import torch

    name = str(stored).removeprefix("torch.")
    if device.type != "cpu" or stored in (torch.float32, torch.float64):
        return stored, f"Computing in {name}, the dtype of the checkpoint."
    if stored != torch.bfloat16:
        return (
            torch.float32,
            f"Computing in float32: the checkpoint is {name}, and this is a CPU.",
        )
    ratio = bfloat16_cost()
    measured = (
        f"a bfloat16 linear layer takes {ratio:.2g} times as long as a float32 one on"
        " this CPU"
    )
    if ratio <= 1:
        return (
            torch.bfloat16,
            f"Computing in bfloat16, the dtype of the checkpoint: {measured}.",
        )
    return (
        torch.float32,
        f"Computing in float32, though the checkpoint is bfloat16: {measured}.",
    )


@cache
def bfloat16_cost() -> float:
    """Return how many times as long as in float32 a bfloat16 layer takes here."""
    import torch

    reference = _seconds(torch.float32, None)
    return _seconds(torch.bfloat16, reference) / reference


def _seconds(dtype: torch.dtype, reference: float | None) -> float:
    import torch

    x = torch.ones(_ROWS, _WIDTH, dtype=dtype)
    weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    times: list[float] = []
    with autograd.restored(inference=True), warnings.catch_warnings():
        # torch warns where it has no bfloat16 kernel; how slow that is, is measured.
        warnings.simplefilter("ignore")
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            times.append(time.perf_counter() - begin)
            # The first run also sets the kernel up, so it counts only if it was long.
            telling = len(times) > 1 or times[0] > _LONG
            if reference is not None and telling and min(times) > _HOPELESS * reference:
                break
    return min(times)


def _choose_dtype(
    folder: Folder, options: LoadOptions, device: torch.device | None
) -> tuple[torch.dtype | str, str]:
    if options.dtype is not None:
        return parse_dtype(options.dtype), ""
    if folder.dtype is None or method_of(folder.config):
        return "auto", "The checkpoint is quantised: its own dtypes are kept."
    stored = parse_dtype(_STORED[folder.dtype])
    # A model over several devices computes on the fastest of them.
    fastest = place(None).device if device is None else device
    assert fastest is not None, "without a map there is one device"
    return choose_dtype(stored, fastest)


def _load_config(folder: Folder) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = folder.config.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and not folder.remote_code:
        raise UnknownModel(
            f"Cannot load {folder.path}",
            f"the installed transformers has no model type {str(model_type)[:60]!r}",
            "A newer transformers may have it: pip install --upgrade transformers",
        )
    if not known:
        raise _remote_code(
            folder,
            "Load it with transformers yourself and pass the live (module, tokenizer).",
        )
    try:
        return AutoConfig.from_pretrained(
            str(folder.path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise Damaged(
            f"Cannot read the config of {folder.path}",
            first_line(error),
            "Download it again.",
        ) from error


def _choose_class(folder: Folder, config: Any, task: str | None) -> tuple[Any, str]:
    import transformers

    if folder.remote_code and task is None:
        remedy = (
            f"Name a task ({', '.join(TASKS)}) to use transformers' own"
            f" {config.model_type} instead."
        )
        raise _remote_code(folder, remedy)
    if task is not None:
        name = TASKS[task]
        encoders = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
        if task == "text-encoder" and type(config) not in encoders:
            name = "AutoModel"
        note = ""
        if folder.remote_code:
            note = (
                "The code that its auto_map names was not run: transformers' own class"
                " was used."
            )
        return getattr(transformers, name), note
    architectures = config.architectures
    if not isinstance(architectures, list | tuple) or not architectures:
        return transformers.AutoModel, ""
    for name in architectures:
        if not isinstance(name, str) or not name.isidentifier():
            continue
        loader = getattr(transformers, name, None)
        if isinstance(loader, type) and issubclass(
            loader, transformers.PreTrainedModel
        ):
            return loader, ""
    note = (
        f"transformers has no class {architectures[0]!r}, which the config names: the"
        " base model was loaded."
    )
    return transformers.AutoModel, note


def _from_pretrained(
    loader: Any, folder: Folder, options: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    try:
        with limits.building(folder.held, folder.config, str(folder.path)):
            module, info = loader.from_pretrained(
                str(folder.path),
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
    except Error:
        raise
    except Exception as error:
        raise LoadError(
            f"Cannot load {folder.path}", first_line(error), _remedy(error)
        ) from error
    return module, info


def _check_loaded(folder: Folder, module: Any, info: dict[str, Any]) -> str:
    """Refuse a module whose weights are not all in the checkpoint; return a note.

    The missing weights, and so the states, would be random numbers.
    """
    missing = sorted(str(key) for key in info["missing_keys"])
    poolers: list[str] = []
    # The pooler of a base model comes after its states, and no head reads it.
    if module.base_model is module:
        poolers = [key for key in missing if "pooler" in key.split(".")]
    lacking = [key for key in missing if key not in poolers]
    if lacking or info["mismatched_keys"]:
        wrong = lacking or sorted(str(entry) for entry in info["mismatched_keys"])
        raise Damaged(
            f"Cannot load {folder.path} as {type(module).__name__}",
            f"the checkpoint has no weights for {len(wrong)} of its parameters, such as"
            f" {wrong[0]}",
            "They would be random. Download it again, or load a class it was saved"
            " from: task='base' has no head.",
        )
    if poolers:
        return (
            "The checkpoint has no pooler: what the pooler returns is random; no state"
            " passes through it."
        )
    unused = sorted(str(key) for key in info["unexpected_keys"])
    if unused:
        return (
            f"{len(unused)} weights of the checkpoint have no place in"
            f" {type(module).__name__}, such as {unused[0]}."
        )
    return ""


def _remote_code(folder: Folder, remedy: str) -> Unsafe:
    reason = f"{folder.remote_code[0]}, code that would be downloaded and run"
    return Unsafe(f"Cannot load {folder.path}", reason, remedy)


def _remedy(error: Exception) -> str:
    if isinstance(error, ImportError):
        return "Install what is missing."
    return (
        "Check the folder, or load it with transformers yourself and pass the live"
        " (module, tokenizer)."
    )

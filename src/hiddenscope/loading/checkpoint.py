"""Load a module and a tokenizer from a checked folder, offline and without its code.

On a GPU the module computes in the dtype of the checkpoint. On a CPU it computes in
float32, unless bfloat16 is fast there. A CPU without native bfloat16 takes some hundred
times as long in it, so the cost is measured on the machine, once per process, and a
note names the choice.

A model may lie on one device, or on several by a map of its modules, which accelerate
spreads. What a map names is checked on a module without weights, so that a mistake is
found before any weight is read.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import finalize

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
from hiddenscope.loading.folder import Folder, SentenceModules, is_own_kernel
from hiddenscope.loading.variants import (
    ModelVariant,
    check_quantised,
    method_of,
    scheme_config,
)
from hiddenscope.modules import autograd
from hiddenscope.modules.quantised import keep_layout, quantised_weights

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    DeviceName: TypeAlias = str | torch.device | int
    Devices: TypeAlias = DeviceName | Mapping[str, DeviceName] | None

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "text-encoder": "AutoModelForTextEncoding",
    "base": "AutoModel",
}
_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "fp64": "float64",
    "f64": "float64",
}
# The size of the linear layer that is timed, how often, and how long at most.
_ROWS, _WIDTH, _REPEATS, _LONGEST_TRIAL = 32, 512, 5, 0.05
# The ways in which accelerate spreads a model by itself.
STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DISK = "disk"


@dataclass(frozen=True)
class AdaptedBase:
    """The name of a base, those of the adapters on it, and what they did to it.

    `altered` names a weight of the base that an adapter brought with it.
    """

    name: str
    adapters: tuple[str, ...]
    altered: str = ""


@dataclass(frozen=True)
class Loaded:
    """A module with its tokenizer, their source, and the choices made for the user.

    `read_tokenizer` is called when the tokenizer is first used: reading its files takes
    longer than mapping the weights. `folder` holds the files; a live module has none.
    `sentences` describes the modules of a sentence-transformers folder. `variant` is
    what was asked for, if that was more than the model of the folder, and `adapted`
    what is known of the base of adapters.

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
    adapted: AdaptedBase | None = None

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
    import torch

    device, device_map = place(options.device)
    path = str(folder.path)
    check_quantised(path, folder.config, device)
    dtype, dtype_note = _choose_dtype(folder, options, device)
    arguments: dict[str, Any] = {"dtype": dtype}
    if options.attention is not None:
        arguments["attn_implementation"] = options.attention
    is_quantised = bool(method_of(folder.config))
    if options.scheme is not None:
        arguments["quantization_config"] = scheme_config(
            options.scheme, path, folder.config, dtype
        )
        is_quantised = True
    if device is not None and is_quantised:
        # A quantised module is placed while it is loaded and cannot be moved later.
        arguments["device_map"] = {"": device}
    with quiet_transformers():
        config = _load_config(folder)
        loader, class_note = _choose_class(folder, config, options.task)
        arguments["config"] = config
        if device_map is not None:
            if isinstance(device_map, dict):
                build = getattr(loader, "_from_config", None) or loader.from_config
                with (
                    torch.device("meta"),
                    limits.building(folder.held, folder.config, path),
                ):
                    device_map = spread_map(device_map, build(config))
            arguments["device_map"] = device_map
        module, info = _from_pretrained(loader, folder, arguments)
    keep_layout(module)
    weights_note = _check_loaded(folder, module, info)
    if options.scheme is not None and not any(quantised_weights(module)):
        raise LoadError(
            f"Cannot quantise {path} to {options.scheme}",
            "torchao quantises nn.Linear, and its projections are modules of another"
            " kind, such as GPT-2's Conv1D",
            "Choose 'nf4', 'fp4' or 'bnb-int8'.",
        )
    if device is not None and device.type != "cpu" and not is_quantised:
        # from_pretrained leaves the module on the CPU, in eval mode.
        module.to(device)
    notes = [dtype_note, class_note, weights_note]
    if device_map is not None:
        notes.append(spread_note(module))
    if not folder.has_tokenizer:
        notes.append("No tokenizer came with it: give it lists of token ids.")
    return module, tuple(filter(None, notes))


def load_tokenizer(folder: Folder) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer from the folder's files; return None if it has none."""
    from transformers import AutoTokenizer

    if not folder.has_tokenizer:
        return None
    limits.check_tokenizer_file(folder.path / "tokenizer.json")
    problem = f"Cannot load the tokenizer of {folder.path}"
    try:
        with (
            quiet_transformers(),
            without_panic(Damaged, problem, "Use a tokenizer that you trust."),
        ):
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder.path), local_files_only=True, trust_remote_code=False
            )
    except Damaged:
        raise
    except Exception as error:
        for place in folder.remote_code:
            if place.startswith("tokenizer_config.json"):
                remedy = "Load it yourself and pass the live (module, tokenizer)."
                raise _remote_code(folder, remedy) from error
        raise LoadError(problem, first_line(error), _remedy(error)) from error
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or isinstance(longest, bool):
        reason = f"its model_max_length is {str(longest)[:80]!r} and not a number"
        raise Damaged(problem, reason, "Correct tokenizer_config.json.")
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
        note = f"Computing in float32: the checkpoint is {name}, and this is a CPU."
        return torch.float32, note
    ratio = bfloat16_cost()
    measured = (
        f"a bfloat16 linear layer takes {ratio:.2g} times as long as a float32 one on"
        " this CPU"
    )
    if ratio > 1:
        note = f"Computing in float32, though the checkpoint is bfloat16: {measured}."
        return torch.float32, note
    note = f"Computing in bfloat16, the dtype of the checkpoint: {measured}."
    return torch.bfloat16, note


@cache
def bfloat16_cost() -> float:
    """Return how many times as long as in float32 a bfloat16 layer takes here."""
    import torch

    best = []
    with autograd.restored(inference=True), warnings.catch_warnings():
        # torch warns where it has no bfloat16 kernel; how slow that is, is measured.
        warnings.simplefilter("ignore")
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.ones(_ROWS, _WIDTH, dtype=dtype)
            weight = torch.ones(_WIDTH, _WIDTH, dtype=dtype)
            times: list[float] = []
            # The first run also sets the kernel up, so one is enough only if it is
            # long.
            while len(times) < _REPEATS and sum(times) < _LONGEST_TRIAL:
                begin = time.perf_counter()
                torch.nn.functional.linear(x, weight)
                times.append(time.perf_counter() - begin)
            best.append(min(times))
    return best[0] / best[1]


def _choose_dtype(
    folder: Folder, options: LoadOptions, device: torch.device | None
) -> tuple[torch.dtype | str, str]:
    if options.dtype is not None:
        return parse_dtype(options.dtype), ""
    if folder.dtype is None or method_of(folder.config):
        return "auto", "The checkpoint is quantised: its own dtypes are kept."
    stored = parse_dtype(folder.dtype)
    # A model over several devices computes on the fastest of them.
    return choose_dtype(stored, device or place(None)[0])  # type: ignore[arg-type]


def _load_config(folder: Folder) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    model_type = folder.config.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    if not known and folder.remote_code:
        raise _remote_code(
            folder,
            "Load it with transformers yourself and pass the live (module, tokenizer).",
        )
    if not known:
        raise UnknownModel(
            f"Cannot load {folder.path}",
            f"the installed transformers has no model type {str(model_type)[:60]!r}",
            "A newer transformers may have it: pip install --upgrade transformers",
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
    """Load a module; weights that stay on the disk get a folder that lives with it."""
    path = str(folder.path)
    device_map = options.get("device_map", {})
    with ExitStack() as cleanup:
        if isinstance(device_map, str) or DISK in device_map.values():
            offloaded = tempfile.mkdtemp(prefix="hiddenscope-offload-")
            cleanup.callback(shutil.rmtree, offloaded, ignore_errors=True)
            options["offload_folder"] = offloaded
        try:
            with limits.building(folder.held, folder.config, path):
                module, info = loader.from_pretrained(
                    path,
                    use_safetensors=True,
                    local_files_only=True,
                    trust_remote_code=False,
                    output_loading_info=True,
                    **options,
                )
        except Error:
            raise
        except Exception as error:
            problem = f"Cannot load {path}"
            raise LoadError(problem, first_line(error), _remedy(error)) from error
        finalize(module, cleanup.pop_all().close)
    return module, info


def _check_loaded(folder: Folder, module: Any, info: dict[str, Any]) -> str:
    """Refuse a module whose weights are not all in the checkpoint; return a note.

    The missing weights, and so the states, would be random numbers.
    """
    missing = sorted(str(key) for key in info["missing_keys"])
    poolers = []
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


def place(
    devices: Devices,
) -> tuple[torch.device | None, str | dict[str, str] | None]:
    """Return the device of a model, or a map for several; raise if one is not there.

    >>> place("cpu"), place({"": "cpu"})
    ((device(type='cpu'), None), (None, {'': 'cpu'}))
    """
    import torch

    if devices is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu"), None
    if isinstance(devices, str) and devices in STRATEGIES:
        return None, devices
    if not isinstance(devices, Mapping):
        return usable_device(devices), None
    if not devices:
        raise LoadError(
            "Cannot spread the model over devices",
            "the map is empty",
            "Name a device for each module, or {'': 'cpu'} for all of them.",
        )
    device_map = {}
    for name, device in devices.items():
        text = str(device)
        if isinstance(device, int):
            text = f"cuda:{device}"
        if text != DISK:
            text = str(usable_device(text))
        device_map[str(name)] = text
    if set(device_map.values()) == {DISK}:
        raise LoadError(
            "Cannot load on disk alone",
            "no device is named that computes",
            "Put the embeddings on 'cpu' or on a GPU.",
        )
    return None, device_map


def usable_device(device: DeviceName) -> torch.device:
    """Return a device that exists and holds numbers."""
    import torch

    try:
        usable = torch.empty(0, device=device).device
        if usable.type == "meta":
            raise RuntimeError("a module on meta has no weights")
    except (RuntimeError, AssertionError) as error:
        raise LoadError(
            f"Cannot load on device {str(device)[:60]!r}",
            first_line(error),
            "Choose 'cpu', or 'auto' for whatever there is.",
        ) from error
    return usable


def spread_map(device_map: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """Return the map for accelerate: no name in it lies inside another.

    It raises unless the map names modules that exist and leaves no weight out.
    `module` may be without weights, on the meta device.

    >>> from torch import nn
    >>> two_layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> spread_map({"": "cpu", "1": "disk"}, two_layers)
    {'0': 'cpu', '1': 'disk'}
    """
    known = {
        *dict(module.named_modules()),
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    problem = "Cannot spread the model over devices"
    for name in device_map:
        if name not in known:
            # The children, and those of each.
            names = [
                path for path in dict(module.named_modules()) if path.count(".") < 2
            ]
            raise LoadError(
                problem,
                f"the map names {name[:80]!r}, and {type(module).__name__} has no such"
                " module",
                f"Its modules are {', '.join(names[:8])}.",
            )
    parts = {}
    for path, device in _parts_of_map(device_map, module, "", None):
        if device is None:
            raise LoadError(
                problem,
                f"the map leaves out {path!r}",
                "Name its module, or '' for everything that is not named.",
            )
        parts[path] = device
    if len(set(device_map.values())) == 1:
        return {"": next(iter(device_map.values()))}
    return parts


def _parts_of_map(
    device_map: Mapping[str, str], module: nn.Module, path: str, device: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield the largest parts that lie on one device; an inner name overrides.

    A weight that the map leaves out has None.
    """
    device = device_map.get(path, device)
    prefix = f"{path}." if path else ""
    names_inside = [name for name in device_map if name and name.startswith(prefix)]
    if path and device is not None and not names_inside:
        yield path, device
        return
    for name, weight in (*module._parameters.items(), *module._buffers.items()):
        if weight is not None:
            yield f"{prefix}{name}", device_map.get(f"{prefix}{name}", device)
    for name, part in module.named_children():
        yield from _parts_of_map(device_map, part, f"{prefix}{name}", device)


def spread_note(module: Any) -> str:
    """Say over which devices a spread model lies; empty for a single one."""
    counts: Counter[str] = Counter()
    for device in getattr(module, "hf_device_map", {}).values():
        counts[f"cuda:{device}" if isinstance(device, int) else str(device)] += 1
    if len(counts) < 2:
        return ""
    parts = [f"{count} on {name}" for name, count in counts.items()]
    return f"Its modules are spread over devices: {', '.join(parts)}."

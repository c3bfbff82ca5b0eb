"""Ways to load a model that is not a plain checkpoint: with adapters, or quantised.

A variant wraps what `hs.load` takes, and variants nest: an adapter on a quantised base
is `Adapted(Quantised("smollm2", "nf4"), "lora/")`. They are values: nothing is read
before they are loaded. This module imports no torch.

A folder may hold quantised weights itself. Its `quantization_config` is untrusted: it
is held to a table of the methods that transformers knows, before a library reads it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, LoadError, Unsafe
from hiddenscope.files import PathLike
from hiddenscope.loading.limits import walk

if TYPE_CHECKING:
    import torch
    from torch import nn

    Plain: TypeAlias = PathLike | nn.Module | tuple[nn.Module, Any]
    Base: TypeAlias = "Plain | ModelVariant | None"

SCHEMES = {
    "int8": "8-bit integers for weights (torchao)",
    "fp8": "8-bit floats for weights (torchao)",
    "bnb-int8": "8-bit integers with outliers apart, LLM.int8() (bitsandbytes)",
    "nf4": "4-bit normal floats for weights (bitsandbytes)",
    "fp4": "4-bit floats for weights (bitsandbytes)",
}
"""The schemes that `Quantised` takes, and what each does."""

# The classes with which torchao makes its schemes; bitsandbytes makes the others.
_TORCHAO = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
# The methods of transformers' `quantization_config`: what each imports, and where that
# comes from.
_METHODS = {
    "torchao": ("torchao", "hiddenscope[quantised]"),
    "bitsandbytes": ("bitsandbytes", "hiddenscope[quantised]"),
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "hqq": ("hqq", "hqq"),
    "compressed-tensors": ("compressed_tensors", "compressed-tensors"),
    "gptq": ("gptqmodel", "gptqmodel optimum"),
    "awq": ("gptqmodel", "gptqmodel"),
    "auto-round": ("auto_round", "auto-round"),
    "bitnet": ("transformers", "transformers"),
    "aqlm": ("aqlm", "aqlm"),
    "quark": ("quark", "amd-quark"),
    "fbgemm_fp8": ("fbgemm_gpu", "fbgemm-gpu"),
    "fp_quant": ("fp_quant", "fp_quant"),
    "higgs": ("flute", "flute-kernel"),
    "spqr": ("spqr_quant", "spqr_quant"),
    "vptq": ("vptq", "vptq"),
}
_GPU_METHODS = {"fbgemm_fp8", "fp_quant", "higgs", "spqr", "vptq"}
# Those whose code is fetched from a hub when it is used.
_DOWNLOADS = {"fp8", "mxfp8", "nvfp4", "eetq", "mxfp4", "metal"}
_CLASS_NAME = re.compile(r"torch\.dtype|[A-Z][A-Za-z0-9]{0,60}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


@checked
@dataclass(frozen=True)
class Quantised:
    """A model whose weights are quantised while they are loaded.

    `scheme` is one of "int8", "fp8", "bnb-int8", "nf4" and "fp4". A folder that was
    saved with quantised weights needs no scheme: load it by its path.

    >>> Quantised("smollm2", "int8").scheme
    'int8'
    """

    base: Base
    scheme: str

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise LoadError(
                f"No scheme {str(self.scheme)[:40]!r}",
                f"weights can be quantised to {', '.join(SCHEMES)}",
                "Name one of them.",
            )


@checked
@dataclass(frozen=True)
class Adapted:
    """A model with one or more PEFT adapters on top of it.

    `adapters` is a folder that PEFT wrote, or several; all of them are active at once.
    `strength` multiplies what they add: 1 is as trained, 0 the base. With `merged` they
    are added to the weights, as for deployment. Without a base, the folder names it.

    >>> Adapted("smollm2", "lora/", strength=0.5).folders
    ('lora/',)
    """

    base: Base
    adapters: PathLike | Sequence[PathLike]
    strength: float = 1.0
    merged: bool = False

    @property
    def folders(self) -> tuple[str, ...]:
        """Return the folders of all adapters."""
        if isinstance(self.adapters, str | os.PathLike):
            return (os.fspath(self.adapters),)
        return tuple(os.fspath(adapter) for adapter in self.adapters)

    def __post_init__(self) -> None:
        if not self.folders:
            raise LoadError(
                "Cannot adapt a model",
                "the list of adapters is empty",
                "Give the folder of an adapter, or load the base itself.",
            )
        if not math.isfinite(self.strength):
            raise LoadError(
                f"Cannot adapt a model at strength {self.strength}",
                "it is not a finite number",
                "Give 1 for the adapter as it was trained.",
            )


ModelVariant: TypeAlias = Adapted | Quantised


def variant_steps(source: Base) -> list[dict[str, Any]]:
    """Return the variants of a source as JSON, outermost first, without its base.

    >>> variant_steps(Adapted(Quantised("smollm2", "nf4"), "/lora"))
    [{'adapters': ['/lora'], 'strength': 1.0, 'merged': False}, {'scheme': 'nf4'}]
    """
    if isinstance(source, Quantised):
        return [{"scheme": source.scheme}, *variant_steps(source.base)]
    if not isinstance(source, Adapted):
        return []
    folders = [os.path.abspath(os.path.expanduser(path)) for path in source.folders]
    step = {"adapters": folders, "strength": source.strength, "merged": source.merged}
    return [step, *variant_steps(source.base)]


def with_steps(base: Base, steps: Sequence[dict[str, Any]]) -> Base:
    """Return a base with the variants that `variant_steps` listed.

    >>> with_steps("smollm2", [{"scheme": "nf4"}])
    Quantised(base='smollm2', scheme='nf4')
    """
    for step in reversed(steps):
        wrap = Quantised if "scheme" in step else Adapted
        base = wrap(base, **step)
    return base


def method_of(config: Mapping[str, Any]) -> str:
    """Return the method that a folder's config names; empty for plain weights.

    >>> method_of({"quantization_config": {"quant_method": "torchao"}})
    'torchao'
    """
    quantisation = config.get("quantization_config")
    method: object = None
    match quantisation:
        case None:
            return ""
        case {"quant_method": str() | list() as method}:
            pass
        # Early versions of bitsandbytes wrote no method.
        case {"load_in_8bit": True} | {"load_in_4bit": True}:
            method = "bitsandbytes"
    if isinstance(method, str) and method in {*_METHODS, *_DOWNLOADS}:
        return method
    raise LoadError(
        "Cannot load quantised weights",
        f"quantization_config names the method {str(method)[:60]!r}, and known are"
        f" {', '.join((*_METHODS, *sorted(_DOWNLOADS)))}",
        "Load it with its library and pass the live (module, tokenizer).",
    )


def check_quantised(
    path: str, config: Mapping[str, Any], device: torch.device | None
) -> None:
    """Raise unless the weights of a folder can be loaded here, and safely.

    Without a device the model is spread over several.
    """
    method = method_of(config)
    if not method:
        return
    problem = f"Cannot load {path}"
    reason = f"its weights are quantised with {method}"
    if method in _DOWNLOADS:
        raise Unsafe(
            problem,
            f"{reason}, whose kernels would be downloaded and run",
            "Load it with transformers yourself and pass the live (module, tokenizer).",
        )
    # A library would build any class that is named, or fetch code.
    for key, value in walk(config["quantization_config"]):
        if key == "_type" and not _CLASS_NAME.fullmatch(str(value)):
            raise Damaged(
                problem,
                f"its quantization_config names the class {str(value)[:60]!r}",
                "Download config.json again.",
            )
        names_code = "kernel" in key or "repo" in key or key == "trust_remote_code"
        is_named = isinstance(value, str) and _REPOSITORY.fullmatch(value)
        if names_code and (is_named or value is True):
            raise Unsafe(
                problem,
                f"its quantization_config has {key}={str(value)[:60]!r}, code that"
                " would be downloaded and run",
                f"Remove {key} from config.json.",
            )
    if method in _GPU_METHODS and device is not None and device.type == "cpu":
        raise LoadError(
            problem,
            f"{reason}, which computes on a GPU only",
            "Load it where there is one, or load the model before quantisation.",
        )
    require_package(problem, reason, *_METHODS[method])


def require_package(problem: str, reason: str, module: str, package: str) -> None:
    """Raise LoadError unless a module that is needed can be imported."""
    if not is_installed(module):
        raise LoadError(
            problem,
            f"{reason}, and {module} is not installed",
            f"Run: pip install {package}",
        )


def is_installed(module: str) -> bool:
    """Tell whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that would hold it is missing.
        return False


def scheme_config(
    scheme: str, path: str, config: Mapping[str, Any], dtype: torch.dtype | str
) -> Any:
    """Return transformers' configuration of a scheme of `Quantised`."""
    problem = f"Cannot quantise {path}"
    method = method_of(config)
    if method:
        raise LoadError(
            problem,
            f"its weights are quantised with {method} already",
            "Load it as it is, or quantise the original.",
        )
    library = "torchao" if scheme in _TORCHAO else "bitsandbytes"
    require_package(problem, f"{scheme} needs {library}", *_METHODS[library])
    import transformers

    if library == "torchao":
        quantization = importlib.import_module("torchao.quantization")
        return transformers.TorchAoConfig(getattr(quantization, _TORCHAO[scheme])())
    _quieten_bitsandbytes()
    configure: Any = transformers.BitsAndBytesConfig
    if scheme == "bnb-int8":
        return configure(load_in_8bit=True, bnb_4bit_compute_dtype=dtype)
    return configure(
        load_in_4bit=True, bnb_4bit_quant_type=scheme, bnb_4bit_compute_dtype=dtype
    )


@cache
def _quieten_bitsandbytes() -> None:
    """Let bitsandbytes say only once that it rounds inputs to float16.

    It says so in every call of every layer.
    """
    passed: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        before = len(passed)
        passed.add(record.getMessage())
        return len(passed) > before

    logging.getLogger("bitsandbytes.autograd._functions").addFilter(is_new)

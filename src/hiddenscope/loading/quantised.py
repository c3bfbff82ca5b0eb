"""Quantised weights: the schemes that `Quantised` names, and folders that hold them.

A folder's `quantization_config` is untrusted. It is held to a table of the methods that
transformers knows: what each needs, whether it computes on a CPU, and whether it would
download code. All of that is checked before a library reads the folder.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hiddenscope.errors import Damaged, LoadError, Unsafe
from hiddenscope.loading.limits import walk

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class QuantisationMethod:
    """What a way to quantise needs: a module to import, its package, and a device.

    `downloads` says that its code is fetched from a hub when it is used.
    """

    module: str
    package: str
    needs_gpu: bool = False
    downloads: bool = False


METHODS = {
    "torchao": QuantisationMethod("torchao", "hiddenscope[quantised]"),
    "bitsandbytes": QuantisationMethod("bitsandbytes", "hiddenscope[quantised]"),
    "quanto": QuantisationMethod("optimum.quanto", "optimum-quanto"),
    "hqq": QuantisationMethod("hqq", "hqq"),
    "compressed-tensors": QuantisationMethod(
        "compressed_tensors", "compressed-tensors"
    ),
    "gptq": QuantisationMethod("gptqmodel", "gptqmodel optimum"),
    "awq": QuantisationMethod("gptqmodel", "gptqmodel"),
    "auto-round": QuantisationMethod("auto_round", "auto-round"),
    "bitnet": QuantisationMethod("transformers", "transformers"),
    "aqlm": QuantisationMethod("aqlm", "aqlm"),
    "quark": QuantisationMethod("quark", "amd-quark"),
    "fbgemm_fp8": QuantisationMethod("fbgemm_gpu", "fbgemm-gpu", needs_gpu=True),
    "fp_quant": QuantisationMethod("fp_quant", "fp_quant", needs_gpu=True),
    "higgs": QuantisationMethod("flute", "flute-kernel", needs_gpu=True),
    "spqr": QuantisationMethod("spqr_quant", "spqr_quant", needs_gpu=True),
    "vptq": QuantisationMethod("vptq", "vptq", needs_gpu=True),
    "fp8": QuantisationMethod("kernels", "kernels", needs_gpu=True, downloads=True),
    "mxfp8": QuantisationMethod("kernels", "kernels", needs_gpu=True, downloads=True),
    "nvfp4": QuantisationMethod("kernels", "kernels", needs_gpu=True, downloads=True),
    "eetq": QuantisationMethod("kernels", "kernels", needs_gpu=True, downloads=True),
    "mxfp4": QuantisationMethod("kernels", "kernels", downloads=True),
    "metal": QuantisationMethod("kernels", "kernels", downloads=True),
}
"""The methods of transformers' `quantization_config` that are known."""

_CLASS_NAME = re.compile(r"torch\.dtype|[A-Z][A-Za-z0-9]{0,60}")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+)?")


def method_of(config: Mapping[str, Any]) -> str:
    """Return the method that a folder's config names; empty for plain weights.

    >>> method_of({"quantization_config": {"quant_method": "torchao"}})
    'torchao'
    """
    quantisation = config.get("quantization_config")
    if quantisation is None:
        return ""
    method = None
    if isinstance(quantisation, Mapping):
        method = quantisation.get("quant_method")
        if method is None and _names_bitsandbytes(quantisation):
            method = "bitsandbytes"
    if not isinstance(method, str) or method not in METHODS:
        raise LoadError(
            "Cannot load quantised weights",
            f"quantization_config names the method {str(method)[:60]!r}, and known are"
            f" {', '.join(METHODS)}",
            "Load it with its library and pass the live (module, tokenizer).",
        )
    return method


def _names_bitsandbytes(quantisation: Mapping[str, Any]) -> bool:
    # Early versions wrote no method.
    return bool(quantisation.get("load_in_8bit") or quantisation.get("load_in_4bit"))


def check_quantised(
    path: str, config: Mapping[str, Any], device: torch.device | None
) -> None:
    """Raise unless the weights of a folder can be loaded here, and safely.

    Without a device the model is spread over several.
    """
    method = method_of(config)
    if not method:
        return
    needs = METHODS[method]
    problem = f"Cannot load {path}"
    if needs.downloads:
        raise Unsafe(
            problem,
            f"its weights are quantised with {method}, whose kernels would be"
            " downloaded and run",
            "Load it with transformers yourself and pass the live (module, tokenizer).",
        )
    _check_values(problem, config["quantization_config"])
    if needs.needs_gpu and device is not None and device.type == "cpu":
        raise LoadError(
            problem,
            f"its weights are quantised with {method}, which computes on a GPU only",
            "Load it where there is one, or load the model before quantisation.",
        )
    require_package(problem, f"its weights are quantised with {method}", needs)


def _check_values(problem: str, quantisation: Mapping[str, Any]) -> None:
    """Refuse values that would make a library fetch code or build any class."""
    for key, value in walk(quantisation):
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


def require_package(problem: str, reason: str, needs: QuantisationMethod) -> None:
    """Raise LoadError unless the package of a method is installed."""
    for name in (needs.module, "accelerate"):
        if _is_installed(name):
            continue
        package = name if name == "accelerate" else needs.package
        raise LoadError(
            problem,
            f"{reason}, and {name} is not installed",
            f"Run: pip install {package}",
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
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
    library, build = _SCHEMES[scheme]
    require_package(problem, f"{scheme} needs {library}", METHODS[library])
    if library == "bitsandbytes":
        _quieten_bitsandbytes()
    return build(dtype)


def _torchao(kind: str) -> Callable[[Any], Any]:
    def build(dtype: Any) -> Any:
        import transformers

        scheme = getattr(import_module("torchao.quantization"), kind)
        return transformers.TorchAoConfig(scheme())

    return build


def _bitsandbytes(**options: Any) -> Callable[[Any], Any]:
    def build(dtype: Any) -> Any:
        import transformers

        config: Any = transformers.BitsAndBytesConfig
        return config(**options, bnb_4bit_compute_dtype=dtype)

    return build


_SCHEMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "int8": ("torchao", _torchao("Int8WeightOnlyConfig")),
    "fp8": ("torchao", _torchao("Float8WeightOnlyConfig")),
    "bnb-int8": ("bitsandbytes", _bitsandbytes(load_in_8bit=True)),
    "nf4": (
        "bitsandbytes",
        _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    ),
    "fp4": (
        "bitsandbytes",
        _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    ),
}


@cache
def _quieten_bitsandbytes() -> None:
    """Let bitsandbytes say only once that it rounds inputs to float16.

    It says so in every call of every layer.
    """
    logging.getLogger("bitsandbytes.autograd._functions").addFilter(_Once())


class _Once(logging.Filter):
    """Passes each message the first time only."""

    def __init__(self) -> None:
        super().__init__()
        self.passed: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self.passed
        self.passed.add(message)
        return is_new

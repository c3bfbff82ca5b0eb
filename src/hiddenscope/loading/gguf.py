"""Check a GGUF header before any library trusts it, and convert the weights.

A GGUF header is a list of keys and values and a list of tensors, each with counts and
lengths that the file itself gives. A count that the size of the file cannot hold is
refused here, before anything is allocated for it.
"""

from __future__ import annotations

import mmap
import shutil
import struct
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any

from hiddenscope import progress
from hiddenscope.errors import Damaged, FileError, LoadError, without_panic
from hiddenscope.files import check_file
from hiddenscope.loading import limits
from hiddenscope.loading.cache import working_folder
from hiddenscope.loading.checkpoint import quiet_transformers

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_SMALLEST_KEY = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_LONGEST_NAME = 65_535
_MOST_AXES = 8
# gguf makes an object of each item: the largest vocabularies of today make 1.3 million.
_MOST_ITEMS = 4_000_000


# Part of the name of a converted folder: raised when the same file would be converted
# otherwise.
CONVERSION = 2


@dataclass(frozen=True)
class GGUFHeader:
    """What a GGUF file says of itself: its metadata (arrays as their lengths) and the
    weights that it holds.
    """

    metadata: dict[str, Any]
    elements: int
    held: limits.WeightTotals


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header of a GGUF file."""
    size = check_file(path, f"Cannot read {path.name}")
    if size < 24:
        raise _damaged(path, f"it has {size} bytes, fewer than a GGUF header")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _Reader(path, content).header()


class _Reader:
    """Reads a header, and never past the end of the file."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.size, self.at = path, content, len(content), 0
        self.items = 0

    def header(self) -> GGUFHeader:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        self.expect(self.content[:4] == b"GGUF", "it does not begin with 'GGUF'")
        self.at = 4
        version, tensors, keys = self.scalar("I"), self.scalar("Q"), self.scalar("Q")
        self.expect(
            version in (2, 3),
            f"it is of GGUF version {version}; only versions 2 and 3, little-endian,"
            " can be read",
        )
        self.fits(keys, _SMALLEST_KEY, "keys")
        self.fits(tensors, _SMALLEST_TENSOR, "tensors")
        metadata = {}
        for _ in range(keys):
            key = self.string(_LONGEST_NAME)
            self.expect(key not in metadata, f"the key {key[:80]!r} is there twice")
            metadata[key] = self.value(self.scalar("I"))
        table = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        is_number = isinstance(alignment, int) and 0 < alignment <= 2**20
        self.expect(is_number, f"its alignment is {alignment!r}")
        begin = -(-self.at // alignment) * alignment
        end = longest = elements = 0
        for name, shape, kind, offset in sorted(table, key=lambda entry: entry[3]):
            tensor = f"the tensor {name[:80]!r}"
            is_known = kind in GGMLQuantizationType.__members__.values()
            self.expect(is_known, f"{tensor} is of the unknown type {kind}")
            per_block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            # Many tensors in one place would be far more than the file, once unpacked.
            self.expect(offset >= end, f"{tensor} begins inside another")
            end = offset + prod(shape) // per_block * width
            is_inside = begin + end <= self.size
            self.expect(is_inside, f"{tensor} reaches past the end of the file")
            longest = max(longest, *shape)
            elements += prod(shape)
        names = {name for name, *_ in table}
        self.expect(len(names) == tensors, "two tensors have the same name")
        held = limits.WeightTotals(tensors, self.size, longest)
        entries = ((key.rpartition(".")[2], value) for key, value in metadata.items())
        limits.check_counts(entries, held, self.path.name)
        return GGUFHeader(metadata, elements, held)

    def scalar(self, code: str) -> Any:
        width = struct.calcsize(f"<{code}")
        self.fits(1, width, "values")
        (value,) = struct.unpack_from(f"<{code}", self.content, self.at)
        self.at += width
        return value

    def string(self, longest: int | None = None) -> str:
        length = self.scalar("Q")
        self.fits(length, 1, "characters")
        if longest is not None:
            reason = f"it has a name of {length:,} characters"
            self.expect(length <= longest, reason)
        begin, self.at = self.at, self.at + length
        return self.content[begin : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read a scalar or a string; skip over an array and return its length."""
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        is_array = kind == _ARRAY and depth <= 3
        self.expect(is_array, f"it has a value of the unknown type {kind}")
        inner, count = self.scalar("I"), self.scalar("Q")
        # A string or an array begins with a length of 8 bytes.
        width = 8
        if inner in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[inner]}")
        self.fits(count, width, "items in an array")
        self.items += count
        self.expect(
            self.items <= _MOST_ITEMS,
            f"its arrays have more than {_MOST_ITEMS:,} items, the last of them"
            f" {count:,}",
        )
        if inner in _SCALARS:
            self.at += count * width
        elif inner == _STRING:
            self.skip_strings(count)
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return count

    def skip_strings(self, count: int) -> None:
        length_of = struct.Struct("<Q").unpack_from
        for _ in range(count):
            self.fits(1, 8, "strings")
            self.at += 8 + length_of(self.content, self.at)[0]
        self.fits(0, 1, "strings")

    def tensor(self) -> tuple[str, list[int], int, int]:
        name, axes = self.string(_LONGEST_NAME), self.scalar("I")
        reason = f"the tensor {name[:80]!r} has {axes:,} axes"
        self.expect(0 < axes <= _MOST_AXES, reason)
        shape = [self.scalar("Q") for _ in range(axes)]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def expect(self, holds: bool, reason: str) -> None:
        if not holds:
            raise _damaged(self.path, reason)

    def fits(self, count: int, width: int, what: str) -> None:
        if self.at + count * width > self.size:
            raise _damaged(
                self.path,
                f"it claims {count:,} {what} at byte {self.at:,} of {self.size:,}",
            )


def convert(source: Path, folder: Path) -> None:
    """Write a GGUF file as a safetensors folder in float32.

    float32 holds every unpacked value exactly.
    """
    header = read_header(source)
    needed, free = 4 * header.elements, shutil.disk_usage(folder.parent).free
    if needed > free:
        raise FileError(
            f"Cannot convert {source.name}",
            f"in float32 it takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are"
            f" free in {folder.parent}",
            "Set HIDDENSCOPE_CACHE to a folder on a larger disk.",
        )
    progress.note(
        f"Converting {source.name} to safetensors: this is done once and takes a while."
    )
    bar = progress.track(f"Converting {source.name}", total=3)
    # transformers would read a tokenizer that lies beside the file.
    lonely = working_folder(folder.parent, "gguf")
    with bar as advance, quiet_transformers(), lonely as beside:
        path = beside / source.name
        try:
            path.symlink_to(source.resolve())
        except OSError:
            # Some file systems allow no links.
            shutil.copyfile(source, path)
        try:
            with without_panic(
                Damaged,
                f"Cannot read the tokenizer of {source.name}",
                "Download the file again.",
            ):
                tokenizer = read_tokenizer(path, header)
            advance(1)
            module = read_module(path, header)
            advance(1)
            module.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            advance(1)
        except (OSError, LoadError):
            raise
        except Exception as error:
            remedy = "Use a safetensors version of the model if there is one."
            raise LoadError(
                f"Cannot convert {path.name}",
                str(error)[:300] or type(error).__name__,
                remedy,
            ) from error


def read_module(path: Path, header: GGUFHeader) -> Any:
    """Read the module of a checked GGUF file, unpacked to float32."""
    import torch
    import transformers

    if int(header.metadata.get("split.count", 1)) > 1:
        raise LoadError(
            f"Cannot convert {path.name}",
            "it is one part of several",
            "Join the parts into one file first.",
        )
    options = {
        "gguf_file": path.name,
        "local_files_only": True,
        "trust_remote_code": False,
    }
    config = transformers.AutoConfig.from_pretrained(str(path.parent), **options)
    loader: Any = transformers.AutoModel
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        loader = transformers.AutoModelForCausalLM
    elif type(config) in transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        loader = transformers.AutoModelForSeq2SeqLM
    unpacked = getattr(transformers, "GgufConfig", None)
    if unpacked is not None:
        # Newer versions may otherwise keep the blocks packed and download a kernel.
        options["quantization_config"] = unpacked(dequantize=True)
    numbers = {
        key: value
        for key, value in header.metadata.items()
        if not key.startswith(("tokenizer.", "general."))
    }
    # No option disables the progress bar of this.
    bounded = limits.building(header.held, numbers, path.name)
    with redirect_stderr(StringIO()), bounded:
        module, info = loader.from_pretrained(
            str(path.parent), dtype=torch.float32, output_loading_info=True, **options
        )
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted(map(str, info["missing_keys"] or info["mismatched_keys"]))
        raise _damaged(
            path,
            f"it has no weights for {len(missing)} parameters, such as {missing[0]}",
        )
    # A quantiser would refuse to save plain float32 weights.
    for name in ("hf_quantizer", "quantization_method"):
        if hasattr(module, name):
            delattr(module, name)
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.is_quantized = False
    return module


def read_tokenizer(path: Path, header: GGUFHeader) -> Any:
    """Read the tokenizer of a checked GGUF file.

    It adds the begin and end tokens that the metadata asks for.
    """
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(path.parent),
        gguf_file=path.name,
        local_files_only=True,
        trust_remote_code=False,
    )
    metadata = header.metadata
    adds_bos = metadata.get(
        "tokenizer.ggml.add_bos_token", metadata.get("tokenizer.ggml.model") == "llama"
    )
    special = {"bos": bool(adds_bos)}
    if "tokenizer.ggml.add_eos_token" in metadata:
        special["eos"] = bool(metadata["tokenizer.ggml.add_eos_token"])
    for which, present in special.items():
        if _adds(tokenizer, which) != present:
            # The converted tokenizer drops these tokens, and a model trained with <bos>
            # writes nonsense without it.
            setattr(tokenizer, f"add_{which}_token", present)
        if _adds(tokenizer, which) != present:
            raise _damaged(
                path, f"its tokenizer does not follow add_{which}_token={present}"
            )
    for key, value in metadata.items():
        if key.endswith(".context_length"):
            if isinstance(value, int):
                tokenizer.model_max_length = value
            break
    return tokenizer


def _adds(tokenizer: Any, which: str) -> bool:
    ids = tokenizer("a")["input_ids"]
    token = getattr(tokenizer, f"{which}_token_id")
    place = 0 if which == "bos" else -1
    return token is not None and ids[place] == token


def _damaged(path: Path, reason: str) -> Damaged:
    remedy = "Download the file again: it is cut short or was changed."
    return Damaged(f"Cannot read {path.name}", reason, remedy)

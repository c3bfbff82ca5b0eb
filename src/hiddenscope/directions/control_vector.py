"""Control vectors: directions as llama.cpp and repeng read them, in a GGUF file.

`direction.N` is what llama.cpp adds to the output of its block N, counted from 0. That
is layer N+1 here: its loader puts `direction.N` at place N-1 of a buffer whose first
place belongs to block 1. Block 0 has no place, and a name with 0 is refused there.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import FileError, NotFinite, SiteError
from hiddenscope.files import PathLike, reading, replacing
from hiddenscope.loading.gguf import read_header
from hiddenscope.results import Facts
from hiddenscope.sites import Site

ARCHITECTURE = "controlvector"
FIRST_LAYER = 2
_NAME = re.compile(r"direction\.(?P<block>[0-9]{1,6})")
_HINT = f"{ARCHITECTURE}.model_hint"
_FACTS = "hiddenscope.facts"


def block_of(site: Site) -> int:
    """Return llama.cpp's number of the block whose output a site is, or raise.

    >>> block_of(Site(2))
    1
    """
    problem = f"Cannot write the direction at {site} to a control vector"
    if site.layer is None or site.part or site.stack == "encoder":
        raise SiteError(
            problem,
            "llama.cpp changes the outputs of a decoder's blocks and nothing else",
            "Give layers: save(path, sites='layer.2-9').",
        )
    if site.layer < FIRST_LAYER:
        raise SiteError(
            problem,
            f"llama.cpp changes nothing below layer.{FIRST_LAYER}, the output of its"
            " block 1",
            "Leave it out: save(path, sites='layer.2-9').",
        )
    return site.layer - 1


def write_control_vector(
    path: PathLike,
    vectors: Mapping[Site, Tensor],
    hint: str,
    facts: Facts,
) -> None:
    """Write vectors by site, as float32; `hint` is the kind of the model."""
    from gguf import GGUFWriter

    by_block = {block_of(site): vector for site, vector in vectors.items()}
    with replacing(path) as fresh:
        writer = GGUFWriter(fresh, ARCHITECTURE)
        writer.add_string(_HINT, hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(by_block))
        writer.add_string(_FACTS, json.dumps(facts))
        for block, vector in sorted(by_block.items()):
            writer.add_tensor(f"direction.{block}", vector.float().numpy())
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def read_control_vector(
    path: PathLike,
) -> tuple[dict[str, Tensor], str, Facts]:
    """Read vectors by the names of their sites, the hint and the facts."""
    from gguf import GGUFReader

    problem = f"Cannot read a control vector from {ascii(Path(path).name)[1:-1]}"
    with reading(problem):
        # The reader of gguf believes every count, and makes an object of each item.
        read_header(Path(path))
        reader = GGUFReader(path)
        architecture = _string(reader, "general.architecture")
        if architecture != ARCHITECTURE:
            reason = f"it is a GGUF file of {architecture[:40]!a}"
            raise FileError(problem, reason, "Give a file of control vectors.")
        vectors = {}
        for tensor in reader.tensors:
            match = _NAME.fullmatch(tensor.name)
            if match is None or int(match["block"]) < 1:
                reason = f"a tensor is called {tensor.name[:40]!a}"
                remedy = "They are called direction.1, direction.2 and so on."
                raise FileError(problem, reason, remedy)
            values = np.array(tensor.data)
            if values.ndim != 1 or values.dtype != np.float32:
                reason = f"{tensor.name} is {values.dtype} {list(values.shape)}"
                raise FileError(problem, reason, "Give float32 vectors.")
            if not np.isfinite(values).all():
                reason = f"{tensor.name} has a NaN or an infinity"
                raise NotFinite(problem, reason, "Give finite numbers.")
            site = Site(int(match["block"]) + 1)
            vectors[str(site)] = torch.from_numpy(values).double()
        # repeng writes no facts.
        facts = json.loads(_string(reader, _FACTS) or "{}")
        hint = _string(reader, _HINT)
    if not vectors:
        raise FileError(problem, "it has no vectors", "Give one with vectors.")
    return vectors, hint, facts if isinstance(facts, dict) else {}


def _string(reader: Any, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())

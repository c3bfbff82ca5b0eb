"""Ports: programs that compute the reference's states under other names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.dtypes import (
    Digits,
    digits_of_embeddings,
    majority_dtype,
    name_of,
    narrowest,
    with_digits,
)
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.noise import coarsest
from hiddenscope.analyses.drift.observe import observe
from hiddenscope.analyses.drift.pairing import Pairs, pair, texts_for_pairing
from hiddenscope.analyses.drift.program import Program, is_compiled, values_of
from hiddenscope.analyses.drift.result import DriftComparison
from hiddenscope.analyses.drift.sides import tokens_of
from hiddenscope.analyses.drift.whole import compare_passes
from hiddenscope.errors import PassError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, PaddedBatch, require_recordable
from hiddenscope.sites import Site


def pair_program(
    reference: LiveModel,
    program: Program,
    inputs: Inputs,
    pairing: Mapping[str, str] | str | None,
) -> Pairs:
    """Pair the tensors of a program with the reference's sites."""
    module = _open_module(program)
    if module is not None:
        require_recordable(module)
    texts = texts_for_pairing(inputs)
    values = values_of(program, _single_batches(reference, program, texts))
    layers = [site for site in reference.sites if not site.part]
    passes = []
    for text in range(len(texts)):
        passes.append(observe(reference, texts.some([text]), layers))
    reference.passes = 0  # pairing is not part of the comparison
    rows = {}
    for name in passes[0].states:
        rows[name] = torch.cat([observed.rows(name) for observed in passes])
    pairs = pair(values, rows, reference.anatomy, module, pairing)
    unpaired = []
    for name in rows:
        if name not in pairs.values and name != LOGITS:
            unpaired.append(f"`{name}`")
    if unpaired:
        names = ", ".join(unpaired)
        pairs.notes.append(
            f"No tensor of the candidate was paired with {names}: not compared."
        )
    return pairs


def _open_module(program: Program) -> nn.Module | None:
    """Return a program as a module whose parts can be hooked, or None."""
    if isinstance(program, nn.Module) and not is_compiled(program):
        return program
    return None


def _single_batches(
    reference: LiveModel, program: Program, inputs: Inputs
) -> list[PaddedBatch]:
    """Return each text by itself, on the program's device if it is a module."""
    model = reference
    if isinstance(program, nn.Module):
        model = replace(reference, module=program)
    return [model.batch(inputs.some([text])) for text in range(len(inputs))]


def as_port(program: Program, reference: LiveModel, pairs: Pairs) -> LiveModel | None:
    """Return a program as a side whose blocks can be entered, if these are known."""
    module = _open_module(program)
    if module is None:
        return None
    taps, blocks = {}, {}
    for name, value in pairs.values.items():
        if value.tap is None:
            continue
        site = Site.parse(name)
        taps[site] = value.tap
        if site.layer and value.tap.side == "output":
            blocks[site] = value.tap.path
    if len(blocks) < 2:
        return None
    return LiveModel(
        type(module).__name__,
        module,
        reference.anatomy,
        reference.pad,
        majority_dtype(module),
        taps,
        blocks,
        is_port=True,
    )


def compare_returned(
    model: Model, reference: LiveModel, program: Program, inputs: Inputs, pairs: Pairs
) -> DriftComparison:
    """Compare the tensors that a program returns with whole passes of the reference."""
    rows = _paired_rows(reference, program, inputs, pairs)
    states = [tensor for name, tensor in rows.items() if name != LOGITS]
    states = states or list(rows.values())
    dtype = narrowest(states, coarsest(tensor.dtype for tensor in states))
    digits = Digits()
    embeddings = rows.get("layer.0")
    is_wide = dtype.itemsize >= majority_dtype(model.module).itemsize
    if embeddings is not None and is_wide:
        digits = digits_of_embeddings(embeddings, model.module)
    rounded = replace(reference, module=with_digits(model.module, digits.reference))
    readers = {name: tensor.__getitem__ for name, tensor in rows.items()}
    errors = compare_passes(rounded, model, readers, dtype, inputs)
    errors.passes["candidate"] = 1
    errors.notes += digits.notes
    module = getattr(program, "_orig_mod", program)
    name = getattr(program, "__name__", type(module).__name__)
    sources = [model.source(None).to_json(), {"model": name, "dtype": name_of(dtype)}]
    return DriftComparison(
        (model.name, name),
        errors,
        tokens_of(model, inputs),
        sources,
        pairs.facts(reference),
    )


def _paired_rows(
    reference: LiveModel, program: Program, inputs: Inputs, pairs: Pairs
) -> dict[str, Tensor]:
    """Run a program on all texts and return its rows for each paired site."""
    values = {}
    for value in values_of(program, _single_batches(reference, program, inputs)):
        values[value.name] = value.rows
    rows: dict[str, Tensor] = {}
    for site, value in pairs.values.items():
        if value.name not in values:
            reason = f"{value.name} has no row for each token of every text"
            remedy = "Pair tensors that every text gives."
            raise PassError("Cannot compare the candidate", reason, remedy)
        rows[site] = values[value.name].cpu()
    return rows

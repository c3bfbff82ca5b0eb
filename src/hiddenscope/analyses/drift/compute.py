"""Two sides, and the most informative comparison that they allow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from hiddenscope.analyses.drift.cause import compare_weights, explain
from hiddenscope.analyses.drift.compare import (
    Claim,
    ComparedSides,
    RecordedRun,
    compare_parts,
    compare_recorded,
)
from hiddenscope.analyses.drift.errors import Errors, divergence
from hiddenscope.analyses.drift.hints import describe_hint
from hiddenscope.analyses.drift.live_model import (
    LOGITS,
    BareModule,
    Digits,
    LiveModel,
    Program,
    as_candidate,
    as_live,
    check_tokenizers,
    encode,
    name_of,
    narrowest,
    tokens_of,
)
from hiddenscope.analyses.drift.observe import ObservedState, observe
from hiddenscope.analyses.drift.pairing import pair_program
from hiddenscope.analyses.drift.ports import PortSearch
from hiddenscope.analyses.drift.result import (
    DriftComparison,
    read_baseline,
    write_baseline,
)
from hiddenscope.analyses.drift.saved import (
    SavedRun,
    as_saved,
    compare_model_with_saved,
    compare_two_saved,
    open_saved,
)
from hiddenscope.analyses.drift.search import Search
from hiddenscope.analyses.drift.story import Baseline, Pairing, Restored
from hiddenscope.analyses.drift.systematic import coarsest
from hiddenscope.errors import ModuleError, StatesError
from hiddenscope.files import PathLike
from hiddenscope.model import Model, load
from hiddenscope.modules.operations import tell_of_slow_products
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Readable
from hiddenscope.states.foreign_names import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reference: TypeAlias = (
    Model
    | Readable
    | str
    | os.PathLike[str]
    | tuple[nn.Module, "PreTrainedTokenizerBase | None"]
)
Candidate: TypeAlias = Reference | tuple[nn.Module, Any] | nn.Module | Program
Opened: TypeAlias = Model | SavedRun | BareModule | Program
# An error may be this many times an accepted level: levels vary with the texts.
BASELINE_MARGIN = 2
# Texts up to this many tokens are used to search for the module at fault in a port.
SEARCH_TOKENS = 512
# Changes of all weights, behind which there is no module to search for.
INTENDED = ("quantisation", "adapter")
# Sites whose states are restored one at a time.
MOST_RESTORED = 4


def compare_sides(
    reference: Reference,
    candidate: Candidate,
    texts: Texts | Inputs | None,
    *,
    sites: SitePatterns,
    pairing: Mapping[str, str] | str | None,
    baseline: PathLike | None,
    low_memory: bool,
) -> Result:
    """Compare two sides, and say which module is at fault."""
    # Read before the models run, so that an unusable file is reported at once.
    levels = None if baseline is None else read_baseline(baseline)
    options = _Options(pairing, low_memory, levels or {})
    opened_reference = _open_side(reference, "reference")
    opened_candidate = _open_side(candidate, "candidate")
    if isinstance(opened_reference, Model):
        # Nothing runs for sites that are not there.
        opened_reference.anatomy.select(sites)
    comparison = _compare(opened_reference, opened_candidate, texts, options)
    accepted = None
    if baseline is not None:
        path = os.fspath(baseline)
        count = len(levels or {})
        if levels is None:
            verdicts = comparison.errors.verdicts
            errors = {name: verdict.error for name, verdict in verdicts.items()}
            count = write_baseline(path, errors)
        accepted = Baseline(file=path, written=levels is None, sites=count)
    reference_side, candidate_side = comparison.sides
    source = {**reference_side.source, "candidate": candidate_side.source}
    report = comparison.report(accepted)
    return Result("drift", comparison.dataset(sites), report, source)


@dataclass(frozen=True)
class _Options:
    """The pairing of a port, whether to save memory, and accepted errors by site."""

    pairing: Mapping[str, str] | str | None
    low_memory: bool
    accepted: Mapping[str, float]

    def accept(self, errors: Errors) -> None:
        """Accept the errors of a baseline before the search for a fault."""
        for name, level in self.accepted.items():
            errors.accept(name, BASELINE_MARGIN * level)


def _open_side(side: object, who: str) -> Opened:
    """Return one side as a model, a saved run, a bare module or a function."""
    if isinstance(side, Model):
        return side
    saved = as_saved(side)
    if saved is not None:
        return saved
    if isinstance(side, str | os.PathLike):
        return open_saved(Path(side)) or load(side)
    tokenizer = None
    if isinstance(side, tuple) and len(side) == 2 and isinstance(side[0], nn.Module):
        side, tokenizer = side
    if isinstance(side, nn.Module):
        tell_of_slow_products(side, type(side).__name__)
        return BareModule(side, tokenizer)
    if callable(side) and not isinstance(side, type):
        return side
    remedy = "Give a model, saved states, or a function of token ids."
    raise ModuleError(f"Cannot compare the {who}", f"got {type(side).__name__}", remedy)


def _as_model(side: Opened, who: str) -> Model:
    """Return a side as a model whose states are proved."""
    if isinstance(side, Model):
        return side
    if isinstance(side, BareModule):
        return load((side.module, side.tokenizer))
    remedy = "Give a model on one side at least."
    raise ModuleError(f"Cannot use the {who} alone", "it is not a model", remedy)


def _compare(
    reference: Opened,
    candidate: Opened,
    texts: Texts | Inputs | None,
    options: _Options,
) -> DriftComparison:
    """Compare two sides in the most informative way that they allow."""
    saved = [side for side in (reference, candidate) if isinstance(side, SavedRun)]
    if saved and options.pairing is not None:
        reason = "saved states are paired by their sites"
        raise StatesError("Cannot use the pairing", reason, "Leave it out.")
    if len(saved) == 2:
        comparison = compare_two_saved(*saved)
    elif saved:
        is_reference = saved[0] is reference
        side, who = reference, "reference"
        if is_reference:
            side, who = candidate, "candidate"
        comparison = compare_model_with_saved(
            _as_model(side, who), saved[0], texts, saved_is_reference=is_reference
        )
    else:
        assert not isinstance(candidate, SavedRun)
        model = _as_model(reference, "reference")
        live_reference = as_live(model)
        inputs = encode(model, texts)
        live = None
        if isinstance(candidate, Model | BareModule):
            program: Program = candidate.module
            check_tokenizers(inputs, candidate)
            if options.pairing is None:
                live = as_candidate(candidate, model)
        else:
            program = candidate
        if live is not None:
            return _compare_live(live_reference, live, inputs, options)
        comparison = _compare_program(live_reference, program, inputs, options)
    if comparison.compared == "passes":
        options.accept(comparison.errors)
    if options.low_memory:
        comparison.errors.notes.append(
            "Low memory was not used: it needs two live models with the same modules."
        )
    return comparison


def _compare_live(
    reference: LiveModel, candidate: LiveModel, inputs: Inputs, options: _Options
) -> DriftComparison:
    """Compare two models with the same modules part by part."""
    places = {}
    for site, tap in reference.taps.items():
        other = candidate.taps.get(site)
        if not site.part and other is not None:
            places[str(site)] = str(tap), str(other)
    by = "path" if candidate.taps is reference.taps else "site"
    pairing = Pairing.of(by, places)
    sides = ComparedSides.on_equal_terms(reference, candidate)
    # Always in one order, so that two comparisons cannot wait for each other.
    models = sorted([reference.loaded, candidate.model or reference.loaded], key=id)
    with models[0].lock, models[1].lock:
        return _compare_by_parts(sides, inputs, pairing, options)


def _compare_program(
    reference: LiveModel, program: Program, inputs: Inputs, options: _Options
) -> DriftComparison:
    """Compare a program part by part if its blocks can be entered, else as a whole."""
    with reference.loaded.lock:
        pairs = pair_program(reference, program, inputs, options.pairing)
        facts = pairs.facts(reference)
        port = pairs.port(program, reference)
        if port is None:
            # Only what it returns can be seen: whole passes are compared.
            rows = pairs.rows(program, reference, inputs)
            states = [tensor for name, tensor in rows.items() if name != LOGITS]
            states = states or list(rows.values())
            dtype = narrowest(states, coarsest(tensor.dtype for tensor in states))
            digits = Digits()
            # The candidate's weights are unknown: its embeddings show their digits.
            embeddings = rows.get("layer.0")
            is_wide = dtype.itemsize >= reference.dtype.itemsize
            if embeddings is not None and is_wide:
                saved = narrowest([embeddings], embeddings.dtype)
                if saved != embeddings.dtype:
                    digits = Digits.saved_in(saved, reference.module)
            module = getattr(program, "_orig_mod", program)
            name = getattr(program, "__name__", type(module).__name__)
            source = {"model": name, "dtype": name_of(dtype)}
            claims = {
                name: Claim(name, tensor.__getitem__) for name, tensor in rows.items()
            }
            tokens = tokens_of(reference.loaded, inputs)
            notes = digits.notes
            run = RecordedRun(name, source, dtype, tokens, claims, notes, passes=1)
            rounded = reference.with_digits(digits.reference)
            errors = compare_recorded(rounded, run, inputs)
            comparison = DriftComparison((reference, run), errors, facts)
        else:
            sides = ComparedSides.on_equal_terms(reference, port)
            in_full = replace(options, low_memory=False)
            comparison = _compare_by_parts(sides, inputs, facts, in_full)
    comparison.errors.notes += pairs.notes
    block = pairs.inline.get(next(iter(comparison.errors.drifting), ""))
    if block is not None:
        comparison.errors.notes.append(
            f"The fault is in `{block}`, or in how its parts are called: they are run"
            " inline, so that no block can be run alone to find the part."
        )
    return comparison


def _compare_by_parts(
    sides: ComparedSides,
    inputs: Inputs,
    pairing: Pairing,
    options: _Options,
) -> DriftComparison:
    """Compare two sides part by part, and search for the module behind any drift."""
    errors = compare_parts(sides, inputs, low_memory=options.low_memory)
    options.accept(errors)
    compared = sides.reference, sides.candidate
    comparison = DriftComparison(compared, errors, pairing, compared="parts")
    changed, misread = compare_weights(sides)
    comparison.changed_weights = changed
    if misread:
        errors.notes.append(
            "bitsandbytes unpacks these weights with scales of neighbouring blocks on"
            " this device, because their width is no multiple of a block:"
            f" {listed(misread)}."
        )
    comparison.dtypes_differ = sides.candidate.dtype != sides.reference.dtype
    if errors.drifting:
        cause = comparison.cause = explain(sides, changed, inputs)
        if cause.sides is not None and cause.errors is not None:
            _search(comparison, cause.errors, cause.sides, inputs)
        elif cause.explained_by not in INTENDED:
            _search(comparison, errors, sides, inputs)
        # Restoring needs the states of all restored sites at once.
        most = 1 if options.low_memory else None
        if cause.explained_by not in INTENDED:
            comparison.restored = _restore(sides, errors, most)
    return comparison


def _search(
    comparison: DriftComparison, errors: Errors, sides: ComparedSides, inputs: Inputs
) -> None:
    """Search for the module at fault, and describe the fault.

    The errors are those of the sides: with quantised weights, of the comparison that
    leaves quantisation out.
    """
    first = errors.drifting[0]
    cells = errors.cells.get(first, {}).get("relative", inf)
    relative = float(np.nan_to_num(cells, nan=0.0, posinf=inf).max())
    batch = errors.verdicts[first].batch
    models = sides.equal_reference, sides.equal_candidate
    search = Search(*models, batch)
    if sides.candidate.is_port:
        # Texts beside the one that shows the fault best: small faults need tokens.
        others = []
        tokens = sum(batch.lengths)
        for text, length in enumerate(inputs.lengths):
            other = inputs.some([text])
            if tokens < SEARCH_TOKENS and other.ids != batch.ids:
                others.append(other)
                tokens += length
        search = PortSearch(*models, batch, others)
    fault = search.find(first, errors.beyond, relative)
    # Rounded inputs hide the part at fault: the container is all that is left.
    is_container = fault is not None and fault.call and fault.output is None
    if fault is None or (sides.rounds_inputs and is_container):
        return
    comparison.fault = fault
    comparison.hints, notes = describe_hint(search, fault)
    comparison.errors.notes += notes


def _restore(sides: ComparedSides, errors: Errors, most: int | None) -> list[Restored]:
    """Measure how much of the output's change the reference's states remove."""
    drifting = errors.drifting
    sites = [Site.parse(name) for name in drifting if name != LOGITS][:most]
    batch = errors.verdicts[drifting[0]].batch
    reference = observe(sides.reference, batch, sites)
    changed = observe(sides.candidate, batch, ())
    if not sites or LOGITS not in reference.states or LOGITS not in changed.states:
        return []
    expected = reference.rows(LOGITS)
    actual = changed.rows(LOGITS)
    # A port without a head returns its last states.
    if expected.shape != actual.shape:
        return []
    before = float(divergence(expected, actual)[0].mean())
    if not before:
        return []
    choices = [[site] for site in sites[:MOST_RESTORED]]
    if len(sites) > 1:
        choices.append(sites)
    logits = actual

    def put(state: ObservedState) -> Tensor | None:
        nonlocal logits
        if state.name != LOGITS:
            return reference.rows(state.name)
        logits = state.rows
        return None

    restored = []
    for selected in choices:
        observe(sides.candidate, batch, selected, visit=put)
        share = 1 - float(divergence(expected, logits)[0].mean()) / before
        restored.append(Restored(sites=list(map(str, selected)), share=share))
    return restored

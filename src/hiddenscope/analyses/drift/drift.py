"""Where do two runs of a model diverge, is it rounding or a fault, and which module?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.baseline import read_baseline, write_baseline
from hiddenscope.analyses.drift.cause import WeightComparison, explain
from hiddenscope.analyses.drift.dtypes import name_of
from hiddenscope.analyses.drift.errors import Errors, divergence
from hiddenscope.analyses.drift.facts import PairFacts, PairingFacts, Restored
from hiddenscope.analyses.drift.hints import describe_hint
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.observe import ObservedState, observe
from hiddenscope.analyses.drift.parts import ComparedSides, compare_parts
from hiddenscope.analyses.drift.port import as_port, compare_returned, pair_program
from hiddenscope.analyses.drift.port_search import PortSearch
from hiddenscope.analyses.drift.program import Program
from hiddenscope.analyses.drift.result import (
    DriftComparison,
    drift_dataset,
    drift_facts,
)
from hiddenscope.analyses.drift.saved import (
    SavedRun,
    as_saved,
    compare_model_with_saved,
    compare_two_saved,
    open_saved,
)
from hiddenscope.analyses.drift.search import Search
from hiddenscope.analyses.drift.sides import (
    BareModule,
    as_candidate,
    as_live,
    check_tokenizers,
    encode,
    on_equal_terms,
    tokens_of,
)
from hiddenscope.arguments import checked
from hiddenscope.errors import ModuleError, StatesError
from hiddenscope.model import Model, load
from hiddenscope.modules.operations import tell_of_slow_products
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Readable
from hiddenscope.states.foreign_names import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Opened: TypeAlias = Model | SavedRun | BareModule | Program
# An error may be this many times an accepted level: levels vary with the texts.
BASELINE_MARGIN = 2
# Texts up to this many tokens are used to search for the module at fault in a port.
SEARCH_TOKENS = 512
# Changes of all weights, behind which there is no module to search for.
INTENDED = ("quantisation", "adapter")
# Sites whose states are restored one at a time.
MOST_RESTORED = 4


@checked
def drift(
    reference: Model
    | Readable
    | str
    | os.PathLike[str]
    | tuple[nn.Module, PreTrainedTokenizerBase | None],
    candidate: Model
    | Readable
    | str
    | os.PathLike[str]
    | tuple[nn.Module, Any]
    | nn.Module
    | Program,
    texts: Texts | Inputs | None,
    *,
    sites: SitePatterns = "layer.*,final",
    pairing: Mapping[str, str] | str | None = None,
    baseline: str | os.PathLike[str] | None = None,
    low_memory: bool = False,
) -> Result:
    """Find where a candidate diverges from its reference beyond rounding, and why.

    Either side is a model, anything `hs.load` takes, or states that were saved
    elsewhere. The candidate may also be any module or function of token ids, whose
    tensors `pairing` pairs with sites. Two live models are compared part by part, each
    on the reference's own input. `baseline` names a file of accepted errors, which is
    written if it does not exist. With `low_memory` both models run in step, and only
    two layers' states are held. `sites` are those that the result shows; all of them
    are compared.

    >>> import copy
    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> module = tiny_model("llama")
    >>> port = copy.deepcopy(module)
    >>> _ = port.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)
    >>> facts = hs.drift((module, None), port, [[5, 6, 7], [8, 9]]).facts
    >>> facts["drifted"], facts["first_site"], facts["module"]
    (True, 'layer.2', 'model.layers.1.mlp.up_proj')
    """
    # Read before the models run, so that an unusable file is reported at once.
    levels = None if baseline is None else read_baseline(baseline)
    options = _Options(pairing, low_memory, levels or {})
    opened_reference = _open_side(reference, "reference")
    opened_candidate = _open_side(candidate, "candidate")
    comparison = _compare(opened_reference, opened_candidate, texts, options)
    baseline_facts = None
    if baseline is not None:
        path = os.fspath(baseline)
        if levels is None:
            verdicts = comparison.errors.verdicts
            errors = {name: verdict.error for name, verdict in verdicts.items()}
            count = write_baseline(path, errors)
        else:
            count = len(levels)
        baseline_facts = {"file": path, "written": levels is None, "sites": count}
    source = {**comparison.sources[0], "candidate": comparison.sources[1]}
    dataset = drift_dataset(comparison, sites)
    return Result("drift", dataset, drift_facts(comparison, baseline_facts), source)


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
        function: Program = side
        return function
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
    if isinstance(reference, SavedRun) or isinstance(candidate, SavedRun):
        comparison = _compare_with_saved(reference, candidate, texts, options)
    else:
        model = _as_model(reference, "reference")
        inputs = encode(model, texts)
        if not isinstance(candidate, Model | BareModule):
            comparison = _compare_program(model, candidate, inputs, options)
        else:
            check_tokenizers(inputs, candidate)
            live = None
            if options.pairing is None:
                live = as_candidate(candidate, model)
            if live is not None:
                return _compare_live(model, candidate, live, inputs, options)
            comparison = _compare_program(model, candidate.module, inputs, options)
    if comparison.compared == "passes":
        options.accept(comparison.errors)
    if options.low_memory:
        comparison.errors.notes.append(
            "Low memory was not used: it needs two live models with the same modules."
        )
    return comparison


def _compare_with_saved(
    reference: Opened,
    candidate: Opened,
    texts: Texts | Inputs | None,
    options: _Options,
) -> DriftComparison:
    """Compare two sides of which one or both are saved states."""
    if options.pairing is not None:
        reason = "saved states are paired by their sites"
        raise StatesError("Cannot use the pairing", reason, "Leave it out.")
    if not isinstance(candidate, SavedRun):
        assert isinstance(reference, SavedRun)
        model = _as_model(candidate, "candidate")
        return compare_model_with_saved(
            model, reference, texts, saved_is_reference=True
        )
    if isinstance(reference, SavedRun):
        return compare_two_saved(reference, candidate)
    model = _as_model(reference, "reference")
    return compare_model_with_saved(model, candidate, texts, saved_is_reference=False)


def _compare_live(
    model: Model,
    candidate: Model | BareModule,
    live_candidate: LiveModel,
    inputs: Inputs,
    options: _Options,
) -> DriftComparison:
    """Compare two models with the same modules part by part."""
    reference = as_live(model)
    pairs = []
    for site, tap in reference.taps.items():
        other = live_candidate.taps.get(site)
        if not site.part and other is not None:
            pairs.append(
                PairFacts(site=str(site), reference=str(tap), candidate=str(other))
            )
    by = "path" if live_candidate.taps is reference.taps else "site"
    pairing = PairingFacts(by=by, pairs=pairs)
    sides = on_equal_terms(reference, live_candidate)
    source, locked = _source_of(live_candidate), [model]
    if isinstance(candidate, Model):
        source = candidate.source(None).to_json()
        locked.append(candidate)
    with _locked(locked):
        return _compare_by_parts(model, sides, inputs, source, pairing, options)


@contextmanager
def _locked(models: Iterable[Model]) -> Iterator[None]:
    """Hold the locks of models."""
    with ExitStack() as stack:
        # Always in one order, so that two comparisons cannot wait for each other.
        for model in sorted(models, key=id):
            stack.enter_context(model.lock)
        yield


def _compare_program(
    model: Model, program: Program, inputs: Inputs, options: _Options
) -> DriftComparison:
    """Compare a program part by part if its blocks can be entered, else as a whole."""
    reference = as_live(model)
    with model.lock:
        pairs = pair_program(reference, program, inputs, options.pairing)
        port = as_port(program, reference, pairs)
        if port is None:
            comparison = compare_returned(model, reference, program, inputs, pairs)
        else:
            sides = on_equal_terms(reference, port)
            facts = pairs.facts(reference)
            in_full = replace(options, low_memory=False)
            comparison = _compare_by_parts(
                model, sides, inputs, _source_of(port), facts, in_full
            )
    comparison.errors.notes += pairs.notes
    return comparison


def _source_of(live: LiveModel) -> dict[str, object]:
    return {
        "model": live.name,
        "dtype": name_of(live.dtype),
        "device": str(live.device),
        "attention": live.kernel,
    }


def _compare_by_parts(
    model: Model,
    sides: ComparedSides,
    inputs: Inputs,
    candidate_source: Mapping[str, object],
    pairing: PairingFacts,
    options: _Options,
) -> DriftComparison:
    """Compare two sides part by part, and search for the module behind any drift."""
    errors = compare_parts(sides, model, inputs, low_memory=options.low_memory)
    options.accept(errors)
    comparison = DriftComparison(
        (sides.reference.name, sides.candidate.name),
        errors,
        tokens_of(model, inputs),
        [model.source(None).to_json(), candidate_source],
        pairing,
        compared="parts",
    )
    weights = WeightComparison.of(sides)
    comparison.changed_weights = weights.changed
    if weights.misread:
        errors.notes.append(
            "bitsandbytes unpacks these weights with scales of neighbouring blocks on"
            " this device, because their width is no multiple of a block:"
            f" {listed(weights.misread)}."
        )
    comparison.dtypes_differ = sides.candidate.dtype != sides.reference.dtype
    if errors.drifting:
        cause = explain(weights, model, inputs)
        comparison.cause = cause
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
    relative = torch.inf
    cells = errors.cells.get(first, {}).get("relative")
    if cells is not None:
        relative = float(np.nan_to_num(cells, nan=0.0).max())
    batch = errors.verdicts[first].batch
    reference, candidate = sides.equal_reference, sides.equal_candidate
    search = Search(reference, candidate, batch)
    if sides.candidate.is_port:
        search = PortSearch(reference, candidate, batch, _other_texts(inputs, batch))
    fault = search.find(first, errors.beyond_with_systematic(), relative)
    if fault is not None and sides.rounds_inputs and fault.beyond == torch.inf:
        # Rounded inputs hide the part at fault: the container is all that is left.
        fault = None
    comparison.fault = fault
    if comparison.fault is not None:
        comparison.hints, notes = describe_hint(search, comparison.fault)
        comparison.errors.notes += notes


def _other_texts(inputs: Inputs, batch: Inputs) -> list[Inputs]:
    """Return texts beside the one that shows a fault best: small faults need tokens."""
    others: list[Inputs] = []
    tokens = sum(batch.lengths)
    for text, length in enumerate(inputs.lengths):
        other = inputs.some([text])
        if tokens < SEARCH_TOKENS and other.ids != batch.ids:
            others.append(other)
            tokens += length
    return others


def _restore(sides: ComparedSides, errors: Errors, most: int | None) -> list[Restored]:
    """Measure how much of the output's change the reference's states remove."""
    drifting = errors.drifting
    sites = [Site.parse(name) for name in drifting if name != LOGITS][:most]
    batch = errors.verdicts[drifting[0]].batch
    reference = observe(sides.reference, batch, sites)
    changed = observe(sides.candidate, batch, ())
    if not sites or LOGITS not in reference.states or LOGITS not in changed.states:
        return []
    expected, actual = reference.rows(LOGITS), changed.rows(LOGITS)
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

"""Where do two runs of a model diverge, is that rounding or a fault, and which module
made it?
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.baseline import read_baseline, write_baseline
from hiddenscope.analyses.drift.candidate import Runner, values_of
from hiddenscope.analyses.drift.describe import describe
from hiddenscope.analyses.drift.dtypes import (
    Digits,
    digits_of_embeddings,
    majority_dtype,
    narrowest,
    with_digits,
)
from hiddenscope.analyses.drift.errors import Errors, divergence
from hiddenscope.analyses.drift.noise import coarsest
from hiddenscope.analyses.drift.observe import LOGITS, ObservedState, Side, observe
from hiddenscope.analyses.drift.pairing import Pairs, batches_for, pair
from hiddenscope.analyses.drift.parts import (
    ComparedSides,
    changed_weights,
    compare_parts,
)
from hiddenscope.analyses.drift.port_search import PortSearch
from hiddenscope.analyses.drift.result import DriftComparison, dataset_of, facts_of
from hiddenscope.analyses.drift.search import Search
from hiddenscope.analyses.drift.sides import (
    BareModule,
    Opened,
    SavedRun,
    as_candidate,
    as_model,
    as_side,
    check_same_texts,
    check_shapes,
    check_tokenizers,
    check_tokens,
    check_whole,
    check_widths,
    common_sites,
    encode,
    is_compiled,
    on_equal_terms,
    open_side,
)
from hiddenscope.analyses.drift.whole import compare_passes, compare_saved
from hiddenscope.arguments import checked
from hiddenscope.errors import PassError, StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts, recordable
from hiddenscope.results import Result
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Readable, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASELINE_MARGIN = (
    # How much over an accepted level an error may be: levels vary with the texts.
    2
)
SEARCH_TOKENS = 512  # on which the module at fault is looked for in a port
MOST_RESTORED = 4  # sites whose states are put back one at a time


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
    | Callable[..., Any],
    texts: Texts | Inputs | None,
    *,
    sites: SitePatterns = "layer.*,final",
    pairing: Mapping[str, str] | str | None = None,
    baseline: str | os.PathLike[str] | None = None,
    low_memory: bool = False,
) -> Result:
    """Find where a candidate diverges from its reference, whether that is more than
    rounding, and which module does it.

    Either side is a model, anything `hs.load` takes, or states that were saved
    elsewhere; the candidate may also be a module or a function of token ids of somebody
    else's making, whose tensors `pairing` pairs with sites. Two live models are
    compared part by part, each on the reference's own input. `baseline` names a file of
    accepted errors, which is written where there is none. With `low_memory` both run in
    step, and two layers' states are held. `sites` are those that the result shows; all
    of them are compared.

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
    # Before the models run: a baseline that cannot be used is no reason to wait for
    # them.
    levels = None if baseline is None else read_baseline(baseline)
    options = _Options(pairing, low_memory, levels or {})
    comparison = _compare(
        open_side(reference, "reference"),
        open_side(candidate, "candidate"),
        texts,
        options,
    )
    accepted = None
    if baseline is not None:
        path = os.fspath(baseline)
        count = (
            write_baseline(path, comparison.errors.error)
            if levels is None
            else len(levels)
        )
        accepted = {"file": path, "written": levels is None, "sites": count}
    source = {**comparison.sources[0], "candidate": comparison.sources[1]}
    return Result(
        "drift", dataset_of(comparison, sites), facts_of(comparison, accepted), source
    )


@dataclass(frozen=True)
class _Options:
    """How to compare: the pairing of a port, whether in low memory, and the errors that
    are accepted by site.
    """

    pairing: Mapping[str, str] | str | None
    low_memory: bool
    accepted: Mapping[str, float]

    def accept(self, errors: Errors) -> None:
        """Accept the errors of a baseline, before anything is looked for in them."""
        for name, level in self.accepted.items():
            errors.accept(name, BASELINE_MARGIN * level)


def _compare(
    reference: Opened,
    candidate: Opened,
    texts: Texts | Inputs | None,
    options: _Options,
) -> DriftComparison:
    """Choose the way in which two sides can be compared."""
    if isinstance(reference, SavedRun) or isinstance(candidate, SavedRun):
        if options.pairing is not None:
            raise StatesError(
                "Cannot use the pairing",
                "saved states are paired by their sites",
                "Leave it out.",
            )
        comparison = _compare_with_saved(reference, candidate, texts)
    else:
        model = as_model(reference, "reference")
        inputs = encode(model, texts)
        side = None
        if isinstance(candidate, Model | BareModule):
            check_tokenizers(inputs, candidate)
            side = as_candidate(candidate, model) if options.pairing is None else None
        if side is not None:
            return _compare_live(model, candidate, side, inputs, options)
        function = (
            candidate.module if isinstance(candidate, Model | BareModule) else candidate
        )
        comparison = _compare_port(model, function, inputs, options)
    if comparison.compared == "passes":
        options.accept(comparison.errors)
    if options.low_memory:
        words = (
            "Low memory was not used: it needs two live models with the same modules."
        )
        comparison.errors.notes.append(words)
    return comparison


def _compare_live(
    model: Model, candidate: Opened, side: Side, inputs: Inputs, options: _Options
) -> DriftComparison:
    """Compare two models with the same modules part by part."""
    reference = as_side(model)
    check_shapes(reference, side)
    pairs = []
    for site, tap in reference.taps.items():
        if not site.part and site in side.taps:
            pairs.append(
                {
                    "site": str(site),
                    "reference": str(tap),
                    "candidate": str(side.taps[site]),
                }
            )
    pairing = {"by": "path" if side.taps is reference.taps else "site", "pairs": pairs}
    sources = [model.source(None).to_json(), _source_of(candidate, side)]
    others = [candidate] if isinstance(candidate, Model) else []
    return _compare_by_parts(
        model, reference, side, inputs, sources, pairing, options, others
    )


@contextmanager
def _locked(models: Iterable[Model]) -> Iterator[None]:
    """Hold the locks of models, always in one order, so that two comparisons cannot
    wait for each other.
    """
    with ExitStack() as stack:
        for model in sorted(models, key=id):
            stack.enter_context(model.lock)
        yield


def _compare_by_parts(
    model: Model,
    reference: Side,
    candidate: Side,
    inputs: Inputs,
    sources: Sequence[Mapping[str, Any]],
    pairing: dict[str, Any],
    options: _Options,
    others: Sequence[Model] = (),
) -> DriftComparison:
    sides = on_equal_terms(reference, candidate)
    with _locked([model, *others]):
        errors = compare_parts(sides, model, inputs, low_memory=options.low_memory)
        options.accept(errors)
        names = (reference.name, candidate.name)
        comparison = DriftComparison(
            names, errors, _tokens(model, inputs), sources, pairing, compared="parts"
        )
        comparison.changed_weights = changed_weights(sides)
        if errors.drifting:
            _search(comparison, sides, inputs)
            comparison.restored = _restore(
                sides, errors, 1 if options.low_memory else None
            )
    return comparison


def _other_texts(inputs: Inputs, batch: Inputs) -> list[Inputs]:
    """Choose some texts beside the one that shows a fault best: small faults take many
    tokens.
    """
    others: list[Inputs] = []
    tokens = sum(batch.lengths)
    for text, length in enumerate(inputs.lengths):
        other = inputs.some([text])
        if tokens < SEARCH_TOKENS and other.ids != batch.ids:
            others.append(other)
            tokens += length
    return others


def _search(comparison: DriftComparison, sides: ComparedSides, inputs: Inputs) -> None:
    """Look for the module at fault, and for what the fault looks like."""
    errors = comparison.errors
    first = errors.drifting[0]
    relative = errors.cells.get(first, {}).get("relative")
    total = (
        torch.inf
        if relative is None
        else float(torch.from_numpy(relative).nan_to_num(nan=0.0).max())
    )
    batch = errors.batch[first]
    if sides.candidate.is_port:
        search: Search = PortSearch(
            sides.equal_reference,
            sides.equal_candidate,
            batch,
            _other_texts(inputs, batch),
        )
    else:
        search = Search(sides.equal_reference, sides.equal_candidate, batch)
    comparison.fault = search.find(first, errors.beyond_with_systematic(), total)
    if comparison.fault is not None:
        comparison.hints, notes = describe(search, comparison.fault)
        errors.notes += notes


def _restore(
    sides: ComparedSides, errors: Errors, most: int | None
) -> list[dict[str, Any]]:
    """Measure how much of the change of the output disappears when the reference's
    states are put back.
    """
    sites = [Site.parse(name) for name in errors.drifting if name != LOGITS][:most]
    batch = errors.batch[errors.drifting[0]]
    reference = observe(sides.reference, batch, sites)
    changed = observe(sides.candidate, batch, ())
    if not sites or LOGITS not in reference.states or LOGITS not in changed.states:
        return []
    expected = reference.rows(LOGITS)
    # A port without a head returns its last states.
    if expected.shape != changed.rows(LOGITS).shape:
        return []
    before = float(divergence(expected, changed.rows(LOGITS))[0].mean())
    if not before:
        return []
    choices = [[site] for site in sites[:MOST_RESTORED]]
    if len(sites) > 1:
        choices.append(sites)
    restored = []
    for chosen in choices:
        logits: list[Tensor] = []

        def put(state: ObservedState, logits: list[Tensor] = logits) -> Tensor | None:
            if state.name == LOGITS:
                logits.append(state.rows)
                return None
            return reference.rows(state.name)

        observe(sides.candidate, batch, chosen, visit=put)
        left = float(divergence(expected, logits[0])[0].mean())
        restored.append(
            {"sites": [str(site) for site in chosen], "share": 1 - left / before}
        )
    return restored


def _compare_port(
    model: Model, function: Callable[..., Any], inputs: Inputs, options: _Options
) -> DriftComparison:
    """Compare a program of somebody else's: part by part where its blocks can be
    entered, or else by whole passes.
    """
    reference = as_side(model)
    module = (
        function
        if isinstance(function, nn.Module) and not is_compiled(function)
        else None
    )
    if module is not None:
        recordable(module)
    with model.lock:
        # A module of somebody else's may be on another device than the reference.
        feed = (
            replace(reference, module=function)
            if isinstance(function, nn.Module)
            else reference
        )
        batches = batches_for(feed, inputs)
        values = values_of(function, batches)
        rows = _rows_for_pairing(reference, inputs.some(range(len(batches))))
        pairs = pair(values, rows, reference, module, options.pairing)
        reference.passes = 0  # pairing took a pass that is not of the comparison
        notes = [*pairs.notes, *_unpaired(pairs, rows)]
        port = None if module is None else _as_port(module, reference, pairs)
        if port is not None:
            sources = [model.source(None).to_json(), _source_of(None, port)]
            by_port = replace(options, low_memory=False)
            comparison = _compare_by_parts(
                model, reference, port, inputs, sources, pairs.facts(reference), by_port
            )
        else:
            comparison = _compare_returned(
                model, reference, feed, function, inputs, pairs
            )
    comparison.errors.notes += notes
    return comparison


def _rows_for_pairing(reference: Side, inputs: Inputs) -> dict[str, Tensor]:
    """Record the layers of the reference over some texts, one text at a time."""
    layers = [site for site in reference.sites if not site.part]
    passes = [
        observe(reference, inputs.some([text]), layers) for text in range(len(inputs))
    ]
    return {
        name: torch.cat([observed.rows(name) for observed in passes])
        for name in passes[0].states
    }


def _unpaired(pairs: Pairs, sites: Iterable[str]) -> list[str]:
    unpaired = [site for site in sites if site not in pairs.chosen and site != LOGITS]
    if not unpaired:
        return []
    names = ", ".join(f"`{site}`" for site in unpaired)
    return [f"No tensor of the candidate was paired with {names}: not compared."]


def _as_port(module: nn.Module, reference: Side, pairs: Pairs) -> Side | None:
    """Take a module of somebody else's as a side, where its blocks are known, so that
    states can be put into it.
    """
    taps = {
        Site.parse(site): value.tap
        for site, value in pairs.chosen.items()
        if value.tap is not None
    }
    blocks = {
        site: tap.path
        for site, tap in taps.items()
        if site.layer and tap.side == "output"
    }
    if len(blocks) < 2:
        return None
    name, dtype = type(module).__name__, majority_dtype(module)
    return Side(
        name,
        module,
        reference.anatomy,
        reference.pad,
        dtype,
        taps,
        blocks,
        Runner(module),
    )


def _compare_returned(
    model: Model,
    reference: Side,
    feed: Side,
    function: Callable[..., Any],
    inputs: Inputs,
    pairs: Pairs,
) -> DriftComparison:
    """Compare what a function returns with whole passes of the reference."""
    values = {}
    for value in values_of(
        function, [feed.batch(inputs.some([text])) for text in range(len(inputs))]
    ):
        values[value.name] = value.rows
    rows: dict[str, Tensor] = {}
    for site, value in pairs.chosen.items():
        if value.name not in values:
            reason = f"{value.name} has no row for each token of every text"
            raise PassError(
                "Cannot compare the candidate",
                reason,
                "Pair tensors that every text gives.",
            )
        rows[site] = values[value.name].cpu()
    states = [tensor for site, tensor in rows.items() if site != LOGITS] or list(
        rows.values()
    )
    dtype = narrowest(states, coarsest(tensor.dtype for tensor in states))
    digits = _digits_of(rows, dtype, model)
    reference = replace(
        reference, module=with_digits(reference.module, digits.reference)
    )
    readers = {name: partial(_some_rows, tensor) for name, tensor in rows.items()}
    errors = compare_passes(reference, model, readers, dtype, inputs)
    errors.passes["candidate"] = 1
    errors.notes += digits.notes
    module = getattr(function, "_orig_mod", function)
    name = getattr(function, "__name__", type(module).__name__)
    sources = [
        model.source(None).to_json(),
        {"model": name, "dtype": str(dtype).removeprefix("torch.")},
    ]
    return DriftComparison(
        (model.name, name),
        errors,
        _tokens(model, inputs),
        sources,
        pairs.facts(reference),
    )


def _digits_of(rows: Mapping[str, Tensor], dtype: torch.dtype, model: Model) -> Digits:
    """Choose the digits of the weights by the embeddings of a program that computes in
    a wide dtype.
    """
    embeddings = rows.get("layer.0")
    if embeddings is None or dtype.itemsize < majority_dtype(model.module).itemsize:
        return Digits()
    return digits_of_embeddings(embeddings, model.module)


def _some_rows(rows: Tensor, numbers: Sequence[int]) -> Tensor:
    return rows[list(numbers)]


def _source_of(candidate: Opened | None, side: Side) -> dict[str, Any]:
    if isinstance(candidate, Model):
        return candidate.source(None).to_json()
    dtype = str(side.dtype).removeprefix("torch.")
    return {
        "model": side.name,
        "dtype": dtype,
        "device": str(side.device),
        "attention": side.kernel,
    }


def _tokens(model: Model, inputs: Inputs) -> dict[str | None, Tokens]:
    stacks = ("encoder", "decoder") if model.encoder_decoder else (None,)
    return {stack: model.text_encoder.tokens(inputs.of(stack)) for stack in stacks}


def _compare_with_saved(
    reference: Opened, candidate: Opened, texts: Texts | Inputs | None
) -> DriftComparison:
    """Compare where at least one side is saved states."""
    if isinstance(reference, SavedRun) and isinstance(candidate, SavedRun):
        return _compare_two_saved(reference, candidate)
    if isinstance(reference, SavedRun):
        return _compare_one_saved(
            as_model(candidate, "candidate"), reference, texts, saved_is_reference=True
        )
    assert isinstance(candidate, SavedRun)
    return _compare_one_saved(
        as_model(reference, "reference"), candidate, texts, saved_is_reference=False
    )


def _compare_one_saved(
    model: Model,
    saved: SavedRun,
    texts: Texts | Inputs | None,
    *,
    saved_is_reference: bool,
) -> DriftComparison:
    """Compare a live model with states that were saved elsewhere."""
    check_whole(saved)
    windows = saved.windows()
    if texts is None:
        texts = windows or saved.own_texts()
    inputs = encode(model, texts)
    check_tokens(inputs, saved)
    side = as_side(model)
    names = (saved.name, model.name) if saved_is_reference else (model.name, saved.name)
    sites = common_sites(side.sites, saved.sites, names)
    for site in sites:
        check_widths(site, side.anatomy.width(site), saved.width(site))
    readers = {str(site): partial(saved.rows, site) for site in sites}
    with model.lock:
        errors = compare_passes(
            side, model, readers, saved.computed_in(model.module), inputs
        )
    tokens = _tokens(model, inputs)
    if windows is not None:
        # The store knows where in the whole texts its windows are.
        tokens |= {states.sites[0].stack: states.tokens for states in saved.stacks}
    sources = [model.source(None).to_json(), saved.stacks[0].source.to_json()]
    if saved_is_reference:
        sources.reverse()
        errors.passes = {
            "reference": errors.passes["candidate"],
            "candidate": errors.passes["reference"],
        }
    return DriftComparison(names, errors, tokens, sources, _paired_by_site(sites))


def _compare_two_saved(first: SavedRun, second: SavedRun) -> DriftComparison:
    """Compare two saved runs."""
    sites = common_sites(first.sites, second.sites, (first.name, second.name))
    stacks = list(dict.fromkeys(site.stack for site in sites))
    for stack in stacks:
        check_same_texts(first, second, stack)
    for site in sites:
        check_widths(site, first.width(site), second.width(site))
    tokens = {stack: first.of(stack).tokens for stack in stacks}
    counts = {stack: len(stack_tokens) for stack, stack_tokens in tokens.items()}
    blocks = {
        str(site): zip(first.blocks(site), second.blocks(site), strict=True)
        for site in sites
    }
    errors = compare_saved(blocks, counts, {first.named_dtype, second.named_dtype})
    errors.passes = {"reference": 0, "candidate": 0}
    sources = [first.stacks[0].source.to_json(), second.stacks[0].source.to_json()]
    return DriftComparison(
        (first.name, second.name), errors, tokens, sources, _paired_by_site(sites)
    )


def _paired_by_site(sites: Sequence[Site]) -> dict[str, Any]:
    pairs = [
        {"site": str(site), "reference": str(site), "candidate": str(site)}
        for site in sites
    ]
    return {"by": "site", "pairs": pairs}

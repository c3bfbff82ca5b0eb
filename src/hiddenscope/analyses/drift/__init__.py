"""Where do two runs of a model diverge, is that rounding or a fault, and which module made it?

sides        what the two sides are, whether they can be compared, and how their states are paired
streaming    the same with two layers' states in memory
candidate    a candidate of somebody else's making: how it is called, and the tensors that it makes
pairing      which of its tensors are which states
foreign      the module at fault in it: its modules paired by their weights, and then by what they give
observe      one pass: its states, the reference's put in their place, and what rounding does to every part
measured     errors by site and token, local and inherited, held against the noise
localize     from the first site that differs down to the module at fault
baseline     a file of accepted errors
signatures   what a fault looks like, tried on the module at fault; and what it does to the output
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.baseline import read_baseline, write_baseline
from hiddenscope.analyses.drift.dtypes import (
    NARROW,
    Digits,
    common_digits,
    digits_of_embeddings,
    narrowest,
    with_digits,
)
from hiddenscope.analyses.drift.foreign import ForeignSearch, as_foreign, rows_of_function
from hiddenscope.analyses.drift.localize import FaultyModule, Search
from hiddenscope.analyses.drift.measured import CELLS, Errors, divergence, of_live, of_passes, of_states, stack_of
from hiddenscope.analyses.drift.observe import LOGITS, MARGIN, Live, observe
from hiddenscope.analyses.drift.pairing import Pairs, batches_for, pair, values_of
from hiddenscope.analyses.drift.sides import (
    Given,
    Saved,
    Side,
    alike,
    as_live,
    as_model,
    check_shapes,
    check_tokenizers,
    check_tokens,
    check_whole,
    common,
    encoded,
    is_compiled,
    live,
    not_wider,
    opened,
    windows_of,
)
from hiddenscope.analyses.drift.signatures import hints
from hiddenscope.analyses.drift.streaming import of_live_streamed
from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts, recordable
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Readable, Tokens

if TYPE_CHECKING:
    import xarray
    from transformers import PreTrainedTokenizerBase

MOST_RESTORED = 4  # sites whose states are put back one at a time
BASELINE_MARGIN = 2  # how much over an accepted level an error may be: levels vary with the texts


@dataclass
class _Comparison:
    """What was compared: the numbers, the faulty module, and who took part."""

    names: tuple[str, str]
    measured: Errors
    tokens: dict[str | None, Tokens]
    inputs: Inputs | None
    sources: Sequence[Mapping[str, Any]]
    pairing: dict[str, Any]
    passes: dict[str, float] = field(default_factory=dict)
    faulty: FaultyModule | None = None
    live: tuple[Live, Live] | None = None
    hints: list[dict[str, str]] = field(default_factory=list)
    restored: list[dict[str, Any]] = field(default_factory=list)


@checked
def drift(
    reference: Model | Readable | str | os.PathLike[str] | tuple[nn.Module, PreTrainedTokenizerBase | None],
    candidate: Model | Readable | str | os.PathLike[str] | tuple[nn.Module, Any] | nn.Module | Callable[..., Any],
    texts: Texts | Inputs | None,
    *,
    sites: SitePatterns = "layer.*,final",
    pairing: Mapping[str, str] | str | None = None,
    baseline: str | os.PathLike[str] | None = None,
    low_memory: bool = False,
) -> Result:
    """Find where a candidate diverges from its reference, whether that is more than rounding, and which module does it.

    Either side is a model, anything `hs.load` takes, or states that were saved elsewhere; the candidate may also be a
    module or a function of token ids of somebody else's making, whose tensors `pairing` pairs with sites. Two live
    models are compared part by part, each on the reference's own input. `baseline` names a file of accepted errors,
    which is written where there is none. With `low_memory` both run in step, and two layers' states are held. `sites`
    are those that the result shows; all of them are compared.

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
    # Before the models run: a baseline that cannot be used is no reason to wait for them.
    levels = None if baseline is None else read_baseline(baseline)
    first, second = opened(reference, "reference"), opened(candidate, "candidate")
    comparison = _compared(first, second, texts, pairing, low_memory)
    accepted = None if baseline is None else _accepted(os.fspath(baseline), levels, comparison.measured)
    data = _dataset(comparison, sites)
    facts = _facts(comparison, accepted)
    source = {**comparison.sources[0], "candidate": comparison.sources[1]}
    return Result("drift", data, facts, source)


def _compared(
    first: Side,
    second: Side,
    texts: Texts | Inputs | None,
    pairing: Mapping[str, str] | str | None,
    low_memory: bool,
) -> _Comparison:
    if isinstance(first, Saved) or isinstance(second, Saved):
        if pairing is not None:
            raise StatesError("Cannot use the pairing", "saved states are paired by their sites", "Leave it out.")
        return _noting(_with_saved(first, second, texts), low_memory)
    model = as_model(first, "reference")
    inputs = _given(model, texts)
    if isinstance(second, Model | Given):
        check_tokenizers(inputs, second)
        own = None if pairing is not None else as_live(second, model)
        if own is not None:
            return _two_live(model, second, own, inputs, low_memory)
        return _noting(_foreign(model, second.module, inputs, pairing), low_memory)
    return _noting(_foreign(model, second, inputs, pairing), low_memory)


def _with_saved(first: Side, second: Side, texts: Texts | Inputs | None) -> _Comparison:
    """Saved states on one side at least."""
    if isinstance(first, Saved) and isinstance(second, Saved):
        return _two_saved(first, second)
    if isinstance(first, Saved):
        return _one_saved(as_model(second, "candidate"), first, texts, swapped=True)
    assert isinstance(second, Saved)
    return _one_saved(as_model(first, "reference"), second, texts, swapped=False)


def _noting(comparison: _Comparison, low_memory: bool) -> _Comparison:
    """Say what was asked for and not done with saved states, or with a program of somebody else's."""
    if low_memory:
        comparison.measured.notes.append("Low memory was not used: it needs two live models with the same modules.")
    return comparison


def _given(model: Model, texts: Texts | Inputs | None) -> Inputs:
    if texts is None:
        raise StatesError(
            "No texts to compare on", "only saved states come with their own texts", "Give at least one text."
        )
    return encoded(model, texts)


def _two_live(model: Model, second: Model | Given, candidate: Live, inputs: Inputs, low_memory: bool) -> _Comparison:
    """Two modules that run here: part by part, each on equal input."""
    reference = live(model)
    check_shapes(reference, candidate)
    source = _source_of(second, candidate)
    pairing = _pairing(reference, candidate)
    return _by_parts(model, reference, candidate, inputs, source, pairing, low_memory=low_memory)


def _by_parts(
    model: Model,
    reference: Live,
    candidate: Live,
    inputs: Inputs,
    source: Mapping[str, Any],
    pairing: dict[str, Any],
    *,
    low_memory: bool = False,
) -> _Comparison:
    digits = common_digits(reference.module, candidate.module)
    reference = replace(reference, module=with_digits(reference.module, digits.reference))
    if digits.candidate is not None:
        module = with_digits(candidate.module, digits.candidate)
        candidate = replace(candidate, module=module, call=candidate.call and candidate.call.of(module))
    with model.lock:
        measured = (of_live_streamed if low_memory else of_live)(reference, model, candidate, inputs)
        measured.notes += digits.notes
        comparison = _Comparison(
            (reference.name, candidate.name),
            measured,
            _tokens(model, inputs),
            inputs,
            [model.source(None).to_json(), source],
            pairing,
            measured.passes,
            live=(reference, candidate),
        )
        if drifting := measured.drifting:
            rounded = not_wider(candidate, reference)
            kind = ForeignSearch if candidate.call else Search
            search = kind(alike(reference, rounded), rounded, measured.first_batch[drifting[0]])
            total = _worst(measured, drifting[0])
            comparison.faulty = search.find(drifting[0], measured.beyond, total)
            comparison.hints = [] if comparison.faulty is None else hints(search, comparison.faulty)
            comparison.restored = _restored(reference, candidate, measured, 1 if low_memory else None)
    return comparison


def _restored(reference: Live, candidate: Live, measured: Errors, most: int | None) -> list[dict[str, Any]]:
    """How much of the change of the output disappears when the reference's states are put back at a faulty part."""
    parts = [Site.parse(name) for name in measured.drifting if name != LOGITS][:most]
    batch = measured.first_batch[measured.drifting[0]]
    true = observe(reference, batch, parts)
    broken = observe(candidate, batch, ())
    if not parts or LOGITS not in true.rows or LOGITS not in broken.rows:
        return []
    if true.rows[LOGITS].shape != broken.rows[LOGITS].shape:  # a port without a head gives its last states
        return []
    before = float(divergence(true.rows[LOGITS], broken.rows[LOGITS])[0].mean())
    choices = [[site] for site in parts[:MOST_RESTORED]] + ([parts] if len(parts) > 1 else [])
    found = []
    for chosen in choices if before else []:
        put = {str(site): true.rows[str(site)] for site in chosen}
        again = observe(candidate, batch, chosen, put=put)
        left = float(divergence(true.rows[LOGITS], again.rows[LOGITS])[0].mean())
        found.append({"sites": [str(site) for site in chosen], "share": 1 - left / before})
    return found


def _foreign(
    model: Model, given: Callable[..., Any], inputs: Inputs, pairing: Mapping[str, str] | str | None
) -> _Comparison:
    """A program of somebody else's: part by part where its blocks can be entered, or else by whole passes."""
    reference = live(model)
    module = given if isinstance(given, nn.Module) and not is_compiled(given) else None
    if module is not None:
        recordable(module)
    name = getattr(given, "__name__", type(getattr(given, "_orig_mod", given)).__name__)
    with model.lock:
        batches = batches_for(reference, inputs)
        values = values_of(given, batches)
        some = inputs.some(range(len(batches)))
        layers = [site for site in reference.sites() if not site.part]
        seen = [observe(reference, some.some([text]), layers) for text in range(len(some))]
        rows = {name: torch.cat([one.rows[name] for one in seen]) for name in seen[0].rows}
        pairs = pair(values, rows, reference, module, pairing)
        reference.passes = 0  # of the comparison; pairing took one more
        candidate = None if module is None else as_foreign(module, reference, pairs)
        if candidate is not None:
            source = _source_of(Given(candidate.module), candidate)
            comparison = _by_parts(model, reference, candidate, inputs, source, pairs.facts(reference))
            comparison.measured.notes += _not_paired(pairs, rows)
            return comparison
        paired = {site: value.name for site, value in pairs.chosen.items()}
        theirs = rows_of_function(given, paired, reference, inputs)
        states = [rows for site, rows in theirs.items() if site != LOGITS] or [*theirs.values()]
        dtype = narrowest(states, max((one.dtype for one in states), key=lambda dtype: torch.finfo(dtype).eps))
        digits = Digits()
        if dtype not in NARROW and "layer.0" in theirs:
            digits = digits_of_embeddings(theirs["layer.0"], reference.module)
            reference = replace(reference, module=with_digits(reference.module, digits.reference))
        taken = {name: partial(_some, rows) for name, rows in theirs.items()}
        measured = of_passes(reference, model, taken, dtype, inputs)
        measured.notes += [*digits.notes, *_not_paired(pairs, rows)]
    source = {"model": name, "dtype": str(dtype).removeprefix("torch.")}
    return _Comparison(
        (model.name, name),
        measured,
        _tokens(model, inputs),
        inputs,
        [model.source(None).to_json(), source],
        pairs.facts(reference),
        {**measured.passes, "candidate": 1},
    )


def _not_paired(pairs: Pairs, sites: Iterable[str]) -> list[str]:
    left = [site for site in sites if site not in pairs.chosen and site != LOGITS]
    names = ", ".join(f"`{site}`" for site in left)
    missing = [f"No tensor of the candidate was paired with {names}: not compared."] if left else []
    return [*pairs.notes, *missing]


def _some(rows: Tensor, numbers: Sequence[int]) -> Tensor:
    return rows.cpu()[list(numbers)]


def _source_of(second: Model | Given, candidate: Live) -> dict[str, Any]:
    if isinstance(second, Model):
        return second.source(None).to_json()
    dtype = str(candidate.dtype).removeprefix("torch.")
    return {"model": candidate.name, "dtype": dtype, "device": str(candidate.device), "attention": candidate.kernel}


def _worst(measured: Errors, name: str) -> float:
    values = measured.cells.get(name, {}).get("relative")
    return math.inf if values is None else float(np.nanmax(values))


def _tokens(model: Model, inputs: Inputs) -> dict[str | None, Tokens]:
    stacks = ("encoder", "decoder") if model.encoder_decoder else (None,)
    return {stack: model.text_encoder.tokens(inputs.of(stack)) for stack in stacks}


def _pairing(reference: Live, candidate: Live) -> dict[str, Any]:
    """Which place of the candidate was compared with which of the reference."""
    by = "path" if candidate.taps is reference.taps else "site"
    taps = [(s, tap, candidate.taps[s]) for s, tap in reference.taps.items() if not s.part and s in candidate.taps]
    return {"by": by, "pairs": [{"site": str(s), "reference": str(one), "candidate": str(two)} for s, one, two in taps]}


def _one_saved(model: Model, saved: Saved, texts: Texts | Inputs | None, *, swapped: bool) -> _Comparison:
    """A live model against states that were saved elsewhere: whole passes only."""
    check_whole(saved)
    windows = windows_of(saved)
    inputs = _given(model, (windows or _own_texts(saved)) if texts is None else texts)
    check_tokens(inputs, saved)
    reference = live(model)
    names = (saved.name, model.name) if swapped else (model.name, saved.name)
    both = common(tuple(reference.sites()), saved.sites, names)
    for site in both:
        _check_widths(site, reference.anatomy.width(site), saved.width(site))
    by_name = {str(site): partial(saved.rows, site) for site in both}
    with model.lock:
        measured = of_passes(reference, model, by_name, saved.dtype(model.module), inputs)
    tokens = _tokens(model, inputs)
    if windows is not None:  # the tokens of the texts, with their positions there
        tokens |= {states.sites[0].stack: states.tokens for states in saved.stacks}
    sources = [model.source(None).to_json(), saved.stacks[0].source.to_json()]
    pairs = [{"site": name, "reference": name, "candidate": name} for name in by_name]
    return _Comparison(
        names,
        measured,
        tokens,
        inputs,
        sources[::-1] if swapped else sources,
        {"by": "site", "pairs": pairs},
        dict(zip(("candidate", "reference"), measured.passes.values(), strict=True)) if swapped else measured.passes,
    )


def _own_texts(saved: Saved) -> list[str] | list[list[int]]:
    """The texts that states came with, or where these were not kept their ids."""
    tokens = saved.stacks[0].tokens
    if tokens.texts is not None:
        return list(tokens.texts)
    return [tokens.ids[tokens.rows(text)].tolist() for text in range(tokens.count)]


def _two_saved(first: Saved, second: Saved) -> _Comparison:
    """Two saved runs: nothing can be measured of the noise, and the tolerance of the coarser dtype stands for it."""
    both = common(first.sites, second.sites, (first.name, second.name))
    for stack in dict.fromkeys(site.stack for site in both):
        one, two = first.of(stack).tokens, second.of(stack).tokens
        pooled = (one.ids < 0).any() and one.texts != two.texts  # vectors of texts have no ids to tell them apart
        if pooled or one.ids.tolist() != two.ids.tolist() or one.lengths.tolist() != two.lengths.tolist():
            reason = f"they hold {len(one):,} and {len(two):,} tokens that are not the same"
            raise StatesError("The two saved runs are of different texts", reason, "Capture both on the same texts.")
    for site in both:
        _check_widths(site, first.width(site), second.width(site))
    tokens = {stack: first.of(stack).tokens for stack in dict.fromkeys(site.stack for site in both)}
    pairs = {str(site): zip(first.blocks(site), second.blocks(site), strict=True) for site in both}
    computed_in = {first.named_dtype, second.named_dtype}
    measured = of_states(pairs, {stack: len(own) for stack, own in tokens.items()}, computed_in)
    shown = [{"site": str(site), "reference": str(site), "candidate": str(site)} for site in both]
    sources = [first.stacks[0].source.to_json(), second.stacks[0].source.to_json()]
    return _Comparison(
        (first.name, second.name),
        measured,
        tokens,
        None,
        sources,
        {"by": "site", "pairs": shown},
        {"reference": 0, "candidate": 0},
    )


def _check_widths(site: Site, mine: int, theirs: int) -> None:
    if mine != theirs:
        reason = f"{site} is {mine} wide in one and {theirs} in the other"
        raise StatesError("Cannot compare the two runs", reason, "Give two versions of one model.")


def _accepted(path: str, levels: Mapping[str, float] | None, measured: Errors) -> dict[str, Any]:
    """Hold the errors against a file of accepted ones, or write it; what it says goes into the facts."""
    if levels is None:
        return {"file": path, "written": True, "sites": write_baseline(path, measured.error)}
    for name, level in levels.items():
        allowed = BASELINE_MARGIN * level
        if name in measured.beyond and measured.error[name] <= allowed:
            measured.beyond[name] = min(measured.beyond[name], measured.error[name] / allowed if allowed else 0.0)
            measured.envelope[name] = max(measured.envelope[name], allowed)
    return {"file": path, "written": False, "sites": len(levels)}


def _facts(comparison: _Comparison, accepted: Facts | None) -> dict[str, Any]:
    measured, faulty = comparison.measured, comparison.faulty
    drifting = measured.drifting
    first = drifting[0] if drifting else None
    name, beyond = max(measured.beyond.items(), key=lambda pair: pair[1])
    shown = first or name
    facts: dict[str, Any] = {
        "drifted": bool(drifting),
        "first_site": first,
        "module": faulty.path if first and faulty else None,
        "beyond": measured.beyond[shown],
        "own_code": bool(first and faulty and faulty.own),
        "error": measured.error[shown],
        "envelope": measured.envelope[shown],
        "first_token": None if first is None else _where(comparison, first),
        "largest": {"site": name, "beyond": beyond},
        "drifting_sites": [_one_site(measured, name) for name in drifting],
        "reference": comparison.names[0],
        "candidate": comparison.names[1],
        "compared": "parts" if comparison.live else "passes",
        "texts": max(tokens.count for tokens in comparison.tokens.values()),
        "tokens": sum(map(len, comparison.tokens.values())),
        "sites": len(measured.beyond),
        "passes": {side: int(count) if count == int(count) else count for side, count in comparison.passes.items()},
        "noise": {"made_of": measured.sources, "margin": MARGIN},
        "self_check": {"observing_changed_nothing": measured.observing_changed_nothing},
        "pairing": comparison.pairing,
        "hints": comparison.hints if first else [],
        "consequences": _consequences(comparison),
        "notes": measured.notes,
    }
    return facts if accepted is None else {**facts, "baseline": accepted}


def _one_site(measured: Errors, name: str) -> dict[str, Any]:
    return {"site": name, "beyond": measured.beyond[name], "error": measured.error[name]}


def _where(comparison: _Comparison, name: str) -> dict[str, Any] | None:
    """The token at which a site is farthest off."""
    cells = comparison.measured.cells.get(name, {})
    values = cells.get("local", cells.get("relative"))
    tokens = comparison.tokens[stack_of(name, comparison.tokens)]
    if values is None or not np.isfinite(values).any():
        return None
    row = int(np.nanargmax(values))
    return {"text": int(tokens.text[row]), "position": int(tokens.positions[row]), "token": tokens.strings[row]}


def _consequences(comparison: _Comparison) -> dict[str, Any] | None:
    measured = comparison.measured
    if not measured.kl:
        return None
    kl, changed = np.concatenate(measured.kl), np.concatenate(measured.top1)
    output = {"kl_mean": float(kl.mean()), "kl_max": float(kl.max()), "top1_changed": int(changed.sum()), "of": len(kl)}
    return output | {"restored": comparison.restored if measured.drifting else []}


def _dataset(comparison: _Comparison, patterns: SitePatterns) -> xarray.Dataset:
    """Errors by site and token, and along the sites."""
    import xarray

    measured, tokens = comparison.measured, comparison.tokens
    names = [name for name in measured.cells if name in measured.beyond]
    chosen = {str(site) for site in _chosen(patterns, names)} | {LOGITS}
    names = [name for name in measured.beyond if name in chosen and name in measured.cells]
    counts = {stack: len(own) for stack, own in tokens.items()}
    starts = dict(zip(counts, np.cumsum([0, *counts.values()]), strict=False))
    variables: dict[str, Any] = {}
    for measure, look in CELLS.items():
        if not any(measure in measured.cells[name] for name in names):
            continue
        cells = np.full((len(names), sum(counts.values())), np.nan, dtype=np.float32)
        for row, name in enumerate(names):
            stack = stack_of(name, tokens)
            if (values := measured.cells[name].get(measure)) is not None:
                cells[row, starts[stack] : starts[stack] + counts[stack]] = values
        variables[measure] = (("site", "token"), cells, dict(look))
    variables |= _along_sites(measured, names)
    return xarray.Dataset(variables, {"site": names, **_coords(tokens)})


def _chosen(patterns: SitePatterns, names: list[str]) -> list[Any]:
    return list(select(patterns, [Site.parse(name) for name in names if name != LOGITS]))


def _along_sites(measured: Errors, names: list[str]) -> dict[str, Any]:
    def worst(measure: str, name: str) -> float:
        values = measured.cells[name].get(measure)
        return math.nan if values is None or not np.isfinite(values).any() else float(np.nanmax(values))

    total, local, inherited = ([worst(m, name) for name in names] for m in ("relative", "local", "inherited"))
    gains = [
        math.nan,
        *(after / before if before else math.nan for before, after in zip(total, inherited[1:], strict=False)),
    ]
    lines = {
        "total_error": (total, "error of the whole pass"),
        "local_error": (local, "local error, on equal input"),
        "inherited_error": (inherited, "inherited error"),
        "envelope": ([measured.envelope[name] for name in names], "noise envelope"),
        "gain": (gains, "inherited error over the error before"),
        "beyond": ([measured.beyond[name] for name in names], "times over the envelope"),
    }
    return {
        key: ("site", np.array(values, dtype=np.float32), {"long_name": words, "scale": "log"})
        for key, (values, words) in lines.items()
        if np.isfinite(values).any()
    }


def _coords(tokens: Mapping[str | None, Tokens]) -> dict[str, Any]:
    every = list(tokens.values())
    strings = np.array([*(string for own in every for string in own.strings), None], dtype=object)[:-1]
    coords: dict[str, Any] = {
        "text": ("token", np.concatenate([own.text for own in every])),
        "position": ("token", np.concatenate([own.positions for own in every])),
        "id": ("token", np.concatenate([own.ids for own in every])),
        "string": ("token", strings),
    }
    if len(every) > 1:
        names = np.repeat([str(stack) for stack in tokens], [len(own) for own in every])
        coords["stack"] = ("token", names.astype(object))
    return coords

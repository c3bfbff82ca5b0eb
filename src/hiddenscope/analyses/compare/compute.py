"""The differences of two sides, as labelled arrays and a report."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope import progress
from hiddenscope.analyses.compare.differences import (
    MEASURES,
    CKASample,
    Comparison,
    compare_text,
    largest_relative,
    put_cka,
)
from hiddenscope.analyses.compare.sides import (
    TextPairs,
    from_model,
    from_states,
    from_two_models,
)
from hiddenscope.analyses.compare.story import (
    CompareReport,
    CompareStack,
    End,
    FirstDifference,
    LargestDifference,
    Median,
    RoundingFloor,
)
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Coordinates,
    Variables,
    block_diagonal,
    column_coords,
    site_names,
    stack_column,
    to_dataset,
)
from hiddenscope.results.drawing import tokens_with_gaps
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import Pair, Readable
from hiddenscope.states.arrays import Floats32

if TYPE_CHECKING:
    import xarray

CELLS = ("site", "token")
# Along the sites, over the tokens that differ.
QUANTILES = {"median": 0.5, "largest": 1.0}


def compare_states(
    model: ModelLike | Readable | Pair,
    a: Texts | Inputs | Readable | Pair,
    b: Texts | Inputs | None,
    other: ModelLike | None,
    sites: SitePatterns | Direction,
    targets: Texts | Inputs | None,
    truncate: bool,
) -> Result:
    """Return the differences of two texts, models or states as a result."""
    direction = None
    if isinstance(sites, Direction):
        direction, sites = sites, sites.sites or tuple(sites.vectors)
    texts = _text_pairs(
        as_source(model), a, b, as_source(other), sites, targets, truncate
    )
    by_stack: dict[str | None, list[Comparison]] = {}
    sample = CKASample()
    with progress.track("Comparing", total=texts.count) as advance:
        for number, pair in enumerate(texts.pairs):
            for comparison, states in compare_text(
                number, pair, sites, by_spans=b is None, direction=direction
            ):
                by_stack.setdefault(comparison.stack, []).append(comparison)
                # An encoder and a decoder have two sets of tokens.
                if b is None and len(pair[0]) == 1:
                    differing = other is not None or not comparison.one_model
                    if differing or comparison.measures is None:
                        sample.add(comparison, states)
            advance(1)
    stacks = list(by_stack.values())
    if not stacks:
        raise StatesError(
            "Nothing to compare",
            "there are no texts",
            "Give at least one on each side.",
        )
    first = stacks[0][0]
    # Where the widths differ, nothing is measured token by token.
    cka_only = first.measures is None
    if cka_only:
        data = to_dataset({}, {"site": site_names(first.every[0])})
    else:
        data = _dataset(stacks)
    data.attrs |= _compared_texts(stacks)
    comparisons = [*chain(*stacks)]
    paired = sum(comparison.paired.shape[1] for comparison in comparisons)
    columns = sum(len(comparison.columns) for comparison in comparisons)
    floor = None
    if texts.repeat is not None:
        # What rounding alone does, where the two sides cannot be run in one batch.
        single, repeated, between = texts.repeat()
        relative = largest_relative(single, repeated)
        floor = RoundingFloor(relative=relative, between=between)
    notes = [texts.note] if texts.note else []
    reports = []
    if not cka_only:
        same = int((data["id"] == data["other_id"]).sum())
        if first.one_model and columns > paired >= 2 * same:
            notes.append(
                "Half of the compared tokens or more differ: without an equal one, the"
                " last of each text stand against each other."
            )
        reports = [_stack_report(data, stack) for stack in stacks]
    cka = None
    if len(stacks) == 1 and (cka_only or other is not None or not first.one_model):
        cka = put_cka(data, first, sample, required=cka_only)
    report = CompareReport(
        texts=texts.count,
        tokens_compared=paired,
        gaps=columns - paired,
        run=texts.run,
        computed_in="float64",
        rounding_floor=floor,
        stacks=reports,
        notes=notes,
        cka=cka,
    )
    source, other_source = (side.to_json() for side in first.source)
    if source != other_source:
        source = {**source, "other": other_source}
    return Result("compare", data, report, source)


def _text_pairs(
    model: Model | Readable | Pair,
    a: Any,
    b: Any,
    other: Model | None,
    sites: SitePatterns,
    targets: Texts | Inputs | None,
    truncate: bool,
) -> TextPairs:
    """Pair the two sides, once it is clear what they are."""
    if not isinstance(model, Model):
        states_only = b is None and other is None and targets is None
        if not isinstance(a, Pair | Readable) or not states_only:
            reason = "states are compared with states, and with nothing else"
            raise StatesError(
                "Cannot compare these states", reason, "Give compare(states, others)."
            )
        return from_states(model, a, sites)
    problem = f"Cannot compare in {model.name}"
    if isinstance(a, Pair | Readable) or isinstance(b, Pair | Readable):
        reason = "states were given, and they need no model"
        raise StatesError(problem, reason, "Give compare(states, others), or texts.")
    if (b is None) == (other is None):
        reason = "a second text and another model"
        if b is None:
            reason = "there is no second text and no other model"
            # Two ids are one text.
            if isinstance(a, list | tuple) and len(a) == 2 and isinstance(a[0], str):
                reason = "two texts were given as one side, and none as the other"
        raise TextError(problem, reason, "Give compare(model, a, b), or give other=.")
    if other is not None:
        return from_two_models((model, other), a, sites, targets, truncate)
    inputs = model.encode(a, targets=targets, truncate=truncate)
    # Encoded texts may bring targets of their own.
    if isinstance(b, Inputs) and b.targets is not None:
        targets = None
    other_inputs = model.encode(b, targets=targets, truncate=truncate)
    return from_model(model, inputs, other_inputs, sites)


def _dataset(stacks: Sequence[Sequence[Comparison]]) -> "xarray.Dataset":
    """Return one Dataset; with two stacks, cells without a state are NaN.

    It also has quantiles along the sites, over the tokens that differ.
    """
    sites: list[str] = []
    numbers: list[int] = []
    columns: Counter[str] = Counter()
    rows: tuple[list[Any], list[Any]] = ([], [])
    for stack in stacks:
        sites += site_names(stack[0].sites)
        for comparison in stack:
            numbers += [comparison.number] * len(comparison.columns)
            columns[str(comparison.stack)] += len(comparison.columns)
            for side, tokens in enumerate(comparison.tokens):
                cells = zip(tokens.positions, tokens.ids, tokens.strings, strict=True)
                # A gap has no row.
                by_row: dict[int | None, Any] = dict(enumerate(cells))
                rows[side].extend(by_row.get(pair[side]) for pair in comparison.columns)
    coords: Coordinates = {"site": sites, "text": ("token", np.array(numbers))}
    for prefix, of_side in zip(("", "other_"), rows, strict=True):
        coords |= column_coords(of_side, prefix=prefix)
    if len(stacks) > 1:
        coords["stack"] = "token", stack_column(columns)
    variables: Variables = {}
    for name in stacks[0][0].measures or ():
        blocks = []
        for stack in stacks:
            texts = [text.measures[name] for text in stack if text.measures is not None]
            blocks.append(np.concatenate(texts, axis=1))
        variables[name] = CELLS, block_diagonal(blocks), MEASURES[name]
    data = to_dataset(variables, coords)
    l2 = data["l2"].to_numpy()
    # In a causal model the tokens before the first difference are equal everywhere, and
    # would only dilute the others.
    differ = (np.nan_to_num(l2) > 0).any(0)
    if not differ.any():
        differ = np.isfinite(l2).any(0)
    for measure in ("l2", "relative"):
        attributes = MEASURES[measure]
        by_site = [row[differ & np.isfinite(row)] for row in data[measure].to_numpy()]
        for name, share in QUANTILES.items():
            values = np.full(len(by_site), np.nan, dtype=np.float32)
            for place, row in enumerate(by_site):
                if len(row):
                    values[place] = np.quantile(row, share)
            long_name = f"{name} {attributes['long_name']} of the tokens that differ"
            data[f"{measure}_{name}"] = (
                "site",
                values,
                {**attributes, "long_name": long_name},
            )
    return data


def _compared_texts(stacks: Sequence[Sequence[Comparison]]) -> dict[str, list[str]]:
    """Return the texts of both sides, where they are known."""
    known = {}
    # Two stacks are an encoder and a decoder.
    for stack, word in zip(stacks, ("texts", "targets"), strict=False):
        for side, name in enumerate((word, f"other_{word}")):
            texts: list[str] = []
            for comparison in stack:
                texts += comparison.tokens[side].texts or ()
            if len(texts) == len(stack):
                known[name] = texts
    return known


def _stack_report(data: "xarray.Dataset", stack: Sequence[Comparison]) -> CompareStack:
    """Report where the two sides of one stack differ, and how the difference grows."""
    first = stack[0]
    sites = first.sites
    data = data.sel(site=site_names(sites))
    if "stack" in data.coords:
        tokens = np.flatnonzero(data["stack"].to_numpy() == first.stack)
        data = data.isel(token=tokens)
    l2 = data["l2"].to_numpy()
    on_one_side = {*first.every[0], *first.every[1]} - set(sites)
    growth: dict[str, Any] = {}
    if (np.nan_to_num(l2) > 0).any():
        relative = data["relative"].to_numpy()
        site, token = np.unravel_index(np.nanargmax(relative), relative.shape)
        growth["largest_relative"] = LargestDifference(
            relative=float(relative[site, token]),
            site=str(sites[site]),
            token=_on_both_sides(data, int(token)),
        )
        growth |= _growth(sites, data["l2_median"].to_numpy())
    return CompareStack(
        stack=first.stack,
        first_difference=_first_difference(data, by_id=first.one_model),
        tokens_compared=int(np.isfinite(l2).any(0).sum()),
        tokens_equal=int((l2 == 0).all(0).sum()),
        sites_of_one_side=summarise(on_one_side) if on_one_side else None,
        **growth,
    )


def _growth(sites: Sequence[Site], medians: Floats32) -> dict[str, Any]:
    """Return where the median grows most from layer to layer, and how it ends.

    The end are the last two layers, raw, beside `final`: Hugging Face's hidden_states
    goes from the first of them to `final`.
    """
    at = [
        Median(site=str(site), median=float(median))
        for site, median in zip(sites, medians, strict=True)
    ]
    layers = []
    for place, site in enumerate(sites):
        if site.layer is not None and not site.part:
            layers.append(place)
    growth: dict[str, Any] = {}
    rises = [(float(medians[k] - medians[j]), j, k) for j, k in pairwise(layers)]
    if rises and max(rises)[0] > 0:
        _, before, after = max(rises)
        growth["largest_jump"] = {"from": at[before], "to": at[after]}
    is_final = sites[-1].layer is None and layers[-1:] == [len(sites) - 2]
    if is_final and len(layers) > 1:
        before_last, last, final = at[layers[-2]], at[-2], at[-1]
        share = None
        if before_last.median > final.median and last.median > final.median:
            drop = before_last.median - final.median
            share = min(1.0, (last.median - final.median) / drop)
        growth["end"] = End(
            before_last=before_last,
            last=last,
            final=final,
            share_of_drop_by_final_norm=share,
        )
    return growth


def _first_difference(data: "xarray.Dataset", *, by_id: bool) -> FirstDifference | None:
    """Return the first token whose id differs, or else whose states differ.

    In two models, only states count.
    """
    l2 = data["l2"].to_numpy()
    differ = data["id"].to_numpy() != data["other_id"].to_numpy()
    if not by_id or not differ.any():
        # A gap differs, too.
        differ = (np.nan_to_num(l2, nan=1) > 0).any(0)
    if not differ.any():
        return None
    token = int(np.argmax(differ))
    rows = np.flatnonzero(l2[:, token] > 0)
    return FirstDifference(
        token=_on_both_sides(data, token),
        text=int(data["text"][token]),
        position=[int(data[name][token]) for name in ("position", "other_position")],
        site=str(data["site"].values[rows[0]]) if len(rows) else None,
    )


def _on_both_sides(data: "xarray.Dataset", token: int) -> list[str | None]:
    """Return a token as each side has it; None for a gap."""
    here = data.isel(token=[token])
    return [tokens_with_gaps(here, prefix)[0] for prefix in ("", "other_")]

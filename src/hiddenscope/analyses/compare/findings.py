"""Findings of a comparison: differences as labelled arrays, and the facts they show."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.analyses.compare.differences import MEASURES, Comparison
from hiddenscope.results.dataset import (
    Coordinates,
    Variables,
    block_diagonal,
    column_coords,
    site_names,
    stack_column,
    to_dataset,
)
from hiddenscope.sites import Site, summarise

if TYPE_CHECKING:
    import xarray

CELLS = ("site", "token")
# Along the sites, over the tokens that differ.
QUANTILES = {"median": 0.5, "largest": 1.0}


def comparison_dataset(stacks: Sequence[Sequence[Comparison]]) -> "xarray.Dataset":
    """Return one Dataset; with two stacks, cells without a state are NaN."""
    sites: list[str] = []
    comparisons: list[Comparison] = []
    for stack in stacks:
        sites += site_names(stack[0].sites)
        comparisons += stack
    coords: Coordinates = {"site": sites, **_coords(comparisons)}
    if len(stacks) > 1:
        counts: Counter[str] = Counter()
        for comparison in comparisons:
            counts[str(comparison.stack)] += len(comparison.columns)
        coords["stack"] = "token", stack_column(counts)
    variables: Variables = {}
    for name, attributes in MEASURES.items():
        blocks = [_cells(stack, name) for stack in stacks]
        variables[name] = CELLS, block_diagonal(blocks), attributes
    return to_dataset(variables, coords)


def _cells(stack: Sequence[Comparison], name: str) -> NDArray[np.float32]:
    """Return one measure of all texts of a stack, `[site, column]`."""
    texts = [text.measures[name] for text in stack if text.measures is not None]
    return np.concatenate(texts, axis=1)


def _coords(comparisons: Sequence[Comparison]) -> Coordinates:
    """Label each column by its token on both sides."""
    numbers = [comparison.number for comparison in comparisons]
    counts = [len(comparison.columns) for comparison in comparisons]
    coords: Coordinates = {"text": ("token", np.repeat(numbers, counts))}
    for side, prefix in enumerate(("", "other_")):
        columns: list[tuple[int, int, str] | None] = []
        for comparison in comparisons:
            tokens = comparison.tokens[side]
            rows = list(zip(tokens.positions, tokens.ids, tokens.strings, strict=True))
            for column in comparison.columns:
                row = column[side]
                columns.append(None if row is None else rows[row])
        coords |= column_coords(columns, prefix=prefix)
    return coords


def put_along_sites(data: "xarray.Dataset") -> None:
    """Put quantiles along the sites into the data, over the tokens that differ."""
    l2 = data["l2"].to_numpy()
    # In a causal model the tokens before the first difference are equal everywhere, and
    # would only dilute the others.
    differ: NDArray[np.bool_] = (np.nan_to_num(l2) > 0).any(0)
    if not differ.any():
        differ = np.isfinite(l2).any(0)
    for measure in ("l2", "relative"):
        attributes = MEASURES[measure]
        rows = [row[differ & np.isfinite(row)] for row in data[measure].to_numpy()]
        for name, share in QUANTILES.items():
            values = np.full(len(rows), np.nan, dtype=np.float32)
            for place, row in enumerate(rows):
                if len(row):
                    values[place] = np.quantile(row, share)
            long_name = f"{name} {attributes['long_name']} of the tokens that differ"
            data[f"{measure}_{name}"] = (
                "site",
                values,
                {**attributes, "long_name": long_name},
            )


def compared_texts(stacks: Sequence[Sequence[Comparison]]) -> dict[str, list[str]]:
    """Return the texts of both sides, where they are known."""
    known: dict[str, list[str]] = {}
    # Two stacks are an encoder and a decoder.
    for stack, word in zip(stacks, ("texts", "targets"), strict=False):
        for side, name in enumerate((word, f"other_{word}")):
            texts: list[str] = []
            for comparison in stack:
                texts += comparison.tokens[side].texts or ()
            if len(texts) == len(stack):
                known[name] = texts
    return known


def comparison_stack_facts(
    data: "xarray.Dataset", stack: Sequence[Comparison]
) -> dict[str, Any]:
    """Return where the two sides of one stack differ, and how the difference grows."""
    first = stack[0]
    sites = first.sites
    data = data.sel(site=site_names(sites))
    if "stack" in data.coords:
        tokens = np.flatnonzero(data["stack"].to_numpy() == first.stack)
        data = data.isel(token=tokens)
    l2 = data["l2"].to_numpy()
    compared = np.isfinite(l2).any(0)
    facts: dict[str, Any] = {
        "stack": first.stack,
        "first_difference": _first_difference(data, by_id=first.one_model),
        "tokens_compared": int(compared.sum()),
        "tokens_equal": int((l2 == 0).all(0).sum()),
    }
    on_one_side = {*first.every[0], *first.every[1]} - set(sites)
    if on_one_side:
        facts["sites_of_one_side"] = summarise(on_one_side)
    if not (np.nan_to_num(l2) > 0).any():
        return facts
    relative = data["relative"].to_numpy()
    site, token = np.unravel_index(np.nanargmax(relative), relative.shape)
    facts["largest_relative"] = {
        "relative": relative[site, token],
        "site": sites[site],
        "token": _on_both_sides(data, int(token)),
    }
    medians = data["l2_median"].to_numpy()
    layers = [
        place
        for place, site in enumerate(sites)
        if site.layer is not None and not site.part
    ]
    rises = [(float(medians[k] - medians[j]), j, k) for j, k in pairwise(layers)]
    if rises and max(rises)[0] > 0:
        _, before, after = max(rises)
        facts["largest_jump"] = {
            "from": _at(sites, medians, before),
            "to": _at(sites, medians, after),
        }
    return facts | _end(sites, layers, medians)


def _at(
    sites: tuple[Site, ...], medians: NDArray[np.float32], place: int
) -> dict[str, Any]:
    return {"site": sites[place], "median": float(medians[place])}


def _first_difference(data: "xarray.Dataset", *, by_id: bool) -> dict[str, Any] | None:
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
    site = None
    rows = np.flatnonzero(l2[:, token] > 0)
    if len(rows):
        site = str(data["site"].values[rows[0]])
    return {
        "token": _on_both_sides(data, token),
        "text": int(data["text"][token]),
        "position": [int(data[name][token]) for name in ("position", "other_position")],
        "site": site,
    }


def _on_both_sides(data: "xarray.Dataset", token: int) -> list[str | None]:
    """Return a token as each side has it; None for a gap."""
    strings: list[str | None] = []
    for prefix in ("", "other_"):
        if int(data[f"{prefix}position"][token]) < 0:
            strings.append(None)
        else:
            strings.append(str(data[f"{prefix}string"].values[token]))
    return strings


def _end(
    sites: tuple[Site, ...], layers: list[int], medians: NDArray[np.float32]
) -> dict[str, Any]:
    """Return the differences of the last two layers, raw, beside that of `final`.

    Hugging Face's hidden_states goes from the first of them to `final`.
    """
    if sites[-1].layer is not None or len(layers) < 2 or layers[-1] != len(sites) - 2:
        return {}
    places = {"before_last": layers[-2], "last": layers[-1], "final": len(sites) - 1}
    end: dict[str, Any] = {
        name: _at(sites, medians, place) for name, place in places.items()
    }
    before, raw, normed = (end[name]["median"] for name in places)
    if before > normed and raw > normed:
        share = (raw - normed) / (before - normed)
        end["share_of_drop_by_final_norm"] = min(1.0, share)
    return {"end": end}

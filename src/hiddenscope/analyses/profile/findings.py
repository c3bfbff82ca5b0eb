"""Findings of a profile: its statistics as labelled arrays, and the facts they show."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.profile.statistics import (
    MASSIVE,
    NONE,
    RANKS,
    StackStatistics,
)
from hiddenscope.measures import WORTH_READING
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    block_diagonal,
    site_names,
    text_array,
    to_dataset,
    token_coords,
)
from hiddenscope.sites import summarise

if TYPE_CHECKING:
    import xarray

MOST_LISTED = 8

PER_STATE: Mapping[str, Attributes] = {
    "norm": {"long_name": "norm", "units": "L2", "scale": "log"},
    "mean": {"long_name": "mean over the width", "meaning": "diverging"},
    "deviation": {"long_name": "standard deviation over the width", "scale": "log"},
    "kurtosis": {"long_name": "kurtosis over the width", "scale": "log"},
}
PER_SITE = {
    "norm_first": "norm of the first token",
    "norm_median": "median norm of the other tokens",
    "norm_low": "lower quartile of the others' norms",
    "norm_high": "upper quartile of the others' norms",
    "mean_first": "mean over the width of the first token",
    "mean_median": "median mean over the width of the other tokens",
    "deviation_first": "standard deviation over the width of the first token",
    "deviation_median": "median standard deviation over the width of the other tokens",
    "kurtosis_first": "kurtosis over the width of the first token",
    "kurtosis_median": "median kurtosis over the width of the other tokens",
    "added_first": "what the block adds to the first token, over what it was given",
    "added_median": (
        "what the block adds to the other tokens, over what it was given, median"
    ),
    "anisotropy": "mean cosine between different tokens",
    "anisotropy_others": "mean cosine between different tokens, without first ones",
    "effective_rank": "effective rank",
    "effective_rank_others": "effective rank, without first tokens",
    "intrinsic_dimension": "intrinsic dimension",
    "intrinsic_dimension_others": "intrinsic dimension, without first tokens",
}
PER_SITE_POOLED = {
    "norm_median": "median norm of the vectors",
    "norm_low": "lower quartile of the vectors' norms",
    "norm_high": "upper quartile of the vectors' norms",
    "mean_median": "median mean over the width",
    "deviation_median": "median standard deviation over the width",
    "kurtosis_median": "median kurtosis over the width",
    "added_median": "what the block adds to a vector, over what it was given, median",
    "anisotropy": "mean cosine between different vectors",
    "effective_rank": "effective rank",
    "intrinsic_dimension": "intrinsic dimension",
}
# By the beginning of the name of a variable along the sites.
PER_SITE_ATTRIBUTES: Mapping[str, Attributes] = {
    "norm": {"units": "L2", "scale": "log"},
    "mean": {"meaning": "diverging"},
    "deviation": {"scale": "log"},
    "kurtosis": {"scale": "log"},
    "added": {"units": "share of the norm", "scale": "log"},
    "anisotropy": {"units": "cosine"},
    "effective_rank": {"units": "directions", "scale": "log"},
    "intrinsic_dimension": {"units": "directions", "scale": "log"},
}
CKA_POOLED = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if vectors were paired at random, on average",
}
CKA = {
    "cka": "linear CKA",
    "cka_others": "linear CKA, without first tokens",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
LARGEST_VALUES = {
    "channel": "channel with a large value, the largest first",
    "channel_value": "its largest value, by size",
    "channel_times": "that over the median of all values, by size",
    "channel_text": "text of the token that has it",
    "channel_position": "position of the token that has it",
    "channel_string": "token that has it",
}


def profile_dataset(
    stacks: Sequence[StackStatistics], *, normed: bool
) -> "xarray.Dataset":
    """Return one Dataset; with two stacks, cells without a state are NaN."""
    pooled = any(stack.pooled is not None for stack in stacks)
    variables: Variables = {}
    for name, attributes in PER_STATE.items():
        cells = []
        for stack in stacks:
            cells.append(np.stack([site.per_state[name] for site in stack.by_site]))
        variables[name] = ("site", "token"), block_diagonal(cells), attributes
    for name, long_name in (PER_SITE_POOLED if pooled else PER_SITE).items():
        values = np.concatenate([stack.per_site(name) for stack in stacks])
        variables[name] = "site", values, _per_site_attributes(name, long_name)
    for name, ranked in _largest_values(stacks).items():
        attributes = {"long_name": LARGEST_VALUES[name]}
        variables[name] = ("site", "rank"), ranked, attributes
    for name, long_name in (CKA_POOLED if pooled else CKA).items():
        squares = [_square(stack, getattr(stack, name)) for stack in stacks]
        cka = block_diagonal(squares)
        if np.isfinite(cka).any():
            variables[name] = ("site", "source_site"), cka, {"long_name": long_name}
    attrs = {}
    # Two stacks are an encoder and a decoder, whose texts are the targets.
    for name, stack in zip(("texts", "targets"), stacks, strict=False):
        texts = stack.source.tokens.texts
        if texts is not None:
            attrs[name] = list(texts)
    coords = _coords(stacks, normed=normed, paired="cka" in variables)
    return to_dataset(variables, coords, attrs)


def _per_site_attributes(name: str, long_name: str) -> Attributes:
    for prefix, attributes in PER_SITE_ATTRIBUTES.items():
        if name.startswith(prefix):
            return {"long_name": long_name, **attributes}
    raise KeyError(name)


def _square(stack: StackStatistics, values: torch.Tensor | None) -> NDArray[np.float32]:
    """Spread numbers of pairs of compared sites over all sites of a stack."""
    whole = np.full((len(stack.sites), len(stack.sites)), np.nan, dtype=np.float32)
    if values is not None:
        places = [stack.sites.index(site) for site in stack.compared]
        whole[np.ix_(places, places)] = values.float().numpy()
    return whole


def _largest_values(stacks: Sequence[StackStatistics]) -> dict[str, NDArray[Any]]:
    """Return the channels with the largest values, `[site, rank]`.

    Where there are fewer channels, the numbers are -1 or NaN and the text is empty.
    """
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in LARGEST_VALUES}
    for stack in stacks:
        tokens = stack.source.tokens
        for site in stack.by_site:
            largest, rows = site.largest_values, site.largest_values.row
            strings = text_array([tokens.strings[row] for row in rows])
            columns["channel"].append(_padded(largest.channel, NONE))
            columns["channel_value"].append(_padded(largest.value, np.nan))
            columns["channel_times"].append(_padded(largest.times, np.nan))
            columns["channel_text"].append(_padded(tokens.text[rows], NONE))
            columns["channel_position"].append(_padded(tokens.positions[rows], NONE))
            columns["channel_string"].append(_padded(strings, ""))
    return {name: np.stack(rows) for name, rows in columns.items()}


def _padded(column: NDArray[Any], empty: int | float | str) -> NDArray[Any]:
    padded = np.full(RANKS, empty, dtype=column.dtype)
    padded[: len(column)] = column
    return padded


def _coords(
    stacks: Sequence[StackStatistics], *, normed: bool, paired: bool
) -> Coordinates:
    names: list[str] = []
    forms: list[str] = []
    for stack in stacks:
        names += site_names(stack.sites)
        for site in stack.sites:
            forms.append("normed" if normed or site.layer is None else "raw")
    coords: Coordinates = {"site": names, "form": ("site", text_array(forms))}
    if paired:
        coords["source_site"] = names
    tokens = [
        stack.source.tokens.select(slice(stack.stored_tokens)) for stack in stacks
    ]
    stack_names = [str(stack.stack) for stack in stacks] if len(stacks) > 1 else []
    return {**coords, **token_coords(tokens, stack_names)}


def profile_stack_facts(stack: StackStatistics) -> dict[str, Any]:
    """Return the facts of one stack, as far as there is anything to say."""
    layers = [place for place, site in enumerate(stack.sites) if site.layer is not None]
    quarter = len(layers) // 4
    middle = layers[quarter : len(layers) - quarter]
    facts: dict[str, Any] = {
        "stack": stack.stack,
        "few_tokens": stack.counts[1] < WORTH_READING,
        **_norms(stack, middle),
        **_largest_norm(stack),
    }
    for name in ("anisotropy", "effective_rank"):
        columns = {"all_tokens": name, "other_tokens": f"{name}_others"}
        if stack.pooled is not None:
            columns = {"all_vectors": name}
        medians = {}
        for key, column in columns.items():
            median = _median(stack.per_site(column)[middle])
            if np.isfinite(median):
                medians[key] = median
        if medians:
            facts[name] = medians
    dimension = "intrinsic_dimension"
    if stack.pooled is None:
        dimension = "intrinsic_dimension_others"
    facts |= _extremes(stack, "intrinsic_dimension", dimension)
    facts |= _extremes(stack, "added", "added_median")
    return facts | _massive(stack) | _cka(stack)


def _median(values: NDArray[np.float32]) -> float:
    """Return the median of the finite values, NaN if there are none."""
    values = values[np.isfinite(values)]
    if not len(values):
        return float("nan")
    return float(np.median(values))


def _norms(stack: StackStatistics, middle: list[int]) -> dict[str, Any]:
    """Return the norms over the middle layers and around the final norm."""
    if not middle:
        return {}
    names = {"first_token_norm": "norm_first", "other_tokens_norm": "norm_median"}
    if stack.pooled is not None:
        names = {"vector_norm": "norm_median"}
    columns = {key: stack.per_site(name) for key, name in names.items()}
    norms = {}
    for name, column in columns.items():
        norm = float(np.median(column[middle]))
        if np.isfinite(norm):
            norms[name] = norm
    facts: dict[str, Any] = {
        "middle_layers": summarise([stack.sites[place] for place in middle]),
        **norms,
    }
    others = norms.get("other_tokens_norm", 0.0)
    if others > 0 and "first_token_norm" in norms:
        facts["norm_ratio"] = norms["first_token_norm"] / others
    if stack.sites[-1].layer is None:
        for key, place in (("before_final", -2), ("at_final", -1)):
            facts[key] = {"site": stack.sites[place]}
            for name, column in columns.items():
                if np.isfinite(column[-2:]).all():
                    facts[key][name] = float(column[place])
    return facts


def _largest_norm(stack: StackStatistics) -> dict[str, Any]:
    """Return the state with the largest norm, and the first that is not finite."""
    facts: dict[str, Any] = {}
    sites = list(zip(stack.sites, stack.by_site, strict=True))
    finite = [(site, numbers) for site, numbers in sites if numbers.largest != NONE]
    if finite:
        site, numbers = max(finite, key=lambda pair: pair[1].highest)
        facts["largest_norm"] = {
            "norm": numbers.highest,
            "site": site,
            **_row(stack, numbers.largest),
        }
    broken = [(site, numbers) for site, numbers in sites if numbers.not_finite]
    if broken:
        site, numbers = broken[0]
        facts["not_finite"] = {
            "states": sum(numbers.not_finite for _, numbers in broken),
            "site": site,
            **_row(stack, numbers.first_not_finite),
        }
    return facts


def _row(stack: StackStatistics, row: int) -> dict[str, Any]:
    """Name a row by its token, or by its text where states are pooled."""
    tokens = stack.source.tokens
    if stack.pooled is None:
        return {"token": tokens.strings[row]}
    return {"text": int(tokens.text[row])}


def _extremes(stack: StackStatistics, key: str, name: str) -> dict[str, Any]:
    """Return where a number along the layers is lowest and where it is highest."""
    values = stack.per_site(name)
    if not np.isfinite(values).any():
        return {}
    lowest, highest = int(np.nanargmin(values)), int(np.nanargmax(values))
    return {
        key: {
            "lowest": {"site": stack.sites[lowest], "value": float(values[lowest])},
            "highest": {"site": stack.sites[highest], "value": float(values[highest])},
        }
    }


def _massive(stack: StackStatistics) -> dict[str, Any]:
    """Return the largest value of all, and the massive activations."""
    largest = None
    largest_times = -np.inf
    for site, numbers in zip(stack.sites, stack.by_site, strict=True):
        values = numbers.largest_values
        times = values.times[0] if len(values.times) else np.nan
        # No comparison with NaN is true.
        if largest_times < times < np.inf:
            largest, largest_times = (site, values), times
    if largest is None:
        return {}
    site, values = largest
    row = int(values.row[0])
    tokens = stack.source.tokens
    largest_value = {
        "times_median": largest_times,
        "site": site,
        "channel": int(values.channel[0]),
        **_row(stack, row),
    }
    if stack.pooled is None:
        largest_value["position"] = int(tokens.positions[row])
    facts: dict[str, Any] = {"largest_value": largest_value}
    rows, channels = np.concatenate(
        [numbers.massive for numbers in stack.by_site], axis=1
    )
    if not len(rows):
        return facts
    sites = [
        site
        for site, numbers in zip(stack.sites, stack.by_site, strict=True)
        if numbers.massive.size
    ]
    massive: dict[str, Any] = {
        "threshold": MASSIVE,
        "values": len(rows),
        "channels": _most_common("channel", channels.tolist()),
        "sites": summarise(sites),
    }
    if stack.pooled is None:
        strings = [tokens.strings[row] for row in rows]
        massive["at_first_tokens"] = int((tokens.positions[rows] == 0).sum())
        massive["tokens"] = _most_common("token", strings)
    return {**facts, "massive_activations": massive}


def _most_common(name: str, values: Iterable[Hashable]) -> list[dict[str, Any]]:
    counts = Counter(values).most_common(MOST_LISTED)
    return [{name: value, "values": count} for value, count in counts]


def _cka(stack: StackStatistics) -> dict[str, Any]:
    """Return the median CKA of all pairs of layers, and the least similar pair."""
    if stack.cka is None or len(stack.compared) < 2:
        return {}
    upper = torch.ones_like(stack.cka).triu(1).bool()
    facts: dict[str, Any] = {}
    medians: dict[str, torch.Tensor | None] = {"median": stack.cka}
    if stack.pooled is None:
        facts["sampled_tokens"] = stack.counts[0]
        medians["median_other_tokens"] = stack.cka_others
    else:
        facts["sampled_vectors"] = stack.counts[0]
    medians["median_by_chance"] = stack.cka_chance
    for key, values in medians.items():
        if values is None:
            continue
        median = _median(values[upper].numpy())
        if np.isfinite(median):
            facts[key] = median
    values = stack.cka if stack.cka_others is None else stack.cka_others
    pairs = torch.where(upper & values.isfinite(), values, torch.inf)
    if bool(pairs.isfinite().any()):
        row, column = np.unravel_index(int(pairs.argmin()), pairs.shape)
        facts["least_alike"] = {
            "site": stack.compared[row],
            "source_site": stack.compared[column],
            "cka": float(pairs[row, column]),
        }
    return {"cka": facts}

"""The profile as labelled arrays, and the facts that are read off them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.profile.statistics import (
    MASSIVE,
    NONE,
    RANKS,
    Array,
    StackStatistics,
)
from hiddenscope.measures import WORTH_READING
from hiddenscope.sites import summarise

if TYPE_CHECKING:
    import xarray

MOST_LISTED = 8

PER_STATE: Mapping[str, Mapping[str, str]] = {
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
UNITS: Mapping[str, Mapping[str, str]] = {
    **{
        name: {key: word for key, word in look.items() if key != "long_name"}
        for name, look in PER_STATE.items()
    },
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


def data_of(stacks: Sequence[StackStatistics], *, normed: bool) -> "xarray.Dataset":
    """One Dataset. With two stacks, cells without a state are NaN, and the coordinate
    `stack` tells tokens apart.
    """
    import xarray

    columns: dict[str, Any] = {}
    for name, look in PER_STATE.items():
        cells = [
            np.stack([one.per_state[name] for one in stack.of_site]) for stack in stacks
        ]
        columns[name] = (("site", "token"), _block_diagonal(cells), dict(look))
    pooled = any(stack.pooled is not None for stack in stacks)
    for name, long_name in (PER_SITE_POOLED if pooled else PER_SITE).items():
        look = next(look for prefix, look in UNITS.items() if name.startswith(prefix))
        values = np.concatenate([stack.per_site(name) for stack in stacks])
        columns[name] = ("site", values, {"long_name": long_name, **look})
    for name, ranked in _largest_values(stacks).items():
        columns[name] = (("site", "rank"), ranked, {"long_name": LARGEST_VALUES[name]})
    for name, long_name in (CKA_POOLED if pooled else CKA).items():
        squares = [_square(stack, getattr(stack, name)) for stack in stacks]
        if any(np.isfinite(square).any() for square in squares):
            columns[name] = (
                ("site", "source_site"),
                _block_diagonal(squares),
                {"long_name": long_name},
            )
    names = zip(
        ("texts", "targets"),
        (stack.source.tokens.texts for stack in stacks),
        strict=False,
    )
    attrs = {name: list(texts) for name, texts in names if texts is not None}
    return xarray.Dataset(
        columns, _coords(stacks, normed=normed, paired="cka" in columns), attrs
    )


def _block_diagonal(blocks: Sequence[Array]) -> Array:
    """The arrays of several stacks corner to corner, NaN between them."""
    whole = np.full(
        [sum(block.shape[axis] for block in blocks) for axis in (0, 1)],
        np.nan,
        dtype=np.float32,
    )
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


def _square(stack: StackStatistics, values: torch.Tensor | None) -> Array:
    """Numbers of pairs of compared sites, spread over all sites of a stack."""
    whole = np.full((len(stack.sites), len(stack.sites)), np.nan, dtype=np.float32)
    if values is not None:
        places = [stack.sites.index(site) for site in stack.compared]
        whole[np.ix_(places, places)] = values.float().numpy()
    return whole


def _largest_values(stacks: Sequence[StackStatistics]) -> dict[str, NDArray[Any]]:
    """The channels with the largest values, `[site, rank]`; -1, NaN and no text where
    there are fewer channels.
    """
    columns: dict[str, list[Any]] = {name: [] for name in LARGEST_VALUES}
    for stack in stacks:
        tokens = stack.source.tokens
        for one in stack.of_site:
            largest, rows = one.largest_values, one.largest_values.row
            strings = np.array(
                [*(tokens.strings[row] for row in rows), None], dtype=object
            )[:-1]
            numbers: list[NDArray[Any]] = [
                largest.channel,
                largest.value,
                largest.times,
            ]
            values = [*numbers, tokens.text[rows], tokens.positions[rows], strings]
            for name, column in zip(LARGEST_VALUES, values, strict=True):
                empty: Any = (
                    ""
                    if column.dtype == object
                    else NONE
                    if column.dtype.kind == "i"
                    else np.nan
                )
                padded = np.full(RANKS, empty, dtype=column.dtype)
                padded[: len(column)] = column
                columns[name].append(padded)
    return {name: np.stack(rows) for name, rows in columns.items()}


def _coords(
    stacks: Sequence[StackStatistics], *, normed: bool, paired: bool
) -> dict[str, Any]:
    tokens = [stack.source.tokens.select(slice(stack.kept)) for stack in stacks]
    sites = [site for stack in stacks for site in stack.sites]
    names = [str(site) for site in sites]
    strings = np.array(
        [*(string for one in tokens for string in one.strings), None], dtype=object
    )[:-1]
    of_stack = np.repeat(
        [str(stack.stack) for stack in stacks], [len(one) for one in tokens]
    ).astype(object)
    forms = np.where(
        [normed or site.layer is None for site in sites], "normed", "raw"
    ).astype(object)
    return {
        "site": names,
        "form": ("site", forms),
        **({"source_site": names} if paired else {}),
        "text": ("token", np.concatenate([one.text for one in tokens])),
        "position": ("token", np.concatenate([one.positions for one in tokens])),
        "id": ("token", np.concatenate([one.ids for one in tokens])),
        "string": ("token", strings),
        **({"stack": ("token", of_stack)} if len(stacks) > 1 else {}),
    }


def stack_facts(stack: StackStatistics) -> dict[str, Any]:
    """The facts of one stack, as far as there is anything to say."""
    middle = _middle(stack)
    facts: dict[str, Any] = {
        "stack": stack.stack,
        "few_tokens": stack.counts[1] < WORTH_READING,
    }
    facts |= _norms(stack, middle)
    for name in ("anisotropy", "effective_rank"):
        columns = {"all_tokens": name, "other_tokens": f"{name}_others"}
        columns = columns if stack.pooled is None else {"all_vectors": name}
        medians = {
            key: _median(stack.per_site(column)[middle])
            for key, column in columns.items()
        }
        if finite := {
            key: value for key, value in medians.items() if np.isfinite(value)
        }:
            facts[name] = finite
    others = (
        "intrinsic_dimension_others" if stack.pooled is None else "intrinsic_dimension"
    )
    facts |= _extremes(stack, "intrinsic_dimension", others)
    facts |= _extremes(stack, "added", "added_median")
    return facts | _massive(stack) | _cka(stack)


def _middle(stack: StackStatistics) -> list[int]:
    """The places of the middle half of the layers."""
    layers = [place for place, site in enumerate(stack.sites) if site.layer is not None]
    return layers[len(layers) // 4 : len(layers) - len(layers) // 4]


def _median(values: Array) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _norms(stack: StackStatistics, middle: list[int]) -> dict[str, Any]:
    """The norms of first tokens and of the others, over the middle layers and around
    the final norm.
    """
    names = {"first_token_norm": "norm_first", "other_tokens_norm": "norm_median"}
    names = names if stack.pooled is None else {"vector_norm": "norm_median"}
    columns = {key: stack.per_site(name) for key, name in names.items()}
    facts: dict[str, Any] = {}
    if middle:
        facts["middle_layers"] = summarise([stack.sites[place] for place in middle])
        norms = {
            name: float(np.median(column[middle])) for name, column in columns.items()
        }
        facts |= {name: norm for name, norm in norms.items() if np.isfinite(norm)}
        first, others = (
            norms.get("first_token_norm", np.nan),
            norms.get("other_tokens_norm", 0.0),
        )
        if others > 0 and np.isfinite(first):
            facts["norm_ratio"] = first / others
    if middle and stack.sites[-1].layer is None:
        for key, place in (("before_final", -2), ("at_final", -1)):
            known = {
                name: float(column[place])
                for name, column in columns.items()
                if np.isfinite(column[-2:]).all()
            }
            facts[key] = {"site": stack.sites[place], **known}
    return facts | _largest_norm(stack)


def _largest_norm(stack: StackStatistics) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    pairs = list(zip(stack.sites, stack.of_site, strict=True))
    if finite := [(site, one) for site, one in pairs if one.largest >= 0]:
        site, one = max(finite, key=lambda pair: pair[1].highest)
        facts["largest_norm"] = {
            "norm": one.highest,
            "site": site,
            **_row(stack, one.largest),
        }
    if broken := [(site, one) for site, one in pairs if one.not_finite]:
        site, one = broken[0]
        states = sum(one.not_finite for _, one in broken)
        facts["not_finite"] = {
            "states": states,
            "site": site,
            **_row(stack, one.first_not_finite),
        }
    return facts


def _row(stack: StackStatistics, row: int) -> dict[str, Any]:
    """A row by its token, or by the number of its text where states are pooled."""
    tokens = stack.source.tokens
    return (
        {"token": tokens.strings[row]}
        if stack.pooled is None
        else {"text": int(tokens.text[row])}
    )


def _extremes(stack: StackStatistics, key: str, name: str) -> dict[str, Any]:
    """Where a number along the layers is lowest and where it is highest."""
    values = stack.per_site(name)
    if not np.isfinite(values).any():
        return {}
    places = {"lowest": int(np.nanargmin(values)), "highest": int(np.nanargmax(values))}
    return {
        key: {
            end: {"site": stack.sites[at], "value": float(values[at])}
            for end, at in places.items()
        }
    }


def _massive(stack: StackStatistics) -> dict[str, Any]:
    """The largest value of all, and how many massive activations there are, by channel,
    site and token.
    """
    tokens = stack.source.tokens
    tops = [
        (one.largest_values, site)
        for site, one in zip(stack.sites, stack.of_site, strict=True)
    ]
    finite = [
        (some.times[0], some, site)
        for some, site in tops
        if len(some.times) and np.isfinite(some.times[0])
    ]
    if not finite:
        return {}
    times, some, site = max(finite, key=lambda one: one[0])
    row, channel = int(some.row[0]), int(some.channel[0])
    token = _row(stack, row) | (
        {"position": int(tokens.positions[row])} if stack.pooled is None else {}
    )
    facts: dict[str, Any] = {
        "largest_value": {
            "times_median": times,
            "site": site,
            "channel": channel,
            **token,
        }
    }
    rows, channels = np.concatenate([one.massive for one in stack.of_site], axis=1)
    if len(rows):
        facts["massive_activations"] = {
            "threshold": MASSIVE,
            "values": len(rows),
            "channels": [
                {"channel": c, "values": n}
                for c, n in Counter(channels.tolist()).most_common(MOST_LISTED)
            ],
            "sites": summarise(
                [
                    site
                    for site, one in zip(stack.sites, stack.of_site, strict=True)
                    if one.massive.size
                ]
            ),
        }
        if stack.pooled is None:
            strings = Counter(tokens.strings[row] for row in rows.tolist()).most_common(
                MOST_LISTED
            )
            facts["massive_activations"] |= {
                "at_first_tokens": int((tokens.positions[rows] == 0).sum()),
                "tokens": [{"token": string, "values": n} for string, n in strings],
            }
    return facts


def _cka(stack: StackStatistics) -> dict[str, Any]:
    """The medians of the CKA of all pairs of layers, and the pair that is least alike."""
    if stack.cka is None or len(stack.compared) < 2:
        return {}
    upper = torch.ones_like(stack.cka).triu(1).bool()
    facts: dict[str, Any] = {
        "sampled_tokens" if stack.pooled is None else "sampled_vectors": stack.counts[0]
    }
    others = {"median_other_tokens": stack.cka_others} if stack.pooled is None else {}
    medians = {"median": stack.cka, **others, "median_by_chance": stack.cka_chance}
    for key, values in medians.items():
        if values is not None and np.isfinite(median := _median(values[upper].numpy())):
            facts[key] = median
    values = stack.cka if stack.cka_others is None else stack.cka_others
    pairs = torch.where(upper & values.isfinite(), values, torch.inf)
    if bool(pairs.isfinite().any()):
        row, column = np.unravel_index(int(pairs.argmin()), pairs.shape)
        sites = {"site": stack.compared[row], "source_site": stack.compared[column]}
        facts["least_alike"] = {**sites, "cka": float(pairs[row, column])}
    return {"cka": facts}

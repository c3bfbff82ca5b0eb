"""Table: the numbers of all sites, of one stack or two, as one Dataset."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.profile.sweep import NONE, RANKS, Array, Seen
from hiddenscope.sites import Site
from hiddenscope.states import Readable

if TYPE_CHECKING:
    import xarray

OF_EACH = {
    "norm": {"long_name": "norm", "units": "L2", "scale": "log"},
    "mean": {"long_name": "mean over the width", "meaning": "diverging"},
    "deviation": {"long_name": "standard deviation over the width", "scale": "log"},
    "kurtosis": {"long_name": "kurtosis over the width", "scale": "log"},
}
ALONG = {
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
    "added_median": "what the block adds to the other tokens, over what it was given, median",
    "anisotropy": "mean cosine between different tokens",
    "anisotropy_others": "mean cosine between different tokens, without first ones",
    "effective_rank": "effective rank",
    "effective_rank_others": "effective rank, without first tokens",
    "intrinsic_dimension": "intrinsic dimension",
    "intrinsic_dimension_others": "intrinsic dimension, without first tokens",
}
LOOKS: dict[str, dict[str, str]] = {
    **{name: {key: said for key, said in look.items() if key != "long_name"} for name, look in OF_EACH.items()},
    "added": {"units": "share of the norm", "scale": "log"},
    "anisotropy": {"units": "cosine"},
    "effective_rank": {"units": "directions", "scale": "log"},
    "intrinsic_dimension": {"units": "directions", "scale": "log"},
}
ALIKE = {
    "cka": "linear CKA",
    "cka_others": "linear CKA, without first tokens",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
LARGEST = {
    "channel": "channel with a large value, the largest first",
    "channel_value": "its largest value, by size",
    "channel_times": "that over the median of all values, by size",
    "channel_text": "text of the token that has it",
    "channel_position": "position of the token that has it",
    "channel_string": "token that has it",
}


@dataclass(eq=False)
class Part:
    """One stack: where it was read from, what was seen at each site, and how alike those on one footing are."""

    source: Readable
    sites: tuple[Site, ...]
    seen: list[Seen]
    rows: NDArray[np.int64]
    alike: list[Site] = field(default_factory=list)
    counts: tuple[int, int] = (0, 0)
    cka: torch.Tensor | None = None
    cka_others: torch.Tensor | None = None
    chance: torch.Tensor | None = None

    def along(self, name: str) -> Array:
        """One number a site, NaN where it was not asked."""
        return np.array([one.along.get(name, np.nan) for one in self.seen], dtype=np.float32)


def data_of(parts: list[Part], footing: str) -> "xarray.Dataset":
    """One Dataset; with two stacks, the cells in which no state is are NaN, and every token says its stack."""
    import xarray

    cells = [len(part.seen[0].cells["norm"]) for part in parts]
    columns: dict[str, Any] = {}
    for name, look in OF_EACH.items():
        values = [np.stack([one.cells[name] for one in part.seen]) for part in parts]
        columns[name] = (("site", "token"), _diagonal(values), look)
    for name, said in ALONG.items():
        look = next(look for of, look in LOOKS.items() if name.startswith(of))
        columns[name] = ("site", np.concatenate([part.along(name) for part in parts]), {"long_name": said, **look})
    for name, ranked in _channels(parts).items():
        columns[name] = (("site", "rank"), ranked, {"long_name": LARGEST[name]})
    for name, said in ALIKE.items():
        squares = [_square(part, getattr(part, name.replace("cka_chance", "chance"))) for part in parts]
        if any(np.isfinite(square).any() for square in squares):
            columns[name] = (("site", "source_site"), _diagonal(squares), {"long_name": said})
    return xarray.Dataset(columns, _coords(parts, cells, footing, paired="cka" in columns), _texts(parts))


def _diagonal(values: list[Array]) -> Array:
    """Arrays of several stacks corner to corner, NaN between them."""
    whole = np.full([sum(part.shape[axis] for part in values) for axis in (0, 1)], np.nan, dtype=np.float32)
    row = column = 0
    for part in values:
        whole[row : row + part.shape[0], column : column + part.shape[1]] = part
        row, column = row + part.shape[0], column + part.shape[1]
    return whole


def _square(part: Part, values: torch.Tensor | None) -> Array:
    """Numbers of pairs of sites, spread over all sites of a stack."""
    whole = np.full((len(part.sites), len(part.sites)), np.nan, dtype=np.float32)
    if values is not None:
        here = [part.sites.index(site) for site in part.alike]
        whole[np.ix_(here, here)] = values.float().numpy()
    return whole


def _channels(parts: list[Part]) -> dict[str, NDArray[Any]]:
    """What is known of the largest channels, `[site, rank]`; -1, NaN and no text where there is none."""
    found: dict[str, list[Any]] = {name: [] for name in LARGEST}
    for part in parts:
        tokens = part.source.tokens
        for one in part.seen:
            largest, rows = one.channels, one.channels.row
            strings = np.array([*(tokens.strings[row] for row in rows), None], dtype=object)[:-1]
            numbers: list[NDArray[Any]] = [largest.channel, largest.value, largest.times]
            known = [*numbers, tokens.text[rows], tokens.positions[rows], strings]
            for values, name in zip(known, LARGEST, strict=True):
                empty: Any = "" if values.dtype == object else NONE if values.dtype.kind == "i" else np.nan
                filled = np.full(RANKS, empty, dtype=values.dtype)
                filled[: len(values)] = values
                found[name].append(filled)
    return {name: np.stack(rows) for name, rows in found.items()}


def _coords(parts: list[Part], cells: list[int], footing: str, *, paired: bool) -> dict[str, Any]:
    tokens = [part.source.tokens.select(slice(kept)) for part, kept in zip(parts, cells, strict=True)]
    sites = [str(site) for part in parts for site in part.sites]
    normed = [footing == "normed" or site.layer is None for part in parts for site in part.sites]
    strings = np.array([*(string for some in tokens for string in some.strings), None], dtype=object)[:-1]
    stacks = np.repeat([str(part.sites[0].stack) for part in parts], [len(some) for some in tokens])
    return {
        "site": sites,
        "footing": ("site", np.where(normed, "normed", "raw").astype(object)),
        **({"source_site": sites} if paired else {}),
        "text": ("token", np.concatenate([some.text for some in tokens])),
        "position": ("token", np.concatenate([some.positions for some in tokens])),
        "id": ("token", np.concatenate([some.ids for some in tokens])),
        "string": ("token", strings),
        **({"stack": ("token", stacks.astype(object))} if len(parts) > 1 else {}),
    }


def _texts(parts: list[Part]) -> dict[str, list[str]]:
    named = zip(("texts", "targets"), (part.source.tokens.texts for part in parts), strict=False)
    return {name: list(texts) for name, texts in named if texts is not None}

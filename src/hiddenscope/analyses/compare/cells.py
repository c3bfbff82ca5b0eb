"""Cells: what is measured in every column, by site, and how it is put into one Dataset."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.compare.alignment import aligned
from hiddenscope.analyses.compare.sides import ANYWHERE, Side, Sides
from hiddenscope.errors import SiteError, StatesError
from hiddenscope.passes import Columns
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, Source, States, Tokens

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[np.float32]

LOOKS: Mapping[str, Mapping[str, str]] = {
    "l2": {"long_name": "difference", "units": "L2", "scale": "log"},
    "relative": {"long_name": "relative difference", "units": "L2 over the mean of the two norms"},
    "cosine": {"long_name": "cosine of the two states"},
    "mean": {"long_name": "mean of the difference over the width, second less first", "meaning": "diverging"},
    "deviation": {"long_name": "standard deviation of the difference over the width", "scale": "log"},
}
ALONG = {"median": 0.5, "largest": 1.0}  # quantiles over the tokens that differ


@dataclass(frozen=True, eq=False)
class Piece:
    """One text in one stack, compared: the tokens of both sides, how they are aligned, and what was measured."""

    number: int
    tokens: tuple[Tokens, Tokens]
    every: tuple[tuple[Site, ...], tuple[Site, ...]]
    source: tuple[Source, Source]
    sites: tuple[Site, ...]
    columns: Columns
    measures: dict[str, Array] | None

    @property
    def stack(self) -> str | None:
        """The stack that it is in, where there are two."""
        return self.every[0][0].stack

    @property
    def alike(self) -> bool:
        """Whether both sides are known to come from one model."""
        return self.source[0] == self.source[1] != ANYWHERE

    @property
    def paired(self) -> NDArray[np.int64]:
        """The rows of both sides that stand in one column, `[2, pair]`."""
        rows = [(i, j) for i, j in self.columns if i is not None and j is not None]
        return np.array(rows, dtype=np.int64).reshape(-1, 2).T


def pieces_of(number: int, pair: Sides, sites: Any, *, spans: bool) -> Iterator[tuple[Piece, tuple[States, States]]]:
    """One text, stack by stack, with the states that it was measured on."""
    if type(pair[0]) is not type(pair[1]):
        reason = "one has an encoder and a decoder and the other one stack"
        raise StatesError("A comparison of two models", reason, "Compare models of one kind.")
    for a, b in zip(*map(stacks_of, pair), strict=True):
        a, b = a.select(sites=sites), b.select(sites=sites)
        columns = aligned(a.tokens, b.tokens, spans=spans)
        common = tuple(site for site in a.sites if site in b.sites)
        measures = None
        if a.width == b.width:
            if not common:
                reason = f"they have {summarise(a.sites)} and {summarise(b.sites)}"
                raise SiteError("Sites that both have", reason, "Choose sites that are in both.")
            measures = measured(a, b, common, columns)
        elif isinstance(pair[0], Pair):
            reason = f"the {a.sites[0].stack}s are {a.width} and {b.width} wide"
            remedy = "Compare one stack: compare(a.encoder, b.encoder)."
            raise StatesError("Two encoder-decoders compared", reason, remedy)
        sources = a.source, b.source
        yield Piece(number, (a.tokens, b.tokens), (a.sites, b.sites), sources, common, columns, measures), (a, b)


def stacks_of(side: Side) -> list[States]:
    """The stacks of one side."""
    return [side.encoder, side.decoder] if isinstance(side, Pair) else [side]


def measured(a: States, b: States, sites: tuple[Site, ...], columns: Columns) -> dict[str, Array]:
    """Every measure, `[site, column]`, NaN in gaps; computed in float64 and kept as float32."""
    found = {name: np.full((len(sites), len(columns)), np.nan, dtype=np.float32) for name in LOOKS}
    here = [place for place, (i, j) in enumerate(columns) if i is not None and j is not None]
    left, right = (torch.tensor([columns[place][side] for place in here], dtype=torch.long) for side in (0, 1))
    for row, site in enumerate(sites):
        x, y = a[site].detach().cpu()[left].double(), b[site].detach().cpu()[right].double()
        difference, xx, yy = y - x, (x * x).sum(-1), (y * y).sum(-1)
        l2, norms = difference.norm(dim=-1), (xx.sqrt() + yy.sqrt()) / 2
        numbers = {
            "l2": l2,
            "relative": torch.where(l2 == 0, 0.0, l2 / norms),
            "cosine": ((x * y).sum(-1) / (xx * yy).sqrt()).clamp(-1, 1),  # in this form exactly 1 for equal states
            "mean": difference.mean(-1),
            "deviation": difference.std(-1, correction=0),
        }
        for name, values in numbers.items():
            found[name][row, here] = values.numpy()
    return found


def data_of(stacks: list[list[Piece]]) -> "xarray.Dataset":
    """One Dataset; with two stacks, the cells in which no state is are NaN."""
    import xarray

    widths = [[len(one.columns) for one in some] for some in stacks]
    sites = [str(site) for some in stacks for site in some[0].sites]
    columns: dict[str, Any] = {}
    for name, look in LOOKS.items():
        cells = np.full((len(sites), sum(map(sum, widths))), np.nan, dtype=np.float32)
        row = column = 0
        for some in stacks:
            values = np.concatenate([one.measures[name] for one in some if one.measures is not None], axis=1)
            cells[row : row + values.shape[0], column : column + values.shape[1]] = values
            row, column = row + values.shape[0], column + values.shape[1]
        columns[name] = (("site", "token"), cells, dict(look))
    coords = _coords([one for some in stacks for one in some])
    if len(stacks) > 1:
        named = np.repeat([str(some[0].stack) for some in stacks], [sum(width) for width in widths])
        coords["stack"] = ("token", named.astype(object))
    return xarray.Dataset(columns, {"site": sites, **coords})


def _coords(pieces: list[Piece]) -> dict[str, Any]:
    """What stands in each column on both sides: position and id are -1 and the string empty in a gap."""
    coords: dict[str, Any] = {
        "text": ("token", np.repeat([one.number for one in pieces], [len(one.columns) for one in pieces]))
    }
    for side, prefix in enumerate(("", "other_")):
        rows = [(one.tokens[side], column[side]) for one in pieces for column in one.columns]
        coords[f"{prefix}position"] = "token", np.array([-1 if k is None else t.positions[k] for t, k in rows])
        coords[f"{prefix}id"] = "token", np.array([-1 if k is None else t.ids[k] for t, k in rows])
        strings = ["" if k is None else t.strings[k] for t, k in rows]
        coords[f"{prefix}string"] = "token", np.array([*strings, None], dtype=object)[:-1]
    return coords


def put_along(data: "xarray.Dataset") -> None:
    """Along the sites, over the tokens that differ anywhere: those before the first difference say nothing."""
    differ = _differ(data)
    for measure in ("l2", "relative"):
        look = LOOKS[measure]
        rows = [row[differ & np.isfinite(row)] for row in data[measure].to_numpy()]
        for said, share in ALONG.items():
            values = np.array([np.quantile(row, share) if len(row) else np.nan for row in rows], dtype=np.float32)
            named = {"long_name": f"{said} {look['long_name']} of the tokens that differ"}
            data[f"{measure}_{said}"] = ("site", values, {**look, **named})


def _differ(data: "xarray.Dataset") -> NDArray[np.bool_]:
    """The tokens whose states differ at any site; all that were compared, where none do."""
    l2 = data["l2"].to_numpy()
    compared = np.isfinite(l2).any(0)
    differ: NDArray[np.bool_] = (np.nan_to_num(l2) > 0).any(0)
    return differ if differ.any() else compared


def texts_of(stacks: list[list[Piece]]) -> dict[str, list[str]]:
    """The texts of both sides, where they are known."""
    names = [("texts", "other_texts"), ("targets", "other_targets")]
    told = {}
    for some, pair in zip(stacks, names, strict=False):
        for side, name in enumerate(pair):
            texts = [one.tokens[side].texts for one in some]
            if all(texts):
                told[name] = [text[0] for text in texts if text]
    return told

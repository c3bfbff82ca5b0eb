"""Differences: what is measured in every column of tokens, the CKA of every pair of
sites, and the facts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.analyses.compare.sides import UNKNOWN, Side, aligned
from hiddenscope.errors import SiteError, StatesError, TextError
from hiddenscope.measures import FEWEST, WORTH_READING, linear_cka
from hiddenscope.passes import Columns
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import Pair, Source, States, Tokens

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[np.float32]

MEASURES: Mapping[str, Mapping[str, str]] = {
    "l2": {"long_name": "difference", "units": "L2", "scale": "log"},
    "relative": {
        "long_name": "relative difference",
        "units": "L2 over the mean of the two norms",
    },
    "cosine": {"long_name": "cosine of the two states"},
    "mean": {
        "long_name": "mean of the difference over the width, second less first",
        "meaning": "diverging",
    },
    "deviation": {
        "long_name": "standard deviation of the difference over the width",
        "scale": "log",
    },
}
# Along the sites, over the tokens that differ.
QUANTILES = {
    "median": 0.5,
    "largest": 1.0,
}
CKA = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
MOST_SAMPLED = 1000
HIGH_BY_CHANCE = 0.3


@dataclass(frozen=True, eq=False)
class Comparison:
    """One text in one stack, compared: the tokens and sites of both sides, their
    columns, and what was measured.

    `sites` are those that both sides have, out of `every`. `measures` are None where
    the widths differ.
    """

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
    def one_model(self) -> bool:
        """Whether both sides are known to come from one model."""
        return self.source[0] == self.source[1] != UNKNOWN

    @property
    def paired(self) -> NDArray[np.int64]:
        """The rows of both sides that stand in one column, `[2, pair]`."""
        rows = [(i, j) for i, j in self.columns if i is not None and j is not None]
        return np.array(rows, dtype=np.int64).reshape(-1, 2).T


def compare_text(
    number: int, pair: tuple[Side, Side], sites: SitePatterns, *, by_spans: bool
) -> Iterator[tuple[Comparison, tuple[States, States]]]:
    """One text compared, stack by stack, each with the states that it was measured on."""
    if type(pair[0]) is not type(pair[1]):
        reason = "one has an encoder and a decoder and the other one stack"
        raise StatesError(
            "Cannot compare the two models", reason, "Compare models of one kind."
        )
    for a, b in zip(*map(_stacks, pair), strict=True):
        a, b = a.select(sites=sites), b.select(sites=sites)
        columns = aligned(a.tokens, b.tokens, by_spans=by_spans)
        common = tuple(site for site in a.sites if site in b.sites)
        measures = None
        if a.width == b.width:
            if not common:
                reason = f"they have {summarise(a.sites)} and {summarise(b.sites)}"
                raise SiteError(
                    "The two sides have no site in common",
                    reason,
                    "Choose sites that are in both.",
                )
            measures = measured(a, b, common, columns)
        elif isinstance(pair[0], Pair):
            reason = f"the {a.sites[0].stack}s are {a.width} and {b.width} wide"
            remedy = "Compare one stack: compare(a.encoder, b.encoder)."
            raise StatesError("Cannot compare the two encoder-decoders", reason, remedy)
        of_both = (a.tokens, b.tokens), (a.sites, b.sites), (a.source, b.source)
        yield Comparison(number, *of_both, common, columns, measures), (a, b)


def largest_relative(alone: Side, again: Side) -> float:
    """The largest relative difference of one text's states computed twice."""
    largest = 0.0
    for one, two in zip(_stacks(alone), _stacks(again), strict=True):
        columns: Columns = [(row, row) for row in range(len(one.tokens))]
        largest = max(
            largest,
            float(measured(one, two.of(0), one.sites, columns)["relative"].max()),
        )
    return largest


def _stacks(side: Side) -> list[States]:
    return [side.encoder, side.decoder] if isinstance(side, Pair) else [side]


def measured(
    a: States, b: States, sites: tuple[Site, ...], columns: Columns
) -> dict[str, Array]:
    """Every measure, `[site, column]`, NaN in gaps; computed in float64 and kept as
    float32.
    """
    cells = {
        name: np.full((len(sites), len(columns)), np.nan, dtype=np.float32)
        for name in MEASURES
    }
    here = [
        place for place, (i, j) in enumerate(columns) if i is not None and j is not None
    ]
    left, right = (
        torch.tensor([columns[place][side] for place in here], dtype=torch.long)
        for side in (0, 1)
    )
    for row, site in enumerate(sites):
        x, y = (
            a[site].detach().cpu()[left].double(),
            b[site].detach().cpu()[right].double(),
        )
        difference, xx, yy = y - x, (x * x).sum(-1), (y * y).sum(-1)
        l2, norms = difference.norm(dim=-1), (xx.sqrt() + yy.sqrt()) / 2
        # In this form exactly 1 for equal states.
        numbers = {
            "l2": l2,
            "relative": torch.where(l2 == 0, 0.0, l2 / norms),
            "cosine": ((x * y).sum(-1) / (xx * yy).sqrt()).clamp(-1, 1),
            "mean": difference.mean(-1),
            "deviation": difference.std(-1, correction=0),
        }
        for name, values in numbers.items():
            cells[name][row, here] = values.numpy()
    return cells


def dataset(stacks: list[list[Comparison]]) -> "xarray.Dataset":
    """One Dataset; with two stacks, cells without a state are NaN."""
    import xarray

    widths = [[len(one.columns) for one in stack] for stack in stacks]
    sites = [str(site) for stack in stacks for site in stack[0].sites]
    variables: dict[str, Any] = {}
    for name, look in MEASURES.items():
        cells = np.full((len(sites), sum(map(sum, widths))), np.nan, dtype=np.float32)
        row = column = 0
        for stack in stacks:
            values = np.concatenate(
                [one.measures[name] for one in stack if one.measures is not None],
                axis=1,
            )
            cells[row : row + values.shape[0], column : column + values.shape[1]] = (
                values
            )
            row, column = row + values.shape[0], column + values.shape[1]
        variables[name] = (("site", "token"), cells, dict(look))
    coords = _coords([one for stack in stacks for one in stack])
    if len(stacks) > 1:
        names = np.repeat(
            [str(stack[0].stack) for stack in stacks], [sum(width) for width in widths]
        )
        coords["stack"] = ("token", names.astype(object))
    return xarray.Dataset(variables, {"site": sites, **coords})


def _coords(comparisons: list[Comparison]) -> dict[str, Any]:
    """The tokens of each column on both sides: position and id are -1 and the string
    empty in a gap.
    """
    numbers, counts = zip(
        *((one.number, len(one.columns)) for one in comparisons), strict=True
    )
    coords: dict[str, Any] = {"text": ("token", np.repeat(numbers, counts))}
    for side, prefix in enumerate(("", "other_")):
        rows = [
            (one.tokens[side], column[side])
            for one in comparisons
            for column in one.columns
        ]
        coords[f"{prefix}position"] = (
            "token",
            np.array([-1 if k is None else t.positions[k] for t, k in rows]),
        )
        coords[f"{prefix}id"] = (
            "token",
            np.array([-1 if k is None else t.ids[k] for t, k in rows]),
        )
        strings = ["" if k is None else t.strings[k] for t, k in rows]
        coords[f"{prefix}string"] = (
            "token",
            np.array([*strings, None], dtype=object)[:-1],
        )
    return coords


def put_along_sites(data: "xarray.Dataset") -> None:
    """Put quantiles along the sites into the data, over the tokens that differ
    anywhere: the others say nothing.
    """
    l2 = data["l2"].to_numpy()
    differ: NDArray[np.bool_] = (np.nan_to_num(l2) > 0).any(0)
    differ = differ if differ.any() else np.isfinite(l2).any(0)
    for measure in ("l2", "relative"):
        look = MEASURES[measure]
        rows = [row[differ & np.isfinite(row)] for row in data[measure].to_numpy()]
        for name, share in QUANTILES.items():
            values = np.array(
                [np.quantile(row, share) if len(row) else np.nan for row in rows],
                dtype=np.float32,
            )
            long_name = f"{name} {look['long_name']} of the tokens that differ"
            data[f"{measure}_{name}"] = (
                "site",
                values,
                {**look, "long_name": long_name},
            )


def texts_of(stacks: list[list[Comparison]]) -> dict[str, list[str]]:
    """The texts of both sides, where they are known."""
    known = {}
    for stack, names in zip(
        stacks, [("texts", "other_texts"), ("targets", "other_targets")], strict=False
    ):
        for side, name in enumerate(names):
            texts = [one.tokens[side].texts for one in stack]
            if all(texts):
                known[name] = [text[0] for text in texts if text]
    return known


def stack_facts(data: "xarray.Dataset", stack: list[Comparison]) -> dict[str, Any]:
    """Where the two sides of one stack first differ, how much is equal, where the
    difference jumps, what ends it.
    """
    sites = stack[0].sites
    here = data.sel(site=[str(site) for site in sites])
    if "stack" in here.coords:
        here = here.isel(
            token=np.flatnonzero(here["stack"].to_numpy() == stack[0].stack)
        )
    l2 = here["l2"].to_numpy()
    compared = np.isfinite(l2).any(0)
    facts: dict[str, Any] = {
        "stack": stack[0].stack,
        "first_difference": _first_difference(here, by_id=stack[0].one_model),
        "tokens_compared": int(compared.sum()),
        "tokens_equal": int((l2 == 0).all(0).sum()),
    }
    if lacking := {site for side in stack[0].every for site in side} - set(sites):
        facts["sites_of_one_side"] = summarise(lacking)
    if not compared.any() or not (np.nan_to_num(l2) > 0).any():
        return facts
    site, token = np.unravel_index(np.nanargmax(here["relative"].to_numpy()), l2.shape)
    largest = {
        "relative": here["relative"].to_numpy()[site, token],
        "site": sites[site],
    }
    facts["largest_relative"] = {**largest, "token": _on_both_sides(here, int(token))}
    medians = here["l2_median"].to_numpy()
    layers = [
        place
        for place, one in enumerate(sites)
        if one.layer is not None and not one.part
    ]
    rises = [(float(medians[k] - medians[j]), j, k) for j, k in pairwise(layers)]
    if rises and max(rises)[0] > 0:
        _, before, after = max(rises)
        facts["largest_jump"] = {
            "from": _at(sites, medians, before),
            "to": _at(sites, medians, after),
        }
    return facts | _end(sites, layers, medians)


def _at(sites: tuple[Site, ...], medians: Array, place: int) -> dict[str, Any]:
    return {"site": sites[place], "median": float(medians[place])}


def _first_difference(here: "xarray.Dataset", *, by_id: bool) -> dict[str, Any] | None:
    """The first token whose id differs; where all ids are equal, or in two models, the
    first whose states differ.
    """
    l2 = here["l2"].to_numpy()
    others = here["id"].to_numpy() != here["other_id"].to_numpy()
    differ = others if by_id and others.any() else (np.nan_to_num(l2, nan=1) > 0).any(0)
    if not differ.any():
        return None
    token = int(np.argmax(differ))
    first: dict[str, Any] = {
        "token": _on_both_sides(here, token),
        "text": int(here["text"][token]),
    }
    first["position"] = [
        int(here[name][token]) for name in ("position", "other_position")
    ]
    sites = np.flatnonzero(l2[:, token] > 0)
    return first | {"site": str(here["site"].values[sites[0]]) if len(sites) else None}


def _on_both_sides(here: "xarray.Dataset", token: int) -> list[str | None]:
    """A token as each side has it; None for a gap."""
    gaps = [int(here[name][token]) < 0 for name in ("position", "other_position")]
    strings = [str(here[name].values[token]) for name in ("string", "other_string")]
    return [None if gap else string for gap, string in zip(gaps, strings, strict=True)]


def _end(sites: tuple[Site, ...], layers: list[int], medians: Array) -> dict[str, Any]:
    """The last two layers, raw, beside `final`: Hugging Face's hidden_states goes from
    the first of them to `final`.
    """
    if sites[-1].layer is not None or len(layers) < 2 or layers[-1] != len(sites) - 2:
        return {}
    names = {"before_last": layers[-2], "last": layers[-1], "final": len(sites) - 1}
    end: dict[str, Any] = {
        name: _at(sites, medians, place) for name, place in names.items()
    }
    before, raw, normed = (end[name]["median"] for name in names)
    if before > normed and raw > normed:
        end["share_of_drop_by_final_norm"] = min(
            1.0, (raw - normed) / (before - normed)
        )
    return {"end": end}


class CKASample:
    """At most a thousand of the paired states, each as likely to be kept as any other,
    however many come.

    Every pair draws a number, and those with the lowest stay; so it does not matter how
    texts are cut.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._generator = torch.Generator().manual_seed(0)
        self._draws = torch.zeros(0)
        self._kept: list[list[torch.Tensor]] = [[], []]

    def add(self, comparison: Comparison, sides: tuple[States, States]) -> None:
        """Add the paired tokens of one text."""
        rows = torch.from_numpy(comparison.paired)
        self.seen += rows.shape[1]
        self._draws = torch.cat(
            [self._draws, torch.rand(rows.shape[1], generator=self._generator)]
        )
        for kept, side, own in zip(self._kept, sides, rows, strict=True):
            kept.append(side.values.detach().cpu()[:, own])
        if len(self._draws) > 2 * MOST_SAMPLED:
            self._thin()

    def sides(self) -> list[torch.Tensor]:
        """What was kept of both sides, `[site, token, width]` each."""
        self._thin()
        return [kept[0] for kept in self._kept]

    def _thin(self) -> None:
        stay = self._draws.argsort(stable=True)[:MOST_SAMPLED].sort().values
        self._draws = self._draws[stay]
        self._kept = [[torch.cat(kept, 1)[:, stay]] for kept in self._kept]


def put_cka(
    data: "xarray.Dataset", first: Comparison, sample: CKASample, *, required: bool
) -> dict[str, Any]:
    """Put the CKA of every pair of sites into the data, and give its facts."""
    if sample.seen < FEWEST:
        if required:
            reason = (
                f"{sample.seen} tokens are in both and it takes {FEWEST}; a few hundred"
                " make it worth reading"
            )
            raise TextError(
                "Too few tokens for linear CKA",
                reason,
                "Give a longer text, or several.",
            )
        return {}
    x, y = sample.sides()
    names = [[str(site) for site in side] for side in first.every]
    places = [names[0].index(site) for site in data["site"].to_numpy().tolist()]
    cka, chance = (values.float().numpy() for values in linear_cka(x, y))
    for name, values in zip(CKA, (cka, chance), strict=True):
        data[name] = (("site", "source_site"), values[places], {"long_name": CKA[name]})
    data.coords["source_site"] = names[1]
    facts: dict[str, Any] = {"tokens": sample.seen, "sampled_tokens": x.shape[1]}
    shown = cka[places]
    if not np.isfinite(shown).any():
        return {"cka": facts}
    row, column = np.unravel_index(np.nanargmax(shown), shown.shape)
    pair = {
        "site": data["site"].values[row],
        "source_site": names[1][column],
        "cka": shown[row, column],
    }
    facts |= {
        "median": float(np.nanmedian(cka)),
        "median_by_chance": float(np.nanmedian(chance)),
        "most_alike": pair,
    }
    facts["few_tokens"] = (
        x.shape[1] < WORTH_READING or facts["median_by_chance"] > HIGH_BY_CHANCE
    )
    return {"cka": facts}

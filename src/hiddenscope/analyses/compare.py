"""Where, and by how much, do the states of two texts or of two models differ?"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.errors import SiteError, StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Texts, record
from hiddenscope.results import Result
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, States, Tokens

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[np.float32]
Columns: TypeAlias = list[tuple[int | None, int | None]]
Sides: TypeAlias = tuple[States | Pair, States | Pair]

TOGETHER = "both in one batch, so that what is the same comes out the same bit for bit"
WORTH_READING = 50
FEWEST = 3  # centred, two tokens are one direction, and the CKA of anything with anything is 1
LOOKS: Mapping[str, Mapping[str, str]] = {
    "l2": {"long_name": "difference", "units": "L2", "scale": "log"},
    "relative": {"long_name": "relative difference", "units": "L2 over the mean of the two norms"},
    "cosine": {"long_name": "cosine of the two states"},
    "mean": {"long_name": "mean of the difference over the width, second less first", "meaning": "diverging"},
    "deviation": {"long_name": "standard deviation of the difference over the width", "scale": "log"},
}
ALONG = {"median": 0.5, "largest": 1.0}  # quantiles over the tokens that differ
CKA = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}


def compare(
    model: Model | States | Pair,
    a: Texts | States | Pair,
    b: Texts | None = None,
    *,
    other: Model | None = None,
    sites: Any = "layer.*,final",
) -> Result:
    """Two texts, or one text in two models, token by token and layer by layer.

    `a` and `b` are two texts or two lists of as many; with `other` it is `a` in both models. States need no model:
    `compare(states, others)`. Tokens that only one side has are gaps, NaN. Two models are also compared by linear CKA
    for every pair of sites, and by that alone where their widths differ.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.compare(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]], [[5, 6, 8]])
    >>> result.data["l2"].sel(site="layer.0").values[:2].tolist(), result.facts["difference"]["first at"]["position"]
    ([0.0, 0.0], [2, 2])
    """
    pairs, facts = _pairs(model, a, b, other, sites)
    keep = other is not None or not isinstance(model, Model)  # of two texts in one model only the tokens are kept
    pieces = [piece for number, pair in enumerate(pairs) for piece in _pieces(number, pair, sites, keep)]
    stacks = [[one for one in pieces if one.stack == stack] for stack in dict.fromkeys(one.stack for one in pieces)]
    alone = pieces[0].measures is None
    data = _no_data(pieces[0]) if alone else _data(stacks)
    data.attrs |= _texts(stacks)
    facts |= {"texts": max(one.number for one in pieces) + 1, "tokens": _counts(pieces), "computed in": "float64"}
    if not alone:
        _along(data)
        for some in stacks:
            facts["difference" if len(stacks) == 1 else str(some[0].stack)] = _facts(data, some)
    if len(stacks) == 1 and (alone or other is not None or not pieces[0].alike):
        facts |= _cka(data, stacks[0], needed=alone)
    return Result("compare", data, facts, _source(pieces[0]))


def _pairs(
    model: Model | States | Pair, a: Any, b: Any, other: Model | None, sites: Any
) -> tuple[Iterator[Sides], dict[str, Any]]:
    """The two sides of every text, one text at a time, and how they are run."""
    if not isinstance(model, Model):
        if not isinstance(a, States | Pair) or b is not None or other is not None:
            found = "states are compared with states, and with nothing else"
            raise StatesError("A comparison of states", found, "Give compare(states, others).")
        return iter(_split(model, a)), {"run": "states as they were given"}
    if isinstance(a, States | Pair) or isinstance(b, States | Pair):
        found = "states were given with it, and need none"
        raise StatesError(f"A comparison in {model.name}", found, "Give compare(states, others), or texts.")
    if (b is None) == (other is None):
        found = "there is no second text and no other model" if b is None else "a second text and another model"
        raise TextError(f"A comparison in {model.name}", found, "Give b, or give other=.")
    for one in (model, other) if other else (model,):
        one.anatomy.select(sites)
    if other is not None:
        return _in_two_models(model, other, _listed(model, a), sites), {"run": "each model by itself, text by text"}
    first, second = _alike(model, a, b)
    if _may_share(model, first, second):
        return _together(model, first, second, sites), {"run": TOGETHER}
    why = model.batching.why if not model.batches else "one side of a pair is so long that its positions are scaled"
    facts = {"run": f"apart: {why}", "rounding floor": _floor(model, first[0], sites)}
    return _apart(model, first, second, sites), facts


def _listed(model: Model, texts: Texts) -> list[Any]:
    """The texts one by one: strings, or lists of ids."""
    with model.lock:
        encoded = model.encoder.encode(texts)
    return list(encoded.texts or map(list, encoded.ids))


def _alike(model: Model, a: Texts, b: Texts) -> tuple[list[Any], list[Any]]:
    """Both sides as lists of strings, or both as lists of ids."""
    with model.lock:
        first, second = model.encoder.encode(a), model.encoder.encode(b)
    if len(first.ids) != len(second.ids):
        found = f"there are {len(first.ids)} on one side and {len(second.ids)} on the other"
        raise TextError("Texts compared one by one", found, "Give as many on each side.")
    if first.texts and second.texts:
        return list(first.texts), list(second.texts)
    return [list(ids) for ids in first.ids], [list(ids) for ids in second.ids]


def _may_share(model: Model, first: list[Any], second: list[Any]) -> bool:
    """Whether each text may go through the model with the one that it is compared with."""
    if not model.batches or model.batching.turn is None:
        return model.batches
    with model.lock:
        lengths = [model.encoder.encode(side).lengths for side in (first, second)]
    return all((a > model.batching.turn) == (b > model.batching.turn) for a, b in zip(*lengths, strict=True))


def _together(model: Model, first: list[Any], second: list[Any], sites: Any) -> Iterator[Sides]:
    for a, b in zip(first, second, strict=True):
        both = record(model, [a, b], sites).states
        if isinstance(both, Pair):
            yield Pair(both.encoder.of(0), both.decoder.of(0)), Pair(both.encoder.of(1), both.decoder.of(1))
        else:
            yield both.of(0), both.of(1)


def _apart(model: Model, first: list[Any], second: list[Any], sites: Any) -> Iterator[Sides]:
    for a, b in zip(first, second, strict=True):
        yield record(model, [a], sites).states, record(model, [b], sites).states


def _in_two_models(model: Model, other: Model, texts: list[Any], sites: Any) -> Iterator[Sides]:
    for text in texts:
        yield record(model, [text], sites).states, record(other, [text], sites).states


def _floor(model: Model, text: Any, sites: Any) -> dict[str, Any]:
    """What rounding alone makes of one text: it is run alone, and again in two copies, or if that fails alone again."""
    alone = record(model, [text], sites).states
    try:
        again, how = record(model, [text, text], sites).states, "the first text alone and in two copies"
    except Exception:
        again, how = record(model, [text], sites).states, "the first text run twice"
    worst = 0.0
    for one, two in zip(_stacks(alone), _stacks(again), strict=True):
        same: Columns = [(row, row) for row in range(len(one.tokens))]
        worst = max(worst, float(_measures(one, two.of(0), one.sites, same)["relative"].max()))
    return {"relative": worst, "between": how}


def _stacks(side: States | Pair) -> list[States]:
    return [side.encoder, side.decoder] if isinstance(side, Pair) else [side]


def _split(a: States | Pair, b: States | Pair) -> list[Sides]:
    """States that were given, text by text."""
    counts = [_stacks(side)[0].tokens.count for side in (a, b)]
    if counts[0] != counts[1] or type(a) is not type(b):
        found = f"there are {counts[0]} texts of {len(_stacks(a))} stacks and {counts[1]} of {len(_stacks(b))}"
        raise StatesError("States compared text by text", found, "Give as many texts, in models of one kind.")
    if isinstance(a, Pair) and isinstance(b, Pair):
        sides = [[Pair(side.encoder.of(k), side.decoder.of(k)) for k in range(counts[0])] for side in (a, b)]
        return list(zip(*sides, strict=True))
    return [(a.of(k), b.of(k)) for k in range(counts[0]) if isinstance(a, States) and isinstance(b, States)]


@dataclass(frozen=True, eq=False)
class _Piece:
    """One text in one stack, compared: the tokens of both sides, how they are aligned, and what was measured."""

    number: int
    sides: tuple[States, States]
    sites: tuple[Site, ...]
    columns: Columns
    measures: dict[str, Array] | None

    @property
    def stack(self) -> str | None:
        return self.sides[0].sites[0].stack

    @property
    def alike(self) -> bool:
        """Whether both sides come from one model."""
        return self.sides[0].source == self.sides[1].source

    @property
    def paired(self) -> NDArray[np.int64]:
        """The rows of both sides that stand in one column, `[2, pair]`."""
        rows = [(i, j) for i, j in self.columns if i is not None and j is not None]
        return np.array(rows, dtype=np.int64).reshape(-1, 2).T


def _pieces(number: int, pair: Sides, sites: Any, keep: bool) -> Iterator[_Piece]:
    if type(pair[0]) is not type(pair[1]):
        found = "one has an encoder and a decoder and the other one stack"
        raise StatesError("A comparison of two models", found, "Compare models of one kind.")
    for a, b in zip(*map(_stacks, pair), strict=True):
        a, b = a.select(sites=sites), b.select(sites=sites)
        columns = _aligned(a.tokens, b.tokens, spans=keep)
        common = tuple(site for site in a.sites if site in b.sites)
        measures = None
        if a.width == b.width:
            if not common:
                found = f"they have {summarise(a.sites)} and {summarise(b.sites)}"
                raise SiteError("Sites that both have", found, "Choose sites that are in both.")
            measures = _measures(a, b, common, columns)
        elif isinstance(pair[0], Pair):
            found = f"the {a.sites[0].stack}s are {a.width} and {b.width} wide"
            do = "Compare one stack: compare(a.encoder, b.encoder)."
            raise StatesError("Two encoder-decoders compared", found, do)
        yield _Piece(number, (a, b) if keep else (_only_tokens(a), _only_tokens(b)), common, columns, measures)


def _only_tokens(states: States) -> States:
    return States(states.sites, states.values[..., :0], states.tokens, states.source)


def _aligned(a: Tokens, b: Tokens, *, spans: bool) -> Columns:
    """Which tokens stand in one column: by their ids, or for two tokenizers by where in the text they end."""
    same = np.array_equal(a.ids, b.ids) and a.strings == b.strings
    if same or not spans or a.texts is None or a.texts != b.texts:
        _one_vocabulary(a, b)
        return _blocks(a.ids.tolist(), b.ids.tolist(), pair=True)
    ends = [_ends(tokens) for tokens in (a, b)]
    if any(all(end < 0 for end, _ in side) for side in ends):
        found = "the tokenizers differ and one does not say which characters its tokens stand for"
        raise TextError("One text in two models", found, "Use a fast tokenizer, or give ids.")
    return _blocks(*ends, pair=False)


def _one_vocabulary(a: Tokens, b: Tokens) -> None:
    """Ids can be held against each other only if they mean the same."""
    known = dict(zip(a.ids.tolist(), a.strings, strict=True))
    wrong = [
        (known[i], string)
        for i, string in zip(b.ids.tolist(), b.strings, strict=True)
        if known.get(i, string) != string
    ]
    if wrong and a.texts is not None and b.texts is not None:
        found = f"one id means {wrong[0][0]!r} in one and {wrong[0][1]!r} in the other"
        raise StatesError("Different texts of two tokenizers", found, "Compare one text, or give states of one model.")


def _ends(tokens: Tokens) -> list[tuple[int, int]]:
    """The character after each token, and how many more tokens end there; -1 for one that stands for none."""
    seen: Counter[int] = Counter()
    ends = []
    for end in reversed(tokens.spans[:, 1].tolist()):
        ends.append((end, seen[end] if end >= 0 else 0))
        seen[end] += 1
    return ends[::-1]


def _blocks(a: Sequence[Any], b: Sequence[Any], *, pair: bool) -> Columns:
    """Columns by difflib, the same whichever side is first.

    Where some tokens take the place of others the last of each are paired: there a causal model has read all of them.
    """
    if list(b) < list(a):
        return [(i, j) for j, i in _blocks(b, a, pair=pair)]
    columns: Columns = []
    for tag, start, end, begin, stop in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        both = min(end - start, stop - begin) if pair or tag == "equal" else 0
        columns += [(row, None) for row in range(start, end - both)]
        columns += [(None, row) for row in range(begin, stop - both)]
        columns += zip(range(end - both, end), range(stop - both, stop), strict=True)
    return columns


def _measures(a: States, b: States, sites: tuple[Site, ...], columns: Columns) -> dict[str, Array]:
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


def _data(stacks: list[list[_Piece]]) -> "xarray.Dataset":
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


def _coords(pieces: list[_Piece]) -> dict[str, Any]:
    """What stands in each column on both sides: position and id are -1 and the string empty in a gap."""
    coords: dict[str, Any] = {
        "text": ("token", np.repeat([one.number for one in pieces], [len(one.columns) for one in pieces]))
    }
    for side, prefix in enumerate(("", "other_")):
        rows = [(one.sides[side].tokens, column[side]) for one in pieces for column in one.columns]
        coords[f"{prefix}position"] = "token", np.array([-1 if k is None else t.positions[k] for t, k in rows])
        coords[f"{prefix}id"] = "token", np.array([-1 if k is None else t.ids[k] for t, k in rows])
        strings = ["" if k is None else t.strings[k] for t, k in rows]
        coords[f"{prefix}string"] = "token", np.array([*strings, None], dtype=object)[:-1]
    return coords


def _along(data: "xarray.Dataset") -> None:
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


def _counts(pieces: list[_Piece]) -> dict[str, int]:
    compared = sum(one.paired.shape[1] for one in pieces)
    return {"compared": compared, "gaps": sum(len(one.columns) for one in pieces) - compared}


def _facts(data: "xarray.Dataset", pieces: list[_Piece]) -> dict[str, Any]:
    """What one stack shows: where it begins, how much stays the same, where it jumps, what the final norm does."""
    sites = pieces[0].sites
    here = data.sel(site=[str(site) for site in sites])
    if "stack" in here.coords:
        here = here.isel(token=np.flatnonzero(here["stack"].to_numpy() == pieces[0].stack))
    facts: dict[str, Any] = {"first at": _first(here, by_id=pieces[0].alike)}
    if lacking := {site for side in pieces[0].sides for site in side.sites} - set(sites):
        facts["sites that one side lacks"] = summarise(lacking)
    l2 = here["l2"].to_numpy()
    compared = np.isfinite(l2).any(0)
    facts["exactly zero at every site"] = f"{int((l2 == 0).all(0).sum())} of {int(compared.sum())} tokens"
    if not compared.any() or not (np.nan_to_num(l2) > 0).any():
        return facts
    site, token = np.unravel_index(np.nanargmax(here["relative"].to_numpy()), l2.shape)
    where = {"site": sites[site], "token": _named(here, int(token))}
    facts["largest relative difference"] = {"relative": here["relative"].to_numpy()[site, token], **where}
    middle = here["l2_median"].to_numpy()
    layers = [place for place, one in enumerate(sites) if one.layer is not None and not one.part]
    rises = [(float(middle[k] - middle[j]), j, k) for j, k in pairwise(layers)]
    if rises and max(rises)[0] > 0:
        _, before, after = max(rises)
        ends = {"from": sites[before], "to": sites[after], "median": [middle[before], middle[after]]}
        facts["largest jump between layers"] = ends
    return facts | _final(sites, layers, middle)


def _first(here: "xarray.Dataset", *, by_id: bool) -> dict[str, Any] | str:
    """The first token that is not the same on both sides; where all are, or in two models, whose states are not."""
    l2 = here["l2"].to_numpy()
    others = here["id"].to_numpy() != here["other_id"].to_numpy()
    differ = others if by_id and others.any() else (np.nan_to_num(l2, nan=1) > 0).any(0)
    if not differ.any():
        return "nowhere"
    token = int(np.argmax(differ))
    found: dict[str, Any] = {"token": _named(here, token)}
    found["position"] = [int(here[name][token]) for name in ("position", "other_position")]
    if (l2[:, token] > 0).any():
        found["site"] = str(here["site"].values[int(np.argmax(l2[:, token] > 0))])
    return found | ({"text": int(here["text"][token])} if here["text"].to_numpy().any() else {})


def _named(here: "xarray.Dataset", token: int) -> list[str]:
    """A token as both sides have it."""
    gaps = [int(here[name][token]) < 0 for name in ("position", "other_position")]
    names = [str(here[name].values[token]) for name in ("string", "other_string")]
    return ["(gap)" if gap else name for gap, name in zip(gaps, names, strict=True)]


def _final(sites: tuple[Site, ...], layers: list[int], middle: Array) -> dict[str, Any]:
    """The last two layers, raw, beside `final`: hidden_states goes from the one before the last straight to it."""
    if sites[-1].layer is not None or len(layers) < 2 or layers[-1] != len(sites) - 2:
        return {}
    before, raw, normed = (float(middle[place]) for place in (layers[-2], layers[-1], len(sites) - 1))
    facts: dict[str, Any] = {str(sites[layers[-2]]): before, f"raw {sites[layers[-1]]}": raw, str(sites[-1]): normed}
    if before > normed and raw > normed:
        facts["share of the drop that is the final norm"] = min(1.0, (raw - normed) / (before - normed))
    return {"median at the end": facts}


def _texts(stacks: list[list[_Piece]]) -> dict[str, list[str]]:
    """The texts of both sides, where they are known."""
    names = [("texts", "other_texts"), ("targets", "other_targets")]
    told = {}
    for some, pair in zip(stacks, names, strict=False):
        for side, name in enumerate(pair):
            texts = [one.sides[side].tokens.texts for one in some]
            if all(texts):
                told[name] = [text[0] for text in texts if text]
    return told


def _source(piece: _Piece) -> dict[str, Any]:
    first, second = (side.source.to_json() for side in piece.sides)
    return first if first == second else first | {"other": second}


def _no_data(piece: _Piece) -> "xarray.Dataset":
    """What states of two widths can be told cell by cell: nothing."""
    import xarray

    return xarray.Dataset(coords={"site": [str(site) for site in piece.sides[0].sites]})


def _cka(data: "xarray.Dataset", pieces: list[_Piece], *, needed: bool) -> dict[str, Any]:
    """Put the CKA of every pair of sites into the data; what it shows."""
    tokens = sum(one.paired.shape[1] for one in pieces)
    if tokens < FEWEST:
        if needed:
            found = f"{tokens} tokens are in both and it takes {FEWEST}; a few hundred make it worth reading"
            raise TextError("Linear CKA of two models", found, "Give a longer text, or several.")
        return {}
    sides = [_rows(pieces, side) for side in (0, 1)]
    values = dict(zip(CKA, _linear_cka(*sides), strict=True))
    names = [[str(site) for site in side.sites] for side in pieces[0].sides]
    place = [names[0].index(site) for site in data["site"].to_numpy().tolist()]
    for name, said in CKA.items():
        data[name] = (("site", "source_site"), values[name][place], {"long_name": said})
    data.coords["source_site"] = names[1]
    row, column = np.unravel_index(np.nanargmax(values["cka"][place]), (len(place), len(names[1])))
    facts: dict[str, Any] = {"tokens": tokens, "median": float(np.nanmedian(values["cka"]))}
    facts["median by chance"] = float(np.nanmedian(values["cka_chance"]))
    best = {"site": data["site"].values[row], "source_site": names[1][column]}
    facts["most alike"] = {**best, "cka": values["cka"][place][row, column]}
    if tokens < WORTH_READING or facts["median by chance"] > 0.3:
        facts["few tokens"] = "with so few, states that have nothing to do with each other look alike: give more text"
    return {"cka": facts}


def _rows(pieces: list[_Piece], side: int) -> torch.Tensor:
    """The states of the paired tokens of one side, `[site, token, width]`, in float64."""
    rows = [one.sides[side].values.detach().cpu()[:, torch.from_numpy(one.paired[side])] for one in pieces]
    return torch.cat(rows, 1).double()


def _linear_cka(x: torch.Tensor, y: torch.Tensor) -> tuple[Array, Array]:
    """The linear CKA of every pair of sites, and what it would be on average over all pairings of the tokens."""
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    tokens = x.shape[1]
    if tokens <= min(x.shape[2], y.shape[2]):  # the products of tokens are smaller than those of channels
        k, m = (torch.stack([one @ one.T for one in side]).flatten(1) for side in (x, y))
        shared, own = k @ m.T, [k.norm(dim=1), m.norm(dim=1)]
    else:
        shared = torch.stack([torch.stack([(one.T @ two).square().sum() for two in y]) for one in x])
        own = [torch.stack([(one.T @ one).norm() for one in side]) for side in (x, y)]
    traces = [side.square().sum((1, 2)) for side in (x, y)]
    scale = own[0][:, None] * own[1][None]
    chance = traces[0][:, None] * traces[1][None] / (tokens - 1) / scale
    return (shared / scale).clamp(0, 1).float().numpy(), chance.clamp(0, 1).float().numpy()

"""How large is every state?"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.errors import TextError
from hiddenscope.model import Model
from hiddenscope.passes import Texts
from hiddenscope.results import Result
from hiddenscope.sites import Site, select, summarise
from hiddenscope.states import Pair, Readable, States

if TYPE_CHECKING:
    import xarray

Array: TypeAlias = NDArray[np.float32]

LONG = {
    "norm_first": "norm of the first token",
    "norm_median": "median norm of the other tokens",
    "norm_low": "lower quartile of the others' norms",
    "norm_high": "upper quartile of the others' norms",
}


def profile(
    source: Model | Readable | Pair,
    texts: Texts | None = None,
    *,
    sites: str | Site | list[str] = "layer.*,final",
    truncate: bool = False,
) -> Result:
    """The norm of every state by site and token, and along the sites that of first tokens against the others.

    Give a model and texts, or states. A first token is one at position 0 of its text; over several texts it is the
    median that is given. States are widened to float32 (float64 stays), and the norms kept as float32.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.profile(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["norm"].sizes), result.data["norm_median"].dims
    ({'site': 5, 'token': 3}, ('site',))
    """
    captured = _states(source, texts, sites, truncate)
    parts: list[Readable] = [captured.encoder, captured.decoder] if isinstance(captured, Pair) else [captured]
    chosen = [_chosen(part, sites) for part in parts]
    norms = [_norms(part, wanted) for part, wanted in zip(parts, chosen, strict=True)]
    data = _data(parts, chosen, norms)
    facts: dict[str, Any] = {"texts": parts[0].tokens.count, "tokens": sum(len(part.tokens) for part in parts)}
    facts["computed in"] = "float64" if _dtype(parts[0], chosen[0]) == torch.float64 else "float32"
    for part, wanted, norm in zip(parts, chosen, norms, strict=True):
        facts["norm" if len(parts) == 1 else str(wanted[0].stack)] = _facts(part, wanted, norm)
    return Result("profile", data, facts, parts[0].source if isinstance(parts[0], States) else {})


def _states(source: Model | Readable | Pair, texts: Texts | None, sites: Any, truncate: bool) -> Readable | Pair:
    if isinstance(source, Model):
        if texts is None:
            raise TextError(f"A profile of {source.name}", "there are no texts", "Give one or several, or give states.")
        return source.capture(texts, sites, truncate=truncate)
    if texts is not None:
        raise TextError("A profile of states", "texts were given too", "Leave them out, or give a model.")
    return source


def _chosen(part: Readable, sites: Any) -> tuple[Site, ...]:
    return part.select(sites=sites).sites if isinstance(part, States) else select(sites, part.sites)


def _dtype(part: Readable, sites: tuple[Site, ...]) -> torch.dtype:
    return next(part.blocks(sites[0])).dtype


def _norms(part: Readable, sites: tuple[Site, ...]) -> Array:
    """The norms `[site, token]`, read block by block."""
    rows = [np.concatenate([_norm(block) for block in part.blocks(site)]) for site in sites]
    return np.stack(rows)


def _norm(block: torch.Tensor) -> Array:
    wide = block.detach().to(torch.float64 if block.dtype == torch.float64 else torch.float32)
    found: Array = torch.linalg.vector_norm(wide, dim=-1).cpu().numpy().astype(np.float32)
    return found


def _data(parts: list[Readable], sites: list[tuple[Site, ...]], norms: list[Array]) -> "xarray.Dataset":
    """One Dataset; with two stacks, the cells in which no state is are NaN, and every token says its stack."""
    import xarray

    norm = np.full([sum(part.shape[axis] for part in norms) for axis in (0, 1)], np.nan, dtype=np.float32)
    row = column = 0
    for part in norms:
        norm[row : row + part.shape[0], column : column + part.shape[1]] = part
        row, column = row + part.shape[0], column + part.shape[1]
    along = [_along(part, found) for part, found in zip(parts, norms, strict=True)]
    columns: dict[str, Any] = {"norm": (("site", "token"), norm, {"long_name": "norm", "units": "L2", "scale": "log"})}
    for name, said in LONG.items():
        values = np.concatenate([one[name] for one in along])
        columns[name] = ("site", values, {"long_name": said, "units": "L2", "scale": "log"})
    return xarray.Dataset(columns, _coords(parts, sites), _texts(parts))


def _coords(parts: list[Readable], sites: list[tuple[Site, ...]]) -> dict[str, Any]:
    tokens = [part.tokens for part in parts]
    strings = np.array([*(string for some in tokens for string in some.strings), None], dtype=object)[:-1]
    stacks = np.repeat([str(some[0].stack) for some in sites], [len(some) for some in tokens])
    return {
        "site": [str(site) for some in sites for site in some],
        "text": ("token", np.concatenate([some.text for some in tokens])),
        "position": ("token", np.concatenate([some.positions for some in tokens])),
        "id": ("token", np.concatenate([some.ids for some in tokens])),
        "string": ("token", strings),
        **({"stack": ("token", stacks.astype(object))} if len(parts) > 1 else {}),
    }


def _texts(parts: list[Readable]) -> dict[str, list[str]]:
    named = zip(("texts", "targets"), (part.tokens.texts for part in parts), strict=False)
    return {name: list(texts) for name, texts in named if texts is not None}


def _along(part: Readable, norms: Array) -> Mapping[str, Array]:
    """Along the sites: first tokens, and the others with their quartiles."""
    first = part.tokens.positions == 0
    return {
        "norm_first": _quantile(norms[:, first], 0.5),
        "norm_median": _quantile(norms[:, ~first], 0.5),
        "norm_low": _quantile(norms[:, ~first], 0.25),
        "norm_high": _quantile(norms[:, ~first], 0.75),
    }


def _quantile(norms: Array, share: float) -> Array:
    """A quantile of the finite norms of each row; NaN where there are none."""
    rows = (row[np.isfinite(row)] for row in norms)
    return np.array([np.quantile(row, share) if len(row) else np.nan for row in rows], dtype=np.float32)


def _facts(part: Readable, sites: tuple[Site, ...], norms: Array) -> dict[str, Any]:
    """What the norms of one stack show, where it has what is compared."""
    along = _along(part, norms)
    first, others = along["norm_first"], along["norm_median"]
    layers = [place for place, site in enumerate(sites) if site.layer is not None]
    facts: dict[str, Any] = {}
    if layers:
        middle = layers[len(layers) // 4 : len(layers) - len(layers) // 4]
        tokens = {"first token": float(np.median(first[middle])), "other tokens": float(np.median(others[middle]))}
        facts["middle layers"] = summarise([sites[place] for place in middle])
        facts |= {name: norm for name, norm in tokens.items() if np.isfinite(norm)}
        if tokens["other tokens"] > 0 and np.isfinite(tokens["first token"]):
            facts["times as large"] = tokens["first token"] / tokens["other tokens"]
    if layers and sites[-1].layer is None:
        sides = {"first token": first, "other tokens": others}
        drops = {
            name: [float(side[-2]), float(side[-1])] for name, side in sides.items() if np.isfinite(side[-2:]).all()
        }
        facts |= {f"{name} from {sites[-2]} to {sites[-1]}": drop for name, drop in drops.items()}
    return facts | _largest(part, sites, norms)


def _largest(part: Readable, sites: tuple[Site, ...], norms: Array) -> dict[str, Any]:
    finite = np.isfinite(norms)
    facts: dict[str, Any] = {}
    if finite.any():
        site, token = np.unravel_index(np.argmax(np.where(finite, norms, -1)), norms.shape)
        facts["largest"] = {"norm": norms[site, token], "site": sites[site], "token": part.tokens.strings[token]}
    if not finite.all():
        site, token = np.argwhere(~finite)[0]
        where = {"site": sites[site], "token": part.tokens.strings[token]}
        facts["not finite"] = {"states": int((~finite).sum()), "first": where}
    return facts

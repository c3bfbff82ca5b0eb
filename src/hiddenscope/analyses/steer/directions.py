"""Directions: along what the states of a model are changed, and how large that is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite, SiteError, StatesError, TextError
from hiddenscope.model import Model
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, States

MOST_SITES = 10  # of a deep model, if no sites are asked for
ROUNDING = 8  # units in the last place: two sets whose means are no farther apart than that are the same


@dataclass(frozen=True)
class Directions:
    """A vector for each site (float64), the sites that are steered one at a time, and both in words."""

    vectors: Mapping[Site, Tensor]
    sites: tuple[Site, ...]
    said: str
    unit: str


def directions(model: Model, along: Any, sites: Any, pool: str, *, upwards: bool) -> Directions:
    """The directions at the chosen sites, and with `upwards` at those above them."""
    if isinstance(along, Mapping):
        given = {site: (name, one) for name, one in along.items() for site in model.anatomy.select(name)}
        if not given:
            raise SiteError("Directions by their sites", "there are none", "Give {site: vector}.")
        chosen = tuple(sorted(given)) if sites is None else model.anatomy.select(sites)
        if lacking := [site for site in chosen if site not in given]:
            reason = f"there are some for {summarise(given)}"
            raise SiteError(f"A direction at {lacking[0]}", reason, "Give one, or leave the site out.")
        wanted = _with_those_above(tuple(given), chosen, upwards)
        vectors = {site: _vector(model, given[site][1], site) for site in wanted}
        said = f"given, one for each of {len(given)} sites{_elsewhere({site: given[site][1] for site in wanted})}"
        return Directions(vectors, chosen, said, _unit(given[wanted[0]][1]))
    own = _site_of(along)
    asked = own or None if sites is None else sites
    chosen = _spread(model) if asked is None else model.anatomy.select(asked)
    wanted = _with_those_above(model.anatomy.sites, chosen, upwards)
    if _are_texts(along):
        vectors, said = _between(model, along, wanted, pool)
        return Directions(vectors, chosen, said, "the difference of the two means")
    vectors = {site: _vector(model, along, site) for site in wanted}
    said = "the weights of a probe" if hasattr(along, "coef_") else "a vector that was given"
    return Directions(vectors, chosen, f"{said}{_elsewhere(dict.fromkeys(wanted, along))}", _unit(along))


def sparing(model: Model, found: Directions, texts: Sequence[Sequence[int]]) -> Directions:
    """The same directions without what lies along the mean state of the texts' first tokens.

    A causal model's first token sees no other, so that nothing but it need be run.
    """
    ids = [list(text[:1]) if model.anatomy.stacks[0].causal else list(text) for text in texts]
    states = model.capture(ids, list(map(str, found.vectors)))
    vectors = {}
    for site, vector in found.vectors.items():
        own = part_at(states, site)
        first = own[site].double().cpu()[torch.from_numpy(own.tokens.positions == 0)].mean(0)
        left = vector - (vector @ first) / (first @ first) * first
        if float(left.norm()) <= 1e-6 * float(vector.norm()):
            remedy = "Leave `spare_first` out, or give another direction."
            raise StatesError(f"A direction at {site} that spares first tokens", "it is their own mean state", remedy)
        vectors[site] = left
    return replace(found, vectors=vectors, said=f"{found.said}, without what lies along the first token's state")


def part_at(states: States | Pair, site: Site) -> States:
    """The states of the stack that a site is in."""
    if isinstance(states, Pair):
        return states.encoder if site.stack == "encoder" else states.decoder
    return states


def _spread(model: Model) -> tuple[Site, ...]:
    """Layers spread over the depth of the last stack; not the embeddings, which know one token and no text."""
    stack, name = model.anatomy.stacks[-1], model.anatomy.sites[-1].stack
    layers = np.linspace(1, stack.depth, min(MOST_SITES, stack.depth)).round().astype(int)
    return tuple(Site(int(k), "", name) for k in dict.fromkeys(layers.tolist()))


def _with_those_above(known: tuple[Site, ...], chosen: tuple[Site, ...], upwards: bool) -> tuple[Site, ...]:
    return tuple(sorted({one for site in chosen for one in above(known, site, upwards)}))


def above(known: tuple[Site, ...], site: Site, upwards: bool) -> tuple[Site, ...]:
    """The site, and with `upwards` the same place in every layer above it.

    >>> above((Site(1), Site(2, "mlp"), Site(2), Site(3), Site(None)), Site(2), True)
    (Site('layer.2'), Site('layer.3'))
    """
    if not upwards or site.layer is None:
        return (site,)
    place = site.stack, site.part
    return tuple(
        one for one in known if (one.stack, one.part) == place and one.layer is not None and one.layer >= site.layer
    )


def _are_texts(along: Any) -> bool:
    return isinstance(along, tuple | list) and len(along) == 2 and all(isinstance(s, str | list | tuple) for s in along)


def _between(model: Model, along: Any, sites: tuple[Site, ...], pool: str) -> tuple[dict[Site, Tensor], str]:
    """The mean of the first set of texts less that of the second, at every site."""
    sets = []
    for number, texts in enumerate(along):
        if not len(texts):
            raise TextError(f"A direction between two sets of texts, set {number}", "it is empty", "Give one at least.")
        with model.lock:
            sets.append([list(ids) for ids in model.encoder.encode(texts).ids])
    if sorted(sets[0]) == sorted(sets[1]):
        raise TextError("A direction between two sets of texts", "both are the same", "Give texts that differ.")
    states = model.capture([*sets[0], *sets[1]], list(map(str, sites)))
    first, vectors = len(sets[0]), {}
    for site in sites:
        rows = part_at(states, site).pool(pool, site).double().cpu()  # type: ignore[arg-type]
        vector = rows[:first].mean(0) - rows[first:].mean(0)
        floor = ROUNDING * torch.finfo(model.dtype).eps * float(rows.norm(dim=-1).mean())
        if float(vector.norm()) <= floor:
            reason = f"pooled by {pool}, the states at {site} are the same in both, but for rounding"
            raise StatesError("A direction between two sets of texts", reason, "Take a higher layer, or other texts.")
        vectors[site] = vector
    where = {"last": "at the last token", "mean": "over all tokens"}.get(pool, f"pooled by {pool}")
    return vectors, f"the mean of {first} texts less that of {len(sets[1])}, {where}"


def _site_of(along: Any) -> str:
    """The site whose states a probe was fitted to, if it is a probe that says so."""
    return str(getattr(along, "site", "") or "") if hasattr(along, "coef_") else ""


def _elsewhere(used: Mapping[Site, Any]) -> str:
    """Words for probes that are used at other sites than their own; none where there are none."""
    fitted = list(dict.fromkeys(own for site, one in used.items() if (own := _site_of(one)) and own != str(site)))
    others = [site for site, one in used.items() if _site_of(one) and _site_of(one) != str(site)]
    if not others:
        return ""
    return f", fitted to the states at {', '.join(fitted)} and used at {summarise(others)}, where nothing was fitted"


def _unit(along: Any) -> str:
    return "1 in the decision value of the probe" if hasattr(along, "coef_") else "the vector as it was given"


def _vector(model: Model, along: Any, site: Site) -> Tensor:
    """One vector [width]; of a probe the shortest step that raises its decision value by one."""
    problem, fitted = f"A direction at {site} of {model.name}", hasattr(along, "coef_")
    given = along.coef_ if fitted else along
    try:
        array = given.detach().cpu().double() if isinstance(given, Tensor) else torch.tensor(np.asarray(given, float))
    except (TypeError, ValueError):
        remedy = "Give two sets of texts, a vector [width], {site: vector} or a probe."
        raise StatesError(problem, f"it is {type(along).__name__}", remedy) from None
    vector = array[0] if array.ndim == 2 and len(array) == 1 else array
    width = model.anatomy.width(site)
    if tuple(vector.shape) != (width,):
        raise StatesError(problem, f"it has the shape {list(array.shape)}", f"Give one vector of {width} numbers.")
    if not bool(vector.isfinite().all()):
        raise NotFinite(problem, "there is a NaN or an infinity in it", "Give finite numbers.")
    if not bool(vector.any()):
        raise StatesError(problem, "it is zero", "Give a vector that points somewhere.")
    return vector / vector.square().sum() if fitted else vector

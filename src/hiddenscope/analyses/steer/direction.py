"""Direction: along what the states of a model are changed, and at which sites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.arguments import checked
from hiddenscope.errors import NotFinite, SiteError, StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Facts
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import Pair, Pooling, States

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

EVERY_SITE = ""
MOST_SITES = 10  # of a deep model, if no sites are given
NO_DIFFERENCE = "Cannot take the direction between two sets of texts"
# Units in the last place: two sets whose means are no farther apart than that are the
# same.
ROUNDING = 8
# What is left of a direction that lies along the first token's state, as a share of its
# norm.
PARALLEL = 1e-6
USE = "Give hs.Direction.between(model, toward, away) or hs.Direction.of(vector)."


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Direction:
    """A direction in the states of a model: between two sets of texts, a given vector,
    or the weights of a probe.

    Make one with `Direction.between` or `Direction.of`. `sites` are steered one at a
    time; with `upwards` every layer above each of them is changed too, with its own
    vector. `spare_first` takes the mean state of the first tokens out of the direction:
    attention rests on the first token, and a model that loses its state breaks.

    `vectors` are float64, by site, or one for every site under "". `fitted` are the
    sites of probes, by the same keys, and `facts` say where the vectors come from.
    """

    vectors: Mapping[str, Tensor]
    sites: SitePatterns | None = None
    upwards: bool = False
    spare_first: bool = False
    fitted: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Direction({', '.join(f'{name} {value}' for name, value in self.facts.items())})"

    @classmethod
    def between(
        cls,
        model: ModelLike,
        toward: Texts | Inputs,
        away: Texts | Inputs,
        *,
        sites: SitePatterns | None = None,
        pool: Pooling | None = None,
        upwards: bool = False,
        spare_first: bool = False,
    ) -> "Direction":
        """From the mean state of the texts in `away` to the mean state of those in
        `toward`, at every site.

        The states of a text are pooled by `pool`: its last token, or the mean over its
        tokens. If it is not given, that is the last token in a decoder, and in an
        encoder, where the last is often a separator, the mean.

        >>> import hiddenscope as hs
        >>> from hiddenscope.testing import tiny_model
        >>> model = hs.load((tiny_model("llama"), None))
        >>> hs.Direction.between(model, [[5, 6], [5, 9]], [[7, 8]], sites="layer.2")
        Direction(origin texts, toward 2, away 1, pool last)
        """
        model = as_model(model)
        chosen = _spread_layers(model) if sites is None else model.anatomy.select(sites)
        if pool is None:
            pool = _default_pool(model, chosen)
        for name, texts in (("toward", toward), ("away", away)):
            if getattr(texts, "shape", None) != () and not len(texts):
                raise TextError(
                    NO_DIFFERENCE, f"{name} is empty", "Give at least one text."
                )
        inputs = [model.encode(texts) for texts in (toward, away)]
        if sorted(inputs[0].ids) == sorted(inputs[1].ids):
            raise TextError(
                NO_DIFFERENCE, "both are the same", "Give texts that differ."
            )
        changed_sites = sorted(
            {
                one
                for site in chosen
                for one in sites_above(model.anatomy.sites, site, upwards)
            }
        )
        pooled = [
            _pooled(model.capture(side, changed_sites), changed_sites, pool)
            for side in inputs
        ]
        vectors = {}
        for site in changed_sites:
            first, second = (side[site] for side in pooled)
            vector = first.mean(0) - second.mean(0)
            norms = torch.cat([first, second]).norm(dim=-1)
            if float(vector.norm()) <= ROUNDING * torch.finfo(model.dtype).eps * float(
                norms.mean()
            ):
                reason = (
                    f"with pool={pool!r} the states at {site} are the same in both,"
                    " within rounding"
                )
                remedy = "Take a higher layer, or other texts."
                raise StatesError(NO_DIFFERENCE, reason, remedy)
            vectors[str(site)] = vector
        facts = {
            "origin": "texts",
            "toward": len(inputs[0]),
            "away": len(inputs[1]),
            "pool": pool,
        }
        return cls(vectors, tuple(map(str, chosen)), upwards, spare_first, facts=facts)

    @classmethod
    def of(
        cls,
        vector: "ArrayLike | Tensor | Mapping[str, Any] | Any",
        *,
        sites: SitePatterns | None = None,
        upwards: bool = False,
        spare_first: bool = False,
    ) -> "Direction":
        """A vector [width], a fitted probe (anything with `coef_`), or several of
        either by site.

        The direction of a probe is the shortest step that raises its decision value by
        1. It is used at the site that the probe was fitted at, if no others are given.

        >>> Direction.of([0.0, 1.0, 0.0], sites="layer.2")
        Direction(origin vector)
        """
        by_site = dict(vector) if isinstance(vector, Mapping) else {EVERY_SITE: vector}
        if not by_site:
            raise SiteError(
                "Cannot make a direction",
                "the dict of vectors is empty",
                "Give {site: vector}.",
            )
        vectors = {str(name): _vector(one) for name, one in by_site.items()}
        probes = {
            str(name): one for name, one in by_site.items() if hasattr(one, "coef_")
        }
        fitted = {
            name: str(site)
            for name, probe in probes.items()
            if (site := getattr(probe, "site", None))
        }
        sites = fitted.get(EVERY_SITE) if sites is None else sites
        facts: Facts = (
            {"origin": "probe", "fitted_at": sorted(set(fitted.values()))}
            if probes
            else {"origin": "vector"}
        )
        return cls(vectors, sites, upwards, spare_first, fitted, facts)


def _default_pool(model: Model, sites: Sequence[Site]) -> Pooling:
    """The last token, which has seen the whole text, where every site is a decoder's."""
    names = {site.stack for site in sites}
    stacks = [stack for stack in model.anatomy.stacks if names & {None, stack.name}]
    return "last" if all(stack.causal for stack in stacks) else "mean"


@dataclass(frozen=True)
class Steered:
    """A direction in one model: a vector for each site that is changed, and the sites
    that are steered in turn.
    """

    vectors: Mapping[Site, Tensor]
    sites: tuple[Site, ...]
    facts: Facts


def in_model(direction: Direction, model: Model) -> Steered:
    """A direction as the model has it: its sites chosen, its vectors as wide as the
    states there.
    """
    if not isinstance(direction, Direction):
        raise StatesError(
            "direction must be a Direction", f"got {type(direction).__name__}", USE
        )
    if EVERY_SITE in direction.vectors:
        keys = dict.fromkeys(model.anatomy.sites, EVERY_SITE)
        chosen = (
            _spread_layers(model)
            if direction.sites is None
            else model.anatomy.select(direction.sites)
        )
    else:
        keys = {
            site: name
            for name in direction.vectors
            for site in model.anatomy.select(name)
        }
        chosen = (
            tuple(sorted(keys))
            if direction.sites is None
            else model.anatomy.select(direction.sites)
        )
    if missing := [site for site in chosen if site not in keys]:
        reason = f"it has vectors for {summarise(keys)}"
        raise SiteError(
            f"The direction has no vector at {missing[0]}",
            reason,
            "Give one, or leave the site out.",
        )
    used = sorted(
        {
            one
            for site in chosen
            for one in sites_above(tuple(keys), site, direction.upwards)
        }
    )
    vectors = {site: direction.vectors[keys[site]] for site in used}
    for site, vector in vectors.items():
        width = model.anatomy.width(site)
        if vector.shape != (width,):
            reason = f"the states at {site} of {model.name} have {width} numbers"
            raise StatesError(
                f"Cannot add a direction of {len(vector)} numbers",
                reason,
                f"Give a vector of {width}.",
            )
    facts = dict(direction.facts)
    if direction.fitted:
        elsewhere = [
            site
            for site in used
            if direction.fitted.get(keys[site], str(site)) != str(site)
        ]
        facts["used_elsewhere"] = [str(site) for site in elsewhere]
    return Steered(vectors, chosen, facts | {"spare_first": direction.spare_first})


def without_first_tokens(
    model: Model, steered: Steered, texts: Sequence[tuple[int, ...]]
) -> Steered:
    """The same vectors without what lies along the mean state of the texts' first
    tokens.
    """
    # A causal model's first token sees no other, so that nothing else need be run.
    ids = tuple(text[:1] if model.anatomy.stacks[0].causal else text for text in texts)
    states = model.capture(Inputs(ids), list(steered.vectors))
    vectors = {}
    for site, vector in steered.vectors.items():
        stack = in_stack(states, site)
        first = (
            stack[site]
            .double()
            .cpu()[torch.from_numpy(stack.tokens.positions == 0)]
            .mean(0)
        )
        rest = vector - (vector @ first) / (first @ first) * first
        if float(rest.norm()) <= PARALLEL * float(vector.norm()):
            reason = (
                f"the direction at {site} lies along the mean state of the first tokens"
            )
            raise StatesError(
                "spare_first leaves nothing",
                reason,
                "Leave `spare_first` out, or give another direction.",
            )
        vectors[site] = rest
    return Steered(vectors, steered.sites, steered.facts)


def in_stack(states: States | Pair, site: Site) -> States:
    """The states of the stack that a site belongs to."""
    if isinstance(states, Pair):
        return states.encoder if site.stack == "encoder" else states.decoder
    return states


def sites_above(known: tuple[Site, ...], site: Site, upwards: bool) -> tuple[Site, ...]:
    """The site itself, and with `upwards` the same part of every layer above it.

    >>> sites_above((Site(1), Site(2, "mlp"), Site(2), Site(3), Site(None)), Site(2), True)
    (Site('layer.2'), Site('layer.3'))
    """
    if not upwards or site.layer is None:
        return (site,)
    same = [
        one
        for one in known
        if (one.stack, one.part) == (site.stack, site.part) and one.layer is not None
    ]
    return tuple(
        one for one in same if one.layer is not None and one.layer >= site.layer
    )


def _spread_layers(model: Model) -> tuple[Site, ...]:
    """Layers spread over the depth of the last stack; not the embeddings, which know
    one token and no text.
    """
    stack, name = model.anatomy.stacks[-1], model.anatomy.sites[-1].stack
    layers = (
        np.linspace(1, stack.depth, min(MOST_SITES, stack.depth)).round().astype(int)
    )
    return tuple(Site(int(k), "", name) for k in dict.fromkeys(layers.tolist()))


def _pooled(
    states: States | Pair, sites: list[Site], pool: Pooling
) -> dict[Site, Tensor]:
    """The pooled states [text, width] at each site, in float64."""
    return {
        site: in_stack(states, site).pool(pool, site).double().cpu() for site in sites
    }


def _vector(given: Any) -> Tensor:
    """One vector in float64; of a probe, the shortest step that raises its decision
    value by 1.
    """
    probe = hasattr(given, "coef_")
    values = given.coef_ if probe else given
    try:
        array = (
            values.detach().cpu().double()
            if isinstance(values, Tensor)
            else torch.tensor(np.asarray(values, float))
        )
    except (
        TypeError,
        ValueError,
        NotImplementedError,
        # The last of a meta tensor, which has no numbers.
    ):
        remedy = (
            "Give a vector [width], {site: vector} or a fitted probe; for texts use"
            " Direction.between."
        )
        raise StatesError(
            "A direction must be a vector", f"got {type(given).__name__}", remedy
        ) from None
    vector = array[0] if array.ndim == 2 and len(array) == 1 else array
    if vector.ndim != 1:
        reason = f"it has the shape {list(array.shape)}"
        raise StatesError(
            "A direction must be one vector", reason, "Give one of the shape [width]."
        )
    if not bool(vector.isfinite().all()):
        raise NotFinite(
            "A direction must be finite",
            "it has a NaN or an infinity",
            "Give finite numbers.",
        )
    if not bool(vector.any()):
        raise StatesError(
            "A direction must not be zero",
            "all its numbers are 0",
            "Give a vector that points somewhere.",
        )
    return vector / vector.square().sum() if probe else vector

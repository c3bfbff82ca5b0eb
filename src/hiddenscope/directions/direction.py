"""Direction: along what the states of a model are changed, and at which sites."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.arguments import checked
from hiddenscope.directions.control_vector import (
    read_control_vector,
    write_control_vector,
)
from hiddenscope.errors import FileError, NotFinite, SiteError, StatesError, TextError
from hiddenscope.files import PathLike, printable
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Facts
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Pair, Pooling, States
from hiddenscope.states.pooling import vector_pooling

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

EVERY_SITE = ""
"""The key of a vector that serves every site."""
# Layers among which a direction without a model looks for its sites.
MOST_LISTED = 1000
# Sites of a deep model, if none are given.
MOST_SITES = 10
NO_DIFFERENCE = "Cannot take the direction between two sets of texts"
# Units in the last place: two sets whose means are no farther apart are the same.
ROUNDING = 8


@checked
@dataclass(frozen=True, eq=False, repr=False)
class Direction:
    """A direction in the states of a model.

    It lies between two sets of texts, or is a vector, the weights of a probe, or a
    feature or neuron of a dictionary. Make one with `Direction.between` or
    `Direction.of`, or take `dictionary[17]`. `sites` are steered one at a time; with
    `upwards` every layer above each of them is changed too, with its own vector.
    `spare_first` takes the mean state of the first tokens out of the direction:
    attention rests on the first token, and a model that loses its state breaks.

    `vectors` are float64, by site, or one for every site under "". `fitted` are the
    sites of probes, by the same keys, and `facts` say where the vectors come from.
    `hint` is the kind of model they are for, as its configuration calls it. `scales`
    are the mean norms of the states that the vectors were made of, where known.
    """

    vectors: Mapping[str, Tensor]
    sites: SitePatterns | None = None
    upwards: bool = False
    spare_first: bool = False
    fitted: Mapping[str, str] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    hint: str = ""
    scales: Mapping[str, float] = field(default_factory=dict)

    def __repr__(self) -> str:
        facts = [f"{name} {value}" for name, value in self.facts.items()]
        return printable(f"Direction({', '.join(facts)})")

    @property
    def title(self) -> str:
        """Return what a sentence calls it.

        >>> Direction.of([0.0, 1.0]).title
        'the direction'
        """
        if "feature" in self.facts:
            return printable(f"{self.facts['origin']} {self.facts['feature']}")
        return "the direction"

    def vector_at(self, site: Site, width: int | None = None) -> Tensor:
        """Return the vector for a site of this width; it may be that of every site.

        >>> Direction.of({"layer.2": [0.0, 1.0]}).vector_at(Site(3), 2)
        Traceback (most recent call last):
        hiddenscope.errors.SiteError: The direction has no vector at layer.3: it has vectors for layer.2. Give one, or leave the site out.
        """  # noqa: E501
        vector = self.vectors.get(str(site), self.vectors.get(EVERY_SITE))
        if vector is None:
            raise SiteError(
                f"The direction has no vector at {site}",
                f"it has vectors for {', '.join(self.vectors)}",
                "Give one, or leave the site out.",
            )
        if width is not None and len(vector) != width:
            raise StatesError(
                f"Cannot use a direction of {len(vector)} numbers",
                f"the states at {site} have {width} numbers",
                f"Give a vector of {width}.",
            )
        return vector

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
        """Point from the mean state of the texts in `away` to that of `toward`.

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
        selected = (
            spread_layers(model) if sites is None else model.anatomy.select(sites)
        )
        if pool is None:
            # The last token of a decoder has seen the whole text.
            names = {site.stack for site in selected}
            stacks = model.anatomy.stacks
            used = [stack for stack in stacks if names & {None, stack.name}]
            pool = "last" if all(stack.causal for stack in used) else "mean"
        pool = vector_pooling(pool)
        for name, texts in (("toward", toward), ("away", away)):
            # A scalar array has no length; `encode` refuses it.
            if getattr(texts, "shape", None) != () and not len(texts):
                raise TextError(
                    NO_DIFFERENCE, f"{name} is empty", "Give at least one text."
                )
        toward_inputs, away_inputs = model.encode(toward), model.encode(away)
        if sorted(toward_inputs.ids) == sorted(away_inputs.ids):
            raise TextError(
                NO_DIFFERENCE, "both are the same", "Give texts that differ."
            )
        changed = changed_sites(model.anatomy.sites, selected, upwards=upwards)
        # The states of one side are let go before those of the other are captured.
        toward_states = _pooled_states(model, toward_inputs, changed, pool)
        away_states = _pooled_states(model, away_inputs, changed, pool)
        vectors, scales = {}, {}
        for site in changed:
            ends, starts = toward_states[site], away_states[site]
            vector = ends.mean(0) - starts.mean(0)
            mean_norm = float(torch.cat([ends, starts]).norm(dim=-1).mean())
            rounding = ROUNDING * torch.finfo(model.dtype).eps * mean_norm
            if float(vector.norm()) <= rounding:
                reason = (
                    f"with pool={pool!r} the states at {site} are the same in both,"
                    " within rounding"
                )
                remedy = "Take a higher layer, or other texts."
                raise StatesError(NO_DIFFERENCE, reason, remedy)
            vectors[str(site)] = vector
            scales[str(site)] = mean_norm
        facts = {
            "origin": "texts",
            "toward": len(toward_inputs),
            "away": len(away_inputs),
            "pool": pool,
        }
        # A module that is no model of transformers may have no config.
        config = getattr(model.module, "config", None)
        hint = str(getattr(config, "model_type", ""))
        site_names = tuple(map(str, selected))
        return cls(vectors, site_names, upwards, spare_first, {}, facts, hint, scales)

    @classmethod
    def of(
        cls,
        vector: "ArrayLike | Tensor | Mapping[str, Any] | Any",
        *,
        sites: SitePatterns | None = None,
        upwards: bool = False,
        spare_first: bool = False,
    ) -> "Direction":
        """Take a vector [width] or a fitted probe (with `coef_`), or several by site.

        The direction of a probe is the shortest step that raises its decision value by
        1. It is used at the site that the probe was fitted at, if no others are given.
        Another direction, with `sites`, is used there in place of its own.

        >>> Direction.of([0.0, 1.0, 0.0], sites="layer.2")
        Direction(origin vector)
        """
        facts: Facts = {"origin": "vector"}
        if isinstance(vector, Direction):
            facts, vector = vector.facts, vector.vectors
            if sites is not None and len(vector) == 1:
                (vector,) = vector.values()
        by_site = dict(vector) if isinstance(vector, Mapping) else {EVERY_SITE: vector}
        if not by_site:
            raise SiteError(
                "Cannot make a direction",
                "the dict of vectors is empty",
                "Give {site: vector}.",
            )
        vectors = {}
        fitted: dict[str, str] = {}
        for key, value in by_site.items():
            name = str(key)
            vectors[name] = _vector(value)
            if hasattr(value, "coef_"):
                site = getattr(value, "site", None)
                if site:
                    fitted[name] = str(site)
                facts = {"origin": "probe", "fitted_at": sorted(set(fitted.values()))}
        if sites is None:
            sites = fitted.get(EVERY_SITE)
        return cls(vectors, sites, upwards, spare_first, fitted, facts)

    def save(self, path: PathLike, *, sites: SitePatterns | None = None) -> None:
        """Write a GGUF file that llama.cpp's --control-vector reads, as float32.

        It has a vector for each layer, of which llama.cpp adds all at once, or those of
        its --control-vector-layer-range. `sites` are some of the direction's. Layers 0
        and 1, `final` and parts of blocks have no place in such a file.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Direction.of([0.0, 1.0], sites="layer.2").save(f"{folder}/d.gguf")
        ...     Direction.load(f"{folder}/d.gguf").vectors
        {'layer.2': tensor([0., 1.], dtype=torch.float64)}
        """
        if Path(path).suffix.lower() != ".gguf":
            raise FileError(
                f"Cannot save a direction as {os.fspath(path)}",
                "directions are saved as .gguf",
                "Give the path that suffix.",
            )
        if self.spare_first:
            raise StatesError(
                "Cannot save this direction",
                "spare_first takes out the first tokens' states as it is used, which a"
                " file cannot say",
                "Save it without spare_first.",
            )
        vectors = self._by_site(sites)
        write_control_vector(path, vectors, self.hint, self.facts)

    @classmethod
    def load(cls, path: PathLike) -> "Direction":
        """Read the control vectors in a GGUF file, also of repeng or llama.cpp.

        Each of their layers is then steered by itself; `sites` and `upwards` are not
        in such a file.
        """
        vectors, hint, facts = read_control_vector(path)
        return cls(vectors, facts=facts or {"origin": "vector"}, hint=hint)

    def _by_site(self, sites: SitePatterns | None) -> dict[Site, Tensor]:
        """Return the vectors by single sites, which a file needs."""
        if EVERY_SITE in self.vectors:
            patterns = sites or self.sites
            if patterns is None:
                raise SiteError(
                    "Cannot save this direction",
                    "it has one vector for whatever site, and a file needs to know"
                    " which",
                    "Give sites, such as save(path, sites='layer.12').",
                )
            every = select(
                patterns, tuple(map(Site, range(MOST_LISTED))), owner="a file"
            )
            return dict.fromkeys(every, self.vectors[EVERY_SITE])
        vectors = {Site.parse(name): vector for name, vector in self.vectors.items()}
        if sites is None:
            return vectors
        selected = select(sites, tuple(vectors), owner="this direction")
        return {site: vectors[site] for site in selected}


def in_stack(states: States | Pair, site: Site) -> States:
    """Return the states of the stack that a site belongs to."""
    if isinstance(states, Pair):
        return states.encoder if site.stack == "encoder" else states.decoder
    return states


def changed_sites(
    known: Sequence[Site], sites: Sequence[Site], *, upwards: bool
) -> list[Site]:
    """Return the sites in order, and with `upwards` the same part of every layer above.

    >>> known = (Site(1), Site(2, "mlp"), Site(2), Site(3), Site(None))
    >>> changed_sites(known, [Site(2)], upwards=True)
    [Site('layer.2'), Site('layer.3')]
    """
    changed = set(sites)
    for site, other in product(sites, known):
        same_part = (other.stack, other.part) == (site.stack, site.part)
        if upwards and same_part and other.layer is not None and other > site:
            changed.add(other)
    return sorted(changed)


def spread_layers(model: Model) -> tuple[Site, ...]:
    """Return layers spread over the depth of the last stack.

    The embeddings are left out: they know one token and no text.
    """
    depth = model.anatomy.stacks[-1].depth
    name = model.anatomy.sites[-1].stack
    spread = np.linspace(1, depth, min(MOST_SITES, depth)).round()
    layers = dict.fromkeys(spread.astype(int).tolist())
    return tuple(Site(layer, "", name) for layer in layers)


def _pooled_states(
    model: Model, inputs: Inputs, sites: list[Site], pool: Pooling
) -> dict[Site, Tensor]:
    """Return the pooled states [text, width] at each site, in float64."""
    states = model.capture(inputs, sites)
    pooled = {}
    for site in sites:
        pooled[site] = in_stack(states, site).pool(pool, site).double().cpu()
    return pooled


def _vector(value: Any) -> Tensor:
    """Return one vector in float64.

    Of a probe, it is the shortest step that raises its decision value by 1.
    """
    probe = hasattr(value, "coef_")
    numbers = value.coef_ if probe else value
    try:
        if not isinstance(numbers, Tensor):
            numbers = torch.tensor(np.asarray(numbers))
        if numbers.is_complex():
            raise TypeError
        array = numbers.detach().cpu().double()
    # NotImplementedError comes from a meta tensor, which has no numbers.
    except (TypeError, ValueError, NotImplementedError):
        remedy = (
            "Give a vector [width], {site: vector} or a fitted probe; for texts use"
            " Direction.between."
        )
        raise StatesError(
            "A direction must be a vector", f"got {type(value).__name__}", remedy
        ) from None
    # The probe of two classes has one row of coefficients.
    vector = array[0] if array.ndim == 2 and len(array) == 1 else array
    if vector.ndim != 1 or not len(vector):
        reason = f"it has the shape {list(array.shape)}"
        raise StatesError(
            "A direction must be one vector", reason, "Give one of the shape [width]."
        )
    if not vector.isfinite().all():
        raise NotFinite(
            "A direction must be finite",
            "it has a NaN or an infinity",
            "Give finite numbers.",
        )
    if not vector.any():
        raise StatesError(
            "A direction must not be zero",
            "all its numbers are 0",
            "Give a vector that points somewhere.",
        )
    if probe:
        return vector / vector.square().sum()
    return vector

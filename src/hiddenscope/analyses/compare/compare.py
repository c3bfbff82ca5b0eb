"""Where, and by how much, do two texts or two models differ?"""

from typing import TYPE_CHECKING, Any

from hiddenscope import progress
from hiddenscope.analyses.compare.differences import (
    CKASample,
    Comparison,
    compare_text,
    dataset,
    largest_relative,
    put_along_sites,
    put_cka,
    stack_facts,
    texts_of,
)
from hiddenscope.analyses.compare.sides import (
    Sides,
    from_model,
    from_states,
    from_two_models,
)
from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Readable

if TYPE_CHECKING:
    import xarray


@checked
def compare(
    model: ModelLike | Readable | Pair,
    a: Texts | Inputs | Readable | Pair,
    b: Texts | Inputs | None = None,
    *,
    other: ModelLike | None = None,
    sites: SitePatterns = "layer.*,final",
    targets: Texts | Inputs | None = None,
    truncate: bool = False,
) -> Result:
    """Compare two texts, or one text in two models, token by token and layer by layer.

    `a` and `b` are two texts or two lists of as many; with `other`, `a` goes through
    both models. States need no model: `compare(states, others)`. Tokens that only one
    side has are gaps, NaN. Two models are also compared by the linear CKA of every pair
    of sites, and by that alone where their widths differ. `targets` are a decoder's
    texts, for both sides; where those of `b` differ, give `model.encode(b,
    targets=...)`.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.compare(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]], [[5, 6, 8]])
    >>> result.data["l2"].sel(site="layer.0").values[:2].tolist()
    [0.0, 0.0]
    >>> result.facts["stacks"][0]["first_difference"]["position"]
    [2, 2]
    """
    sides = _sides(as_source(model), a, b, as_source(other), sites, targets, truncate)
    comparisons, sample = _compared(
        sides, sites, by_spans=b is None, two_models=other is not None
    )
    names = dict.fromkeys(one.stack for one in comparisons)
    stacks = [[one for one in comparisons if one.stack == name] for name in names]
    first = comparisons[0]
    cka_only = first.measures is None
    data = _no_cells(first) if cka_only else dataset(stacks)
    data.attrs |= texts_of(stacks)
    paired = sum(one.paired.shape[1] for one in comparisons)
    facts: dict[str, Any] = {
        "texts": sides.count,
        "tokens_compared": paired,
        "gaps": sum(len(one.columns) for one in comparisons) - paired,
        "run": sides.run,
        "computed_in": "float64",
        **_rounding_floor(sides),
        "stacks": [],
        "notes": [sides.note] if sides.note else [],
    }
    if not cka_only:
        put_along_sites(data)
        facts["stacks"] = [stack_facts(data, stack) for stack in stacks]
    if len(stacks) == 1 and (cka_only or other is not None or not first.one_model):
        facts |= put_cka(data, first, sample, required=cka_only)
    return Result("compare", data, facts, _source(first))


def _sides(
    model: Model | Readable | Pair,
    a: Any,
    b: Any,
    other: Model | None,
    sites: SitePatterns,
    targets: Texts | Inputs | None,
    truncate: bool,
) -> Sides:
    """Both sides, once it is clear what they are."""
    states = [isinstance(side, Pair | Readable) for side in (a, b)]
    if not isinstance(model, Model):
        if not states[0] or b is not None or other is not None or targets is not None:
            reason = "states are compared with states, and with nothing else"
            raise StatesError(
                "Cannot compare these states", reason, "Give compare(states, others)."
            )
        return from_states(model, a, sites)
    problem = f"Cannot compare in {model.name}"
    if any(states):
        reason = "states were given, and they need no model"
        raise StatesError(problem, reason, "Give compare(states, others), or texts.")
    if (b is None) == (other is None):
        reason = (
            "there is no second text and no other model"
            if b is None
            else "a second text and another model"
        )
        raise TextError(problem, reason, "Give b, or give other=.")
    if other is not None:
        return from_two_models((model, other), a, sites, targets, truncate)
    own = b.targets is not None if isinstance(b, Inputs) else False
    inputs = model.encode(a, targets=targets, truncate=truncate)
    second = model.encode(b, targets=None if own else targets, truncate=truncate)
    return from_model(model, inputs, second, sites)


def _compared(
    sides: Sides, sites: SitePatterns, *, by_spans: bool, two_models: bool
) -> tuple[list[Comparison], CKASample]:
    """Every text compared, and a sample of the paired states where CKA may be asked
    for.
    """
    comparisons, sample = [], CKASample()
    with progress.track("Comparing", total=sides.count) as advance:
        for number, pair in enumerate(sides.pairs):
            for one, states in compare_text(number, pair, sites, by_spans=by_spans):
                comparisons.append(one)
                if (
                    one.stack is None
                    and by_spans
                    and (two_models or not one.one_model or one.measures is None)
                ):
                    sample.add(one, states)
            advance(1)
    if not comparisons:
        raise StatesError(
            "Nothing to compare",
            "there are no texts",
            "Give at least one on each side.",
        )
    return comparisons, sample


def _rounding_floor(sides: Sides) -> dict[str, Any]:
    """What rounding alone makes of the first text, where the two sides cannot be run in
    one batch.
    """
    if sides.repeat is None:
        return {}
    alone, again, between = sides.repeat()
    return {
        "rounding_floor": {
            "relative": largest_relative(alone, again),
            "between": between,
        }
    }


def _source(first: Comparison) -> dict[str, Any]:
    one, two = (source.to_json() for source in first.source)
    return one if one == two else one | {"other": two}


def _no_cells(first: Comparison) -> "xarray.Dataset":
    """Nothing is measured token by token where the widths differ."""
    import xarray

    return xarray.Dataset(coords={"site": [str(site) for site in first.every[0]]})

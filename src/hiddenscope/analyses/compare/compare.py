"""Where, and by how much, do two texts or two models differ?"""

from typing import Any

from hiddenscope import progress
from hiddenscope.analyses.compare.cka import CKASample, put_cka
from hiddenscope.analyses.compare.differences import (
    Comparison,
    compare_text,
    largest_relative,
)
from hiddenscope.analyses.compare.findings import (
    compared_texts,
    comparison_dataset,
    comparison_stack_facts,
    put_along_sites,
)
from hiddenscope.analyses.compare.sides import (
    TextPairs,
    from_model,
    from_states,
    from_two_models,
)
from hiddenscope.arguments import checked
from hiddenscope.errors import StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.results.dataset import site_names, to_dataset
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Readable


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
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> result = hs.compare(model, [[5, 6, 7]], [[5, 6, 8]])
    >>> result.data["l2"].sel(site="layer.0").values[:2].tolist()
    [0.0, 0.0]
    >>> result.facts["stacks"][0]["first_difference"]["position"]
    [2, 2]
    """
    texts = _text_pairs(
        as_source(model), a, b, as_source(other), sites, targets, truncate
    )
    comparisons, sample = _compared(
        texts, sites, by_spans=b is None, two_models=other is not None
    )
    by_stack: dict[str | None, list[Comparison]] = {}
    for comparison in comparisons:
        by_stack.setdefault(comparison.stack, []).append(comparison)
    stacks = list(by_stack.values())
    first = comparisons[0]
    # Where the widths differ, nothing is measured token by token.
    cka_only = first.measures is None
    if cka_only:
        data = to_dataset({}, {"site": site_names(first.every[0])})
    else:
        data = comparison_dataset(stacks)
    data.attrs |= compared_texts(stacks)
    paired = sum(comparison.paired.shape[1] for comparison in comparisons)
    columns = sum(len(comparison.columns) for comparison in comparisons)
    facts: dict[str, Any] = {
        "texts": texts.count,
        "tokens_compared": paired,
        "gaps": columns - paired,
        "run": texts.run,
        "computed_in": "float64",
    }
    if texts.repeat is not None:
        # What rounding alone does, where the two sides cannot be run in one batch.
        single, repeated, between = texts.repeat()
        facts["rounding_floor"] = {
            "relative": largest_relative(single, repeated),
            "between": between,
        }
    facts |= {"stacks": [], "notes": [texts.note] if texts.note else []}
    if not cka_only:
        same = int((data["id"] == data["other_id"]).sum())
        if first.one_model and columns > paired >= 2 * same:
            facts["notes"].append(
                "Half of the compared tokens or more differ: without an equal one, the"
                " last of each text stand against each other."
            )
        put_along_sites(data)
        facts["stacks"] = [comparison_stack_facts(data, stack) for stack in stacks]
    if len(stacks) == 1 and (cka_only or other is not None or not first.one_model):
        facts |= put_cka(data, first, sample, required=cka_only)
    source, other_source = (side.to_json() for side in first.source)
    if source != other_source:
        source = {**source, "other": other_source}
    return Result("compare", data, facts, source)


def _text_pairs(
    model: Model | Readable | Pair,
    a: Any,
    b: Any,
    other: Model | None,
    sites: SitePatterns,
    targets: Texts | Inputs | None,
    truncate: bool,
) -> TextPairs:
    """Pair the two sides, once it is clear what they are."""
    if not isinstance(model, Model):
        states_only = b is None and other is None and targets is None
        if not isinstance(a, Pair | Readable) or not states_only:
            reason = "states are compared with states, and with nothing else"
            raise StatesError(
                "Cannot compare these states", reason, "Give compare(states, others)."
            )
        return from_states(model, a, sites)
    problem = f"Cannot compare in {model.name}"
    if isinstance(a, Pair | Readable) or isinstance(b, Pair | Readable):
        reason = "states were given, and they need no model"
        raise StatesError(problem, reason, "Give compare(states, others), or texts.")
    if b is None and other is None:
        reason = "there is no second text and no other model"
        raise TextError(problem, reason, "Give b, or give other=.")
    if other is None:
        inputs = model.encode(a, targets=targets, truncate=truncate)
        # Encoded texts may bring targets of their own.
        if isinstance(b, Inputs) and b.targets is not None:
            targets = None
        other_inputs = model.encode(b, targets=targets, truncate=truncate)
        return from_model(model, inputs, other_inputs, sites)
    if b is not None:
        reason = "a second text and another model"
        raise TextError(problem, reason, "Give b, or give other=.")
    return from_two_models((model, other), a, sites, targets, truncate)


def _compared(
    texts: TextPairs, sites: SitePatterns, *, by_spans: bool, two_models: bool
) -> tuple[list[Comparison], CKASample]:
    """Compare every text, and sample paired states where CKA may be measured."""
    comparisons: list[Comparison] = []
    sample = CKASample()
    with progress.track("Comparing", total=texts.count) as advance:
        for number, pair in enumerate(texts.pairs):
            for comparison, states in compare_text(
                number, pair, sites, by_spans=by_spans
            ):
                comparisons.append(comparison)
                differing = (
                    two_models
                    or not comparison.one_model
                    or comparison.measures is None
                )
                if comparison.stack is None and by_spans and differing:
                    sample.add(comparison, states)
            advance(1)
    if not comparisons:
        raise StatesError(
            "Nothing to compare",
            "there are no texts",
            "Give at least one on each side.",
        )
    return comparisons, sample

"""How certain is each layer? An analysis as somebody else's package would declare it.

It is written as CONTRIBUTING tells, in three files, and is not in the catalog.

compute  the numbers
story    the report, and what is said and shown of it
wrong    the same analysis, wrong in twelve ways that a contributor may slip into
__main__ runs the checks on the right one and on each wrong one:
         `python -m labs.mutants.entropy`
"""

from typing import TYPE_CHECKING, Annotated

from hiddenscope.interface import HEAD, SEED, SITES, TARGETS, TEXTS, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import Inputs, ModelLike, Result, SitePatterns, Texts


@analysis(
    needs=(HEAD,),
    verb="measure what is predicted by",
    promise="You will see how certain every layer is of the next token.",
)
def entropy(
    model: "ModelLike",
    texts: Annotated["Texts | Inputs", TEXTS],
    *,
    sites: Annotated["SitePatterns", SITES] = "layer.*,final",
    draws: Annotated[int, ask("How many random states to compare with.")] = 16,
    targets: Annotated["Texts | None", TARGETS] = None,
    seed: Annotated[int, SEED] = 0,
) -> "Result":
    """Measure the entropy of what every layer would predict, if it were the last.

    For each site and token: the entropy, in bits, of the distribution that the model's
    own unembedding makes of the state. It is compared with the mean entropy of random
    states, which `seed` draws.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = entropy(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["entropy"].sizes)
    {'site': 5, 'token': 3}
    """
    from labs.mutants.entropy.compute import measure_entropy

    return measure_entropy(model, texts, sites, draws, targets, seed)

"""How large is every state, how do states spread, and how alike are layers?

statistics  each state by itself, and the states of a site together
neurons     how strongly the neurons of a layer act, and on how few tokens
compute     the labelled arrays and the report
story       what is said and shown
"""

from typing import TYPE_CHECKING, Annotated, Literal

from hiddenscope.interface import SITES, TARGETS, TEXTS, TRUNCATE, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Inputs,
        ModelLike,
        Pair,
        Readable,
        Result,
        SitePatterns,
        Texts,
    )


@analysis(
    states=True,
    promise="You will see how large the states of every layer are, how they spread,"
    " and how alike layers are.",
)
def profile(
    source: "ModelLike | Readable | Pair",
    texts: Annotated["Texts | Inputs | None", TEXTS] = None,
    *,
    sites: Annotated["SitePatterns", SITES] = "layer.*,final",
    final_norm: Annotated[
        Literal["apart", "everywhere", "mixed"],
        ask(
            "apart: raw layers only; everywhere: each through the final norm;"
            " mixed: as they are.",
            aside=True,
        ),
    ] = "apart",
    sample: Annotated[
        int,
        ask("At most this many tokens for neighbours and CKA.", least=3, aside=True),
    ] = 1000,
    targets: Annotated["Texts | None", TARGETS] = None,
    truncate: Annotated[bool, TRUNCATE] = False,
) -> "Result":
    """Measure every state: its norm, how states spread, and how alike layers are.

    Give a model and texts, or states, or anything that can be read block by block.
    Layers are raw and `final` is normed: with `final_norm="apart"` layers are compared
    with layers only, with "everywhere" every layer first goes through the model's final
    norm, and with "mixed" all sites are compared as they are. Neighbours and CKA are
    measured on at most `sample` tokens. Neurons ("*.mlp.neurons") are also measured by
    their intensity and selectivity, with intervals over texts.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.profile(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["norm"].sizes), result.data["norm_median"].dims
    ({'site': 5, 'token': 3}, ('site',))
    """
    from hiddenscope.analyses.profile.compute import measure_states

    return measure_states(source, texts, sites, final_norm, sample, targets, truncate)

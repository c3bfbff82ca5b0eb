"""Where, and by how much, do two texts or two models differ?

sides        the two sides of every text, and which of their tokens stand in one column
differences  what is measured in every column, and the CKA of every pair of sites
compute      the labelled arrays and the report
story        what is said and shown
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from hiddenscope.interface import SITES, TARGETS, TRUNCATE, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Direction,
        Inputs,
        ModelLike,
        Pair,
        Readable,
        Result,
        SitePatterns,
        Texts,
    )


@analysis()
def compare(
    model: "ModelLike | Readable | Pair",
    a: Annotated[
        "Texts | Inputs | Readable | Pair",
        ask(
            "A text; @FILE reads it from a file.",
            kind="text",
            label="Text A",
            form_help="",
        ),
    ],
    b: Annotated[
        "Texts | Inputs | None",
        ask(
            "The text that it is compared with.",
            kind="text",
            label="Text B",
            form_help="",
        ),
    ] = None,
    *,
    other: Annotated[
        "ModelLike | None",
        ask(
            "Compare the one text in this model too.",
            kind="model",
            label="Second model",
        ),
    ] = None,
    sites: Annotated["SitePatterns | Direction", SITES] = "layer.*,final",
    targets: Annotated[
        "Texts | Inputs | None", replace(TARGETS, spelling=("--target", "--targets"))
    ] = None,
    truncate: Annotated[bool, TRUNCATE] = False,
) -> "Result":
    """Compare two texts, or one text in two models, token by token and layer by layer.

    `a` and `b` are two texts or two lists of as many; with `other`, `a` goes through
    both models. States need no model: `compare(states, others)`. Tokens that only one
    side has are gaps, NaN. Two models are also compared by the linear CKA of every pair
    of sites, and by that alone where their widths differ. A direction as `sites`, such
    as a feature, adds `along`: how far they differ along it. `targets` are a decoder's
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
    from hiddenscope.analyses.compare.compute import compare_states

    return compare_states(model, a, b, other, sites, targets, truncate)

"""How does an analysis change along a series of models?

options   the analyses that a series can run, and their options
member    a model of a series: where it comes from and what it is called
identity  what decides the numbers of a member: its weights and all else
question  the analysis that every member is asked, its options and its texts
job       one model in memory at a time, and results that are kept
compute   the results of all members on one axis of depths, and the report
story     what is said and shown
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hiddenscope.files import PathLike
from hiddenscope.interface import analysis

if TYPE_CHECKING:
    from hiddenscope.annotations import Members, Result


@analysis()
def series(
    models: "Members",
    analysis: str,
    data: Any = None,
    *,
    against: str = "first",
    options: Mapping[str, Any] | None = None,
    to: PathLike | None = None,
) -> "Result":
    """Run one analysis on every model of a series, one model in memory at a time.

    `models` are checkpoints, sizes or variants: anything `hs.load` takes, a model, or
    `hs.Member` with a revision, a name or a place on the axis. `analysis` is
    "profile", "lens", "probe", "project", "compare" or "drift"; the last two compare
    every member with the `against="first"` or the "previous" one, by its states.
    `data` are the texts, or labelled ones, and `options` those of the analysis. With
    the folder `to`, the result of each member is kept there, and the same call again
    resumes. Weights are hashed first: members with the same ones are reported.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> models = [(tiny_model("gpt2", seed=seed), None) for seed in (0, 1, 0)]
    >>> result = hs.series(models, "profile", [[5, 6, 7]])
    >>> dict(result.data["norm_median"].sizes)
    {'member': 3, 'site': 5}
    >>> result.facts["same_weights"][0]["members"]
    ['GPT2LMHeadModel (1)', 'GPT2LMHeadModel (3)']
    """
    from hiddenscope.series.compute import ask_members

    return ask_members(
        models, analysis, data, against=against, options=options or {}, to=to
    )

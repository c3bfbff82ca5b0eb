"""Which subspace of a state holds a variable?

exchange  runs in which a part of some states is that of other prompts; learned parts
compute   what is exchanged at every site and token, beside controls, and the report
story     what is said and shown
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from hiddenscope.causes.contrast import Interchange as Interchange
from hiddenscope.interface import HEAD, ONE_STACK, SEED, SITES, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import ModelLike, Result, SitePatterns


@analysis(
    needs=(HEAD, ONE_STACK),
    verb="exchange states of",
    changes=True,
    details="Pairs come from a .jsonl or .csv file with the columns base, source,"
    " answer and counterfactual, and value, source_value and group if you like. --out"
    " variable.html keeps the pictures, .csv the numbers.",
)
def variable(
    model: "ModelLike",
    pairs: Annotated[
        Sequence[Interchange] | str,
        ask(
            "Pairs of prompts and their answers: a .jsonl or .csv file.",
            kind="pairs",
            form_help='One pair a line: {"base": "...", "source": "...", "answer":'
            ' "...", "counterfactual": "..."}.',
        ),
    ],
    *,
    sites: Annotated["SitePatterns", SITES] = "layer.*",
    tokens: Annotated[
        Sequence[int] | None,
        ask(
            "Positions, as -1 for the last; the last that differs and the last if not"
            " given.",
            python_only="the default serves most pairs",
            in_form=False,
        ),
    ] = None,
    subspace: Annotated[
        Any,
        ask(
            "Learned from the pairs, or their principal components.",
            "choice",
            choices=("learned", "pca"),
        ),
    ] = "learned",
    rank: Annotated[int, ask("How many dimensions the subspace has.")] = 1,
    seed: Annotated[int, SEED] = 0,
) -> "Result":
    """Exchange a subspace of a state between prompts, and see whether the answer turns.

    In the run of `base`, the part of one state that lies in the subspace becomes that
    of the run of `source`. The accuracy is the share of pairs of which the
    counterfactual is then above all other answers of the pairs. A subspace of `rank`
    dimensions is learned on half of the groups and tested on the other half, in turn
    (distributed alignment search); "pca" takes the principal components of the
    differences of states. Or give one: a direction, a probe, or rows [rank, width].

    The same is done with the whole state, a random subspace, sources at random, a
    subspace learned from these, random weights, and only that part of the subspace
    which the answers read. What does not survive all of them is no finding.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> pairs = [hs.Interchange([k, 7, 6], [k, 8, 6], 11, 12) for k in range(20, 26)]
    >>> result = hs.variable(model, pairs, sites="layer.1")
    >>> result.data["basis"].shape, result.facts["groups"]
    ((1, 2, 1, 64), 6)
    """
    from hiddenscope.analyses.variable.compute import find_variable

    return find_variable(model, pairs, sites, tokens, subspace, rank, seed)

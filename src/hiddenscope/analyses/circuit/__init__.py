"""How few edges carry an answer?

compute  the faithfulness of circuits of every size, and the report
story    what is said and shown
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from hiddenscope.causes.contrast import CONTRASTS, Contrast
from hiddenscope.interface import HEAD, ONE_STACK, SEED, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import ModelLike, Result


@analysis(
    needs=(HEAD, ONE_STACK),
    verb="find a circuit of",
    details="Prints how faithful circuits of every size are; --out circuit.html keeps"
    " the pictures, .csv the numbers.",
)
def circuit(
    model: "ModelLike",
    contrasts: Annotated[Contrast | Sequence[Contrast], CONTRASTS],
    *,
    ablation: Annotated[
        Literal["resample", "mean", "zero"],
        ask(
            "What edges outside a circuit carry: what was written in the corrupt run,"
            " on average, or nothing."
        ),
    ] = "resample",
    method: Annotated[
        Literal["integrated", "gradient", "dropped", "exact"],
        ask("How edges are scored, as in `edges`."),
    ] = "integrated",
    random: Annotated[
        int,
        ask(
            "How many random circuits of each size are beside it.", least=0, aside=True
        ),
    ] = 2,
    seed: Annotated[int, SEED] = 0,
) -> "Result":
    """Find how few edges carry an answer, and how faithful circuits of any size are.

    Edges are ranked by the size of their effect (`edges`), and the strongest are kept:
    from 0.1% of them to all. Through all other edges goes what was written in the
    corrupt run, the mean over the prompts that choose, or nothing. Faithfulness is the
    share of the logit difference between the answers that is left: 1 is the model, 0
    the run with no edge kept. With several contrasts half of the groups choose the
    edges, and the others test them. Beside it are circuits of random edges, those that
    a plain gradient chooses, and the complement, which keeps all edges but these.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> contrast = hs.Contrast([5, 6, 7], [5, 9, 7], answer=11, other=12)
    >>> result = hs.circuit(model, contrast)
    >>> result.data["faithfulness"].sel(way="circuit").values[-1].round(4)
    np.float64(1.0)
    """
    from hiddenscope.analyses.circuit.compute import find_circuit

    return find_circuit(
        model, contrasts, ablation=ablation, method=method, random=random, seed=seed
    )

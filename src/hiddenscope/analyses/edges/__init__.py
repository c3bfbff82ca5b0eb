"""Which part reads what from which part?

compute  the effects of edges as labelled arrays, and the report
story    what is said and shown
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from hiddenscope.causes.contrast import CONTRASTS, Contrast
from hiddenscope.interface import HEAD, ONE_STACK, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import ModelLike, Result


@analysis(
    needs=(HEAD, ONE_STACK),
    verb="tell the edges of",
    details="Prints the strongest edges; --out edges.html keeps the graph, .csv the"
    " numbers.",
)
def edges(
    model: "ModelLike",
    contrasts: Annotated[Contrast | Sequence[Contrast], CONTRASTS],
    *,
    into: Annotated[
        Literal["corrupt", "clean"],
        ask("The run whose edges carry what the other one writes."),
    ] = "corrupt",
    method: Annotated[
        Literal["integrated", "gradient", "dropped", "exact"],
        ask(
            "Gradients between the runs, of one run, or with one layer's dropped at a"
            " time; or a run of the rest for every edge."
        ),
    ] = "integrated",
    exact: Annotated[
        int, ask("How many of the strongest edges are computed exactly.", least=0)
    ] = 10,
    paths: Annotated[
        Sequence[str],
        ask(
            "Edges to compute exactly: 'layer.1.mlp > layer.2.attn.q.*'.",
            kind="words",
            spelling=("--path",),
            in_form=False,
        ),
    ] = (),
    sample: Annotated[
        int,
        ask(
            "How many random edges are computed exactly, to tell the error.",
            least=0,
            aside=True,
        ),
    ] = 200,
) -> "Result":
    """Tell which part reads what from which part, and how much of the answer it is.

    The embeddings, every head and every MLP write to the residual stream; the queries,
    keys and values of every head, every MLP and the logits read it. The effect of an
    edge is the share of the logit difference that comes back where this reader alone
    gets what this writer wrote in the clean run (or is lost, with `into="clean"`). All
    effects are estimated: what the reader makes of it is computed, and the rest of the
    model taken as linear, by gradients at five steps between the runs. With the method
    "dropped" they are means of absolute values. The strongest `exact` ones, the `paths`
    that are named, and a random `sample` are patched exactly, which gives the error of
    the estimate. With the method "exact" every edge is patched, or the `paths` alone. A
    name with * stands for many parts; single neurons can write too:
    "layer.1.mlp.neuron.7 > logits". Several contrasts are averaged.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> contrast = hs.Contrast([5, 6, 7], [5, 9, 7], answer=11, other=12)
    >>> result = hs.edges(model, contrast, method="exact")
    >>> result.data["effect"].sel(writer="layer.2.mlp", reader="layer.1.mlp").item()
    nan
    """
    from hiddenscope.analyses.edges.compute import list_edges

    return list_edges(
        model,
        contrasts,
        into=into,
        method=method,
        exact=exact,
        paths=paths,
        sample=sample,
    )

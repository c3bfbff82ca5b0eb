"""How do labelled texts lie in every layer, and does the picture tell the truth?

points    the points of a dataset in a model, with their classes
pictures  pictures in two dimensions, compared with the full space
workers   the processes that compute UMAP
compute   the pictures and scores of every layer, and the report
story     what is said and shown
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from hiddenscope.interface import SEED, SITES, STACK_POOL, TRUNCATE, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        EachToken,
        Method,
        ModelLike,
        Pair,
        Pictures,
        Pooling,
        Readable,
        Result,
        SitePatterns,
    )


@analysis(
    states=True,
    details="Prints the findings. --out panels.html keeps the pictures: by PCA at"
    " once, then by the method asked for. With --states, DATA has the labels of the"
    " texts that the states were made of.",
    action="Project the states",
    promise="You will see one panel for every layer, in which each dot is a text in"
    " the colour of its label, and how far the labels are apart.",
)
def project(
    source: "ModelLike | Sequence[ModelLike] | Readable | Pair | EachToken",
    data: Annotated[
        Any,
        ask(
            "A shipped dataset such as cities-incomplete, a file, or several to"
            " compare.",
            kind="data",
            label="Dataset",
            form_help="",
            empty_choice="",
        ),
    ] = None,
    *,
    method: Annotated[
        "Method | Pictures",
        ask("How pictures are made.", choices=("umap", "pca", "pacmap", "tsne")),
    ] = "umap",
    pool: Annotated["Pooling | None", STACK_POOL] = None,
    sites: Annotated["SitePatterns", SITES] = "layer.*,final",
    seed: Annotated[int, SEED] = 0,
    truncate: Annotated[bool, TRUNCATE] = False,
) -> "Result":
    """Draw one picture for each layer, and measure whether it tells the truth.

    With a model, or a list of models, `data` is a dataset: a shipped name, a path, a
    frame, `(texts, labels)`, or what `hs.read` gave; or a mapping of names to several
    datasets, to compare them. With states, it is a list of labels, one for each text or
    for each token, or a dataset of the same texts. Texts are taken as
    independent unless the data have groups (`hs.read(..., group=)`). `pool` is what
    stands for a text: if not given, the last token in a decoder, and in an encoder the
    mean or what the model was trained for. With `hs.each_token(source)` every token is
    a point. `hs.Pictures` has more options.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[5, 6], [5, 7], [8, 6], [8, 7]]
    >>> states = hs.load((tiny_model("gpt2"), None)).capture(texts)
    >>> result = hs.project(states, ["a", "a", "b", "b"], method="pca")
    >>> dict(result.data["x"].sizes), result.facts["parts"][0]["classes"]
    ({'site': 5, 'text': 4}, [{'label': 'a', 'points': 2}, {'label': 'b', 'points': 2}])
    """
    from hiddenscope.analyses.project.compute import draw_texts

    return draw_texts(source, data, method, pool, sites, int(seed), truncate)

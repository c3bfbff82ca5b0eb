"""Which features of a dictionary act, where, and how much of the states do they say?

compute  what a dictionary and its baselines say of states, of the loss and of labels
story    what is said and shown
"""

from typing import TYPE_CHECKING, Annotated, Any

from hiddenscope.interface import TEXTS, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Dictionary,
        Inputs,
        ModelLike,
        Readable,
        Result,
        Texts,
    )


@analysis(
    states=True,
    action="Find the features",
    promise="You will see the strongest features on every token, and how much of the"
    " states they say beside neurons, principal components and random directions.",
)
def features(
    source: "ModelLike | Readable",
    texts: Annotated["Texts | Inputs | None", TEXTS] = None,
    dictionary: Annotated[
        "Dictionary | str",
        ask(
            "The path of a dictionary; or neurons, pca or random.",
            kind="dictionary",
            choices=("neurons", "pca", "random"),
            spelling=("--dictionary",),
        ),
    ] = "pca",
    *,
    site: Annotated[
        str | None,
        ask("Where it lies, if it does not say so: layer.3, layer.3.mlp.", "sites"),
    ] = None,
    data: Annotated[
        Any,
        ask(
            "Texts with two labels: how well does a single feature tell them apart?",
            kind="data",
            in_form=False,
        ),
    ] = None,
    k: Annotated[
        int, ask("How many features of each token are kept.", spelling=("-k",))
    ] = 8,
) -> "Result":
    """Measure which features act, and what they say beside simpler directions.

    `dictionary` is a `Dictionary`, the path of one, or a word: "neurons" are those of
    the layer of `site`, "pca" 32 principal components of these states, and "random" is
    drawn. `site` is where it lies, if it does not say so. What it leaves of the states
    is measured beside principal components and random directions with as many active
    numbers, and beside neurons at an MLP; these are fitted to the other half of the
    texts. First tokens and massive states, longer than 4 times the median, are left
    out. With a model, the reconstruction is also put in the place of the states, and
    the loss compared with that of the mean state. `data` are texts with two labels, or
    the labels of stored states: one feature is selected on half of them, and scored on
    the other.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> texts = [[k, k + 1, 5, 6, k] for k in range(10, 30)]
    >>> result = hs.features(model, texts, "random", site="layer.2")
    >>> result.facts["features"], result.facts["active"]["value"]
    (512, 32.0)
    """
    from hiddenscope.analyses.features.compute import measure_features

    return measure_features(source, texts, dictionary, site, data, k)

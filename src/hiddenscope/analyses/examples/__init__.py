"""Which tokens of a corpus excite a direction?

readings   directions as what reads the states of a site
kinds      the kinds of tokens that a direction prefers, with intervals
compute    the labelled arrays and the report
story      what is said and shown
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from hiddenscope.interface import TEXTS, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Directions,
        Inputs,
        ModelLike,
        Pair,
        Readable,
        Result,
        Texts,
    )


@analysis(
    states=True,
    promise="You will see the tokens that excite a neuron most, others from every"
    " quarter of its activations, and some at random.",
)
def examples(
    source: "ModelLike | Readable | Pair",
    directions: Annotated[
        "Directions",
        ask(
            "A neuron, such as layer.3.mlp.neuron.7.",
            kind="sites",
            spelling=("--direction",),
            label="Neuron",
        ),
    ],
    texts: Annotated["Texts | Inputs | None", TEXTS] = None,
    *,
    features: Annotated[
        Sequence[int] | int | None,
        ask(
            kind="numbers",
            python_only="`--direction PATH:17` chooses a feature of a dictionary.",
            in_form=False,
        ),
    ] = None,
    k: Annotated[
        int, ask("How many of the strongest.", spelling=("-k",), label="How many")
    ] = 10,
    threshold: Annotated[
        float,
        ask(
            kind="numbers",
            python_only="`hs.examples(..., threshold=2.0)`.",
            in_form=False,
        ),
    ] = 0.0,
) -> "Result":
    """Find the tokens of a corpus that excite directions, and show them in context.

    `directions` are a `Direction`, a fitted probe, a `Dictionary` (all its features, or
    `features`), the name of a neuron, or a list of these. Each is read at its own site,
    thousands in one pass over a store, over states, or over what a model computes of
    `texts`. Beside the k strongest tokens stand some from each quarter of the
    activations and some at random: the strongest say little about the rest. First
    tokens are left out, and states that are longer than 4 times the median: they would
    be the strongest of nearly every direction.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> states = hs.load((tiny_model("gpt2"), None)).capture([[5, 6, 7], [8, 9]])
    >>> direction = hs.Direction.of(states["layer.2"][4], sites="layer.2")
    >>> result = hs.examples(states, direction, k=1)
    >>> result.data["string"].values[0, 0], result.facts["tokens"]
    ('9', 3)
    """
    from hiddenscope.analyses.examples.compute import find_examples

    return find_examples(source, directions, texts, features, k, threshold)

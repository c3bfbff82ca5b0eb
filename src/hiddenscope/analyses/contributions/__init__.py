"""Which parts write the answer?

question    the text and the tokens of the answers, as token ids
final_norm  the final norm with its scale frozen, found by its behaviour
parts       what every head, MLP, neuron and bias adds to the logit
compute     the parts as labelled arrays, and the report
story       what is said and shown
"""

from typing import TYPE_CHECKING, Annotated

from hiddenscope.interface import CAUSAL, HEAD, TARGETS, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        AnswerTokens,
        Direction,
        Inputs,
        ModelLike,
        Result,
        Texts,
    )


@analysis(
    needs=(HEAD, CAUSAL),
    verb="split the logits of",
    directed="answer",
    details="Prints the strongest parts; --out contributions.html keeps the picture,"
    " .csv the numbers.",
)
def contributions(
    model: "ModelLike",
    text: Annotated[
        "Texts | Inputs",
        ask(
            "The text that the answer follows; @FILE reads it from a file.",
            kind="text",
            form_help="",
        ),
    ],
    answer: Annotated[
        "AnswerTokens | Direction",
        ask(
            "What the text goes on with, with its leading space: ' Paris'; or"
            " feature:PATH:17, of the dictionary at PATH.",
            spelling=("--answer",),
            label="Answer, with the space",
            form_help="",
        ),
    ],
    other: Annotated[
        "AnswerTokens | None",
        ask(
            "An answer to compare with: ' Berlin'.",
            spelling=("--other",),
            label="Another answer",
        ),
    ] = None,
    *,
    neurons: Annotated[
        int,
        ask("How many of the strongest neurons are listed.", least=0, aside=True),
    ] = 20,
    targets: Annotated["Texts | None", TARGETS] = None,
) -> "Result":
    """Split the logit of an answer into what each part of the model adds to it.

    The parts are the embeddings, every head, every MLP and the biases. The scale of the
    final norm is frozen at its value in this text, so that the parts sum to the logit;
    the sum is checked. With `other`, they sum to the difference of the two logits. An
    answer of several tokens is taken token by token, each after those before it; two
    answers are compared at the first token that differs. The strongest `neurons` are
    listed too. `targets` is the decoder's text before the answer, in an
    encoder-decoder. With a direction at a layer as `answer`, such as a feature, the
    parts below that layer sum to the product of the last token's state with it.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> result = hs.contributions(model, [5, 6, 7], answer=11, other=12)
    >>> dict(result.data["attn_head"].sizes)
    {'step': 1, 'layer': 3, 'head': 4}
    >>> abs(float(result.data["error"].item())) < 1e-4
    True
    """
    from hiddenscope.analyses.contributions.compute import list_parts

    return list_parts(model, text, answer, other, neurons=neurons, targets=targets)

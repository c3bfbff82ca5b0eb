"""Which tokens does each head read?

selection  the attentions, heads and queries that are asked for
compute    the weights of a text as labelled arrays, and the report
relations  what the tests look for on random tokens, and how sure they are
story      what is said and shown
"""

from typing import TYPE_CHECKING, Annotated

from hiddenscope.interface import SEED, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Inputs,
        Layers,
        ModelLike,
        NumberChoice,
        Result,
        Texts,
    )


@analysis(
    details="Prints the heads that the tests found. --out attention.html keeps the"
    " patterns of all heads, .nc the numbers.",
)
def attention(
    model: "ModelLike",
    text: Annotated[
        "Texts | Inputs",
        ask(
            "The text; @FILE reads it from a file.",
            kind="text",
            encoded=True,
            form_help="",
            of_model=True,
        ),
    ],
    layers: Annotated[
        "Layers | None",
        ask(
            "Which layers: 3, 2-4, 1,5, or sites such as decoder.layer.2-4.cross.",
            spelling=("--layers",),
        ),
    ] = None,
    heads: Annotated[
        "NumberChoice | None",
        ask("Which heads, counted from 0: 5, 0-3, 1,7.", spelling=("--heads",)),
    ] = None,
    queries: Annotated[
        "NumberChoice | None",
        ask(
            "The positions of the tokens that read: 7, 0-3, -1 for the last.",
            spelling=("--queries",),
            aside=True,
        ),
    ] = None,
    *,
    draws: Annotated[
        int,
        ask(
            "Texts of random tokens that heads are tested on; 0 for no test.",
            least=0,
            aside=True,
        ),
    ] = 16,
    seed: Annotated[int, SEED] = 0,
) -> "Result":
    """Compute the attention weights of one text, and test what each head reads.

    The pass keeps the model's own kernel. Weights are computed from its queries, keys,
    mask and scale, for the `layers`, `heads` and `queries` (positions of the tokens
    that read) that are asked for; by default all of the last stack's self-attention.
    `layers` are numbers or sites such as "decoder.layer.2-4.cross". `weighted` is each
    weight times the norm of what the token writes through the head.

    Every head is tested on `draws` texts of random tokens, for how much it reads the
    previous, the first and the same token, and the token that came after an earlier
    occurrence of the same token (induction). The tests are corrected for all heads.
    `draws=0` makes none. A decoder's text comes with `model.encode(text, targets=...)`.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> result = hs.attention(model, [[5, 6, 7]], layers=2, draws=0)
    >>> pattern = result.data["pattern"].sel(layer=2, head=1)
    >>> pattern.sum("key").round(4).values.tolist()
    [1.0, 1.0, 1.0]
    """
    from hiddenscope.analyses.attention.compute import read_heads

    return read_heads(model, text, layers, heads, queries, draws=draws, seed=seed)

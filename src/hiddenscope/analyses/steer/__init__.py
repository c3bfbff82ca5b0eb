"""Can a direction change what the model writes, and what does that cost?

steered         a direction in one model: which vector is added where
sweep           what the model gives to some tokens, steered at one site after another
continuations   what it writes after the prompts
compute         the labelled arrays, and the report
story           what is said and shown
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from hiddenscope.interface import (
    HEAD,
    POOL_BY_STACK,
    SITES,
    STACK_POOL,
    TEXTS,
    Parameter,
    analysis,
    ask,
)
from hiddenscope.states.pooling import CHOICES

if TYPE_CHECKING:
    from hiddenscope.annotations import Direction, Inputs, ModelLike, Result, Texts

TOWARD = Parameter(
    "toward",
    "texts",
    "A text, @FILE, or with --data a label, to steer to; or feature:PATH:17 alone.",
    required=True,
    positional=True,
    spelling=("--toward",),
    repeated=True,
    label="Toward these texts",
    form_help="",
)
# The parameters of `Direction.between`, after its model. Its module imports torch, so
# they stand here.
DIRECTION = (
    TOWARD,
    replace(
        TOWARD,
        name="away",
        help="A text, @FILE, or with --data a label, to steer away from.",
        spelling=("--away",),
        label="Away from these texts",
    ),
    replace(SITES, help="Which states, one at a time; ten layers if not given."),
    replace(
        STACK_POOL,
        help=f"Which states of a text make its direction: {CHOICES}; if not given,"
        f" {POOL_BY_STACK}.",
        aside=True,
    ),
    Parameter(
        "upwards",
        "flag",
        "In every layer above each site too.",
        default=False,
        spelling=("--upwards",),
    ),
    Parameter(
        "spare_first",
        "flag",
        "Take the first tokens' mean state out of the direction.",
        default=False,
        spelling=("--spare-first",),
    ),
)


@analysis(
    needs=(HEAD,),
    verb="steer",
    changes=True,
    details="Prints what moves and what it costs, and the texts before and after;"
    " --out steer.html keeps the pictures.",
)
def steer(
    model: "ModelLike",
    prompts: Annotated["Texts | Inputs", TEXTS],
    direction: Annotated[
        "Direction",
        ask(
            "A direction between two sets of texts.",
            kind="direction",
            fields=DIRECTION,
            constructor="Direction.between",
            takes_model=True,
        ),
    ],
    *,
    strengths: Annotated[
        Sequence[float] | float | Literal["ablate"],
        ask("Multiples of the difference, a comma list: -1,1,2.", kind="numbers"),
    ] = (-1.0, -0.5, -0.2, 0.0, 0.2, 0.5, 1.0),
    answers: Annotated[
        str | int | Sequence[str | int] | None,
        ask(
            "A token to look at, with its space: ' Paris'.",
            kind="texts",
            spelling=("--answer",),
            repeated=True,
            form_help="",
        ),
    ] = None,
    quality: Annotated[
        "Texts | Inputs | None",
        ask(
            kind="texts",
            python_only="`hiddenscope steer` reads the texts of --quality from a file.",
            python_default=("--quality", "plain"),
            aside=True,
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        ask(
            "How many tokens are written; 0 for none.",
            least=0,
            label="Tokens to write",
        ),
    ] = None,
) -> "Result":
    """Steer a model along a direction: what it answers, what it writes, what it costs.

    The direction is added to the state of every token, `strengths` times; with
    `strengths="ablate"` it is projected out. `answers` are the tokens to look at, the
    model's most likely ones if not given; a direction towards the first should raise
    it. `quality` are the texts that the perplexity is measured on, 40 plain sentences
    if not given. Prompts are taken as independent unless `hs.read(..., group=)` says
    which belong together, and so are these texts. `new_tokens` are written after each
    prompt.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> direction = hs.Direction.between(model, [[5, 6]], [[7, 8]])
    >>> quality = [[9, 8, 7, 6]]
    >>> prompts = [[5, 6, 7]]
    >>> result = hs.steer(model, prompts, direction, answers=[3, 4], quality=quality)
    >>> dict(result.data["probability"].sizes)
    {'site': 3, 'strength': 7, 'text': 1, 'answer': 2}
    """
    from hiddenscope.analyses.steer.compute import steer_prompts

    return steer_prompts(
        model, prompts, direction, strengths, answers, quality, new_tokens
    )

"""What can be asked of `steer`."""

from hiddenscope.interface.parameters import (
    POOL_BY_STACK,
    Description,
    Parameter,
    pooling,
    sites,
    texts,
)
from hiddenscope.states.pooling import CHOICES, NAMES

# The parameters of `Direction.between`, after its model.
DIRECTION = (
    Parameter(
        "toward",
        "texts",
        "A text, @FILE, or with --data a label, to steer to.",
        required=True,
        positional=True,
        spelling=("--toward",),
        repeated=True,
        label="Toward these texts",
        form_help="",
    ),
    Parameter(
        "away",
        "texts",
        "A text, @FILE, or with --data a label, to steer away from.",
        required=True,
        positional=True,
        spelling=("--away",),
        repeated=True,
        label="Away from these texts",
        form_help="",
    ),
    sites(None, "Which states, one at a time; ten layers if not given."),
    pooling(
        NAMES,
        f"Which states of a text make its direction: {CHOICES}; if not given,"
        f" {POOL_BY_STACK}.",
        empty_choice=POOL_BY_STACK,
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

DESCRIPTION = Description(
    (
        texts("prompts"),
        Parameter(
            "direction",
            "direction",
            "A direction between two sets of texts.",
            required=True,
            positional=True,
            fields=DIRECTION,
            constructor="Direction.between",
            takes_model=True,
        ),
        Parameter(
            "strengths",
            "numbers",
            "Multiples of the difference, a comma list: -1,1,2.",
            default=(-2.0, -1.0, 0.0, 1.0, 2.0),
            choices=("ablate",),
        ),
        Parameter(
            "answers",
            "texts",
            "A token to look at, with its space: ' Paris'.",
            spelling=("--answer",),
            repeated=True,
            form_help="",
        ),
        Parameter(
            "quality",
            "texts",
            python_only="`hiddenscope steer` reads the texts of --quality from a file.",
            python_default=("--quality", "plain"),
            aside=True,
        ),
        Parameter(
            "new_tokens",
            "integer",
            "How many tokens are written; 0 for none.",
            least=0,
            label="Tokens to write",
        ),
    ),
    verb_if_head_needed="steer",
    summary="Change what the model answers and writes along the difference of two sets"
    " of texts.",
    details="Prints what moves and what it costs, and the texts before and after;"
    " --out steer.html keeps the pictures.",
)

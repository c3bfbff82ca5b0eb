"""What can be asked of `contributions`."""

from hiddenscope.interface.parameters import TARGETS, Description, Parameter

DESCRIPTION = Description(
    (
        Parameter(
            "text",
            "text",
            "The text that the answer follows; @FILE reads it from a file.",
            required=True,
            positional=True,
            form_help="",
        ),
        Parameter(
            "answer",
            "word",
            "What the text goes on with, with its leading space: ' Paris'.",
            required=True,
            positional=True,
            spelling=("--answer",),
            label="Answer, with the space",
            form_help="",
        ),
        Parameter(
            "other",
            "word",
            "An answer to compare with: ' Berlin'.",
            positional=True,
            spelling=("--other",),
            label="Another answer",
        ),
        Parameter(
            "neurons",
            "integer",
            "How many of the strongest neurons are listed.",
            default=20,
            least=0,
            aside=True,
        ),
        TARGETS,
    ),
    verb_if_head_needed="split the logits of",
    summary="Show what each head and MLP adds to the logit of an answer.",
    details="Prints the strongest parts; --out contributions.html keeps the picture,"
    " .csv the numbers.",
)

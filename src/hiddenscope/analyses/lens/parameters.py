"""What can be asked of `lens`."""

from hiddenscope.catalog.parameters import (
    TARGETS,
    Description,
    Parameter,
    sites,
    texts,
)

DESCRIPTION = Description(
    (
        texts(),
        Parameter(
            "k",
            "integer",
            "How many top tokens for each layer and position.",
            default=5,
            spelling=("-k",),
            label="How many",
        ),
        Parameter(
            "target",
            "word",
            "A token to follow (' Paris'), or `next` for the true next token.",
            aside=True,
        ),
        Parameter(
            "lens",
            "word",
            "logit, or the path of a lens that was fitted.",
            default="logit",
            in_form=False,
        ),
        sites("layer.*"),
        TARGETS,
    ),
    verb_if_head_needed="read with a lens",
    summary="Show what each layer would predict, if it were the last.",
    details="Prints the top tokens after the last token, layer by layer; --out"
    " lens.html keeps the whole grid, .csv the numbers.",
)

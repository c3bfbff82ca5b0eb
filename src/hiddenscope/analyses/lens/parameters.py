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
        texts("text"),
        Parameter(
            "k",
            "integer",
            "How many words of each layer and token.",
            default=5,
            spelling=("-k",),
            label="How many",
        ),
        Parameter(
            "target",
            "word",
            "One token to follow (' Paris'), or next: the true next.",
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
    needs_head="read with a lens",
    summary="Show what each layer would predict, if it were the last.",
    details="Prints the top tokens after the last token, layer by layer; --out"
    " lens.html keeps the whole grid, .csv the numbers.",
)

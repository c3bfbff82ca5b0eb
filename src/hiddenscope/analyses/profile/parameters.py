"""What can be asked of `profile`."""

from hiddenscope.interface.parameters import (
    TARGETS,
    TRUNCATE,
    Description,
    Parameter,
    sites,
    texts,
)

DESCRIPTION = Description(
    (
        texts(required=False),
        sites(),
        Parameter(
            "final_norm",
            "choice",
            "apart: raw layers only; everywhere: each through the final norm;"
            " mixed: as they are.",
            default="apart",
            choices=("apart", "everywhere", "mixed"),
            aside=True,
        ),
        Parameter(
            "sample",
            "integer",
            "At most so many tokens for neighbours and CKA.",
            default=1000,
            least=3,
            aside=True,
        ),
        TARGETS,
        TRUNCATE,
    ),
    states=True,
    promise="You will see how large the states of every layer are, how they spread,"
    " and how alike layers are.",
)

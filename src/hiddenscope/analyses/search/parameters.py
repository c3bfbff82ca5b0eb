"""What can be asked of `search`."""

from hiddenscope.interface.parameters import (
    SITE,
    Description,
    Parameter,
    pooling,
    texts,
)
from hiddenscope.states.pooling import CHOICES, NAMES

ONLY_FILES = "`hiddenscope search` searches a file."

DESCRIPTION = Description(
    (
        texts("query", python_only=ONLY_FILES),
        Parameter(
            "k",
            "integer",
            "How many of the nearest.",
            default=10,
            positional=True,
            spelling=("-k",),
            label="How many",
        ),
        Parameter("texts", "texts", python_only=ONLY_FILES),
        SITE,
        pooling(NAMES, f"What stands for a text: {CHOICES}."),
        Parameter(
            "nearness",
            "choice",
            "How near two vectors are.",
            default="cosine",
            choices=("cosine", "dot", "l2"),
        ),
    ),
    details="Prints them, the nearest first; --out found.html keeps the picture, .csv"
    " the numbers. Queries are read by the model that states were made with, if no"
    " other way to load the same model is given.",
)

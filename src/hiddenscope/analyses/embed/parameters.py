"""What can be asked of `embed`."""

from hiddenscope.catalog.parameters import (
    SITE,
    TRUNCATE,
    Description,
    Parameter,
    pooling,
    texts,
)
from hiddenscope.states.pooling import CHOICES, NAMES

DESCRIPTION = Description(
    (
        texts(),
        SITE,
        pooling(NAMES, f"What stands for a text: {CHOICES}."),
        Parameter("normalize", "flag", "Scale every vector to norm 1.", default=True),
        Parameter(
            "adjust",
            "choice",
            "centre or whiten the vectors.",
            choices=("centre", "whiten"),
        ),
        TRUNCATE,
    ),
    details="--out vectors.npy, .safetensors or .csv keeps them, one row for each text"
    " in the order given.",
)

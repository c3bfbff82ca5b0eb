"""What can be asked of `embed`."""

from hiddenscope.catalog.parameters import (
    POOL,
    SITE,
    TRUNCATE,
    Description,
    Parameter,
    texts,
)

DESCRIPTION = Description(
    (
        texts(),
        SITE,
        POOL,
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

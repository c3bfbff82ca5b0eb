"""What can be asked of `cluster`."""

from hiddenscope.interface.parameters import (
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
        texts(
            help="The texts; @FILE reads texts, states (.safetensors) or vectors"
            " (.npy), - reads lines of stdin.",
            required=False,
            vectors=True,
        ),
        SITE,
        pooling(NAMES, f"What stands for a text: {CHOICES}."),
        Parameter(
            "smallest",
            "integer",
            "The least texts that make a cluster.",
            default=5,
            least=2,
            aside=True,
        ),
        TRUNCATE,
    ),
    states=True,
    details="Prints every cluster with its most typical texts; --out clusters.html"
    " keeps the picture, .csv the numbers. States (--states) and vectors (@FILE.npy)"
    " need no model.",
    promise="You will see which texts lie together, the texts most typical of each"
    " cluster, and how stable each is.",
)

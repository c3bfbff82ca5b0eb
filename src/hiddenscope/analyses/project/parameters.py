"""What can be asked of `project`."""

from hiddenscope.interface.parameters import (
    POOL_BY_STACK,
    TRUNCATE,
    Description,
    Parameter,
    data,
    pooling,
    seed,
    sites,
)
from hiddenscope.states.pooling import CHOICES, NAMES

DESCRIPTION = Description(
    (
        data(
            "A shipped dataset such as cities-incomplete, a file, or several to"
            " compare.",
            required=False,
        ),
        Parameter(
            "method",
            "choice",
            "How pictures are made.",
            default="umap",
            choices=("umap", "pca", "pacmap", "tsne"),
        ),
        pooling(
            NAMES,
            f"What stands for a text: {CHOICES}; if not given, {POOL_BY_STACK}.",
            empty_choice=POOL_BY_STACK,
            aside=False,
        ),
        sites(),
        seed(),
        TRUNCATE,
    ),
    states=True,
    details="Prints the findings. --out panels.html keeps the pictures: by PCA at"
    " once, then by the method asked for. With --states, DATA has the labels of the"
    " texts that the states were made of.",
    action="Project the states",
    promise="You will see one panel for every layer, in which each dot is a text in"
    " the colour of its label, and how far the labels are apart.",
)

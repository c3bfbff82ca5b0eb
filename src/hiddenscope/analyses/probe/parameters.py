"""What can be asked of `probe`."""

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
            "A shipped dataset, a file, - for stdin; or position, word-start,"
            " previous-token with --each-token."
        ),
        Parameter(
            "task",
            "choice",
            "Classes, or numbers.",
            default="classify",
            choices=("classify", "regress"),
        ),
        pooling(
            NAMES,
            f"What stands for a text: {CHOICES}; if not given, {POOL_BY_STACK}.",
            empty_choice=POOL_BY_STACK,
            aside=False,
        ),
        sites(),
        seed("The seed of the folds and of the control labels."),
        TRUNCATE,
    ),
    states=True,
    details="Prints the findings. --out probe.html keeps the pictures, probe.nc the"
    " probes. With --states, DATA has the labels of the texts that the states were"
    " made of.",
    action="Probe the labels",
    promise="You will see, layer by layer, how well a linear probe reads the label"
    " from the states, and what chance would give.",
)

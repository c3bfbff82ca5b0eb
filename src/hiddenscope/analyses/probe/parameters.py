"""What can be asked of `probe`."""

from hiddenscope.catalog.parameters import (
    TOKEN,
    TRUNCATE,
    Description,
    Parameter,
    data,
    seed,
    sites,
)

DESCRIPTION = Description(
    (
        data(
            "A shipped dataset, a file, - for stdin; or position, word-start,"
            " previous-token with --token each."
        ),
        Parameter(
            "task",
            "choice",
            "Classes, or numbers.",
            default="classify",
            choices=("classify", "regress"),
        ),
        TOKEN,
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

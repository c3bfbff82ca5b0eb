"""What can be asked of `compare`."""

from dataclasses import replace

from hiddenscope.interface.parameters import (
    TARGETS,
    TRUNCATE,
    Description,
    Parameter,
    sites,
)

DESCRIPTION = Description(
    (
        Parameter(
            "a",
            "text",
            "A text; @FILE reads it from a file.",
            required=True,
            positional=True,
            label="Text A",
            form_help="",
        ),
        Parameter(
            "b",
            "text",
            "The text that it is compared with.",
            positional=True,
            label="Text B",
            form_help="",
        ),
        Parameter(
            "other",
            "model",
            "Compare the one text in this model too.",
            label="Second model",
        ),
        sites(),
        replace(TARGETS, spelling=("--target", "--targets")),
        TRUNCATE,
    )
)

"""What can be asked of `attention`."""

from hiddenscope.interface.parameters import Description, Parameter, seed

DESCRIPTION = Description(
    (
        Parameter(
            "text",
            "text",
            "The text; @FILE reads it from a file.",
            required=True,
            positional=True,
            encoded=True,
            form_help="",
            of_model=True,
        ),
        Parameter(
            "layers",
            "word",
            "Which layers: 3, 2-4, 1,5, or sites such as decoder.layer.2-4.cross.",
            positional=True,
            spelling=("--layers",),
        ),
        Parameter(
            "heads",
            "word",
            "Which heads, counted from 0: 5, 0-3, 1,7.",
            positional=True,
            spelling=("--heads",),
        ),
        Parameter(
            "queries",
            "word",
            "The positions of the tokens that read: 7, 0-3, -1 for the last.",
            positional=True,
            spelling=("--queries",),
            aside=True,
        ),
        Parameter(
            "draws",
            "integer",
            "Texts of random tokens that heads are tested on; 0 for no test.",
            default=16,
            least=0,
            aside=True,
        ),
        seed(),
    ),
    details="Prints the heads that the tests found. --out attention.html keeps the"
    " patterns of all heads, .nc the numbers.",
)

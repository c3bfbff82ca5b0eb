"""What can be asked of `drift`."""

from hiddenscope.interface.parameters import (
    TEXTS_HELP,
    Description,
    Parameter,
    sites,
    texts,
)

DESCRIPTION = Description(
    (
        Parameter(
            "candidate",
            "model",
            "What is tested: a zoo name, a Hugging Face id, a folder, a .gguf file, or"
            " states that `capture` or `extract` wrote.",
            required=True,
            positional=True,
        ),
        texts(
            help=f"{TEXTS_HELP} Saved states come with theirs.",
            required=False,
            explicit=True,
        ),
        sites(),
        Parameter(
            "pairing",
            "word",
            in_form=False,
            python_only="A pairing of modules has many parts.",
        ),
        Parameter(
            "baseline",
            "path",
            "A file of accepted errors; it is written where there is none.",
            in_form=False,
        ),
        Parameter(
            "low_memory",
            "flag",
            "Run both in step, with two layers' states in memory.",
            default=False,
            spelling=("--low-memory",),
            aside=True,
        ),
    ),
    summary="Find where a candidate diverges from --model, whether that is more than"
    " rounding, and which module does it.",
    details="--dtype and --device set both sides, --candidate-dtype and"
    " --candidate-device the candidate alone. --candidate-quantise int8 asks what"
    " quantisation costs, layer by layer.\n\nExits with 1 when there is drift,"
    " also where quantisation or an adapter explains it (--baseline accepts it), with 0"
    " when there is none, with 2 on failure. --out drift.html keeps the pictures.",
    promise="You will see where the states of the two models part, whether that is"
    " more than rounding, and which module is at fault.",
)

"""What can be asked of `patch`."""

from hiddenscope.interface.parameters import Description, Parameter, sites

# The fields of `Contrast`.
CONTRAST = (
    Parameter(
        "clean",
        "text",
        "A prompt that the model continues with the answer.",
        required=True,
        positional=True,
        label="Clean prompt",
        form_help="",
    ),
    Parameter(
        "corrupt",
        "text",
        "A prompt that it continues with the other answer.",
        required=True,
        positional=True,
        label="Corrupt prompt",
        form_help="",
    ),
    Parameter(
        "answer",
        "word",
        "One token, with its leading space: ' Paris'.",
        required=True,
        positional=True,
        spelling=("--answer",),
        label="Its answer, with the space",
        form_help="",
    ),
    Parameter(
        "other",
        "word",
        "The answer to the corrupt prompt: ' Berlin'.",
        required=True,
        positional=True,
        spelling=("--other",),
        label="The other answer",
        form_help="",
    ),
    Parameter(
        "targets",
        "text",
        "The decoder's text, in an encoder-decoder.",
        spelling=("--target",),
    ),
    Parameter(
        "at",
        "integer",
        "The position at which the answer is read; the last if not given.",
        least=None,
    ),
)

DESCRIPTION = Description(
    (
        Parameter(
            "contrasts",
            "contrast",
            "Two prompts that differ in what matters, and the two answers that tell"
            " them apart.",
            required=True,
            positional=True,
            fields=CONTRAST,
            constructor="Contrast",
            label="Contrast",
        ),
        sites("layer.*"),
        Parameter(
            "into",
            "choice",
            "The run that states of the other one are put into.",
            default="corrupt",
            choices=("corrupt", "clean"),
        ),
        Parameter(
            "window",
            "integer",
            "How many tokens are exchanged at a time: one if not given, and all of a"
            " head or neuron.",
            aside=True,
        ),
        Parameter(
            "layers",
            "integer",
            "How many layers in a row, where whole layers are.",
            least=0,
            aside=True,
        ),
        Parameter(
            "method",
            "choice",
            "A pass for each state, an estimate by one gradient, or both; or ablate the"
            " clean run with zeros, means or the corrupt run.",
            default="exact",
            choices=("exact", "attribution", "both", "zero", "mean", "resample"),
        ),
    ),
    verb_if_head_needed="patch",
    summary="Put each state of one run into another and see how much of the answer it"
    " carries.",
    details="Prints where the answer is carried; --out patch.html keeps the picture,"
    " .csv the numbers.",
)

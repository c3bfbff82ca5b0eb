"""What can be asked of `visibility`."""

from hiddenscope.interface.parameters import Description, Parameter, seed, sites, texts

# The fields of `Sampling`.
SAMPLING = (
    Parameter(
        "per_text",
        "integer",
        "Of several texts: how many states of each are drawn.",
        default=16,
        aside=True,
    ),
    Parameter(
        "align",
        "choice",
        "Average several texts by distance, or whole maps by position.",
        default="distance",
        choices=("distance", "position"),
        aside=True,
    ),
    Parameter(
        "baseline",
        "choice",
        "Of several texts: compare with random weights.",
        choices=("random",),
        aside=True,
    ),
    Parameter(
        "probes",
        "integer",
        "Random vectors that estimate a Frobenius norm.",
        least=2,
        aside=True,
    ),
)

DESCRIPTION = Description(
    (
        texts(encoded=True),
        Parameter(
            "influence",
            "choice",
            "How influence is measured.",
            default="l1",
            choices=("l1", "frobenius", "relative", "logit"),
        ),
        sites(),
        Parameter(
            "target",
            "word",
            "With logit: the token, in place of the true next one.",
            aside=True,
        ),
        Parameter(
            "sampling",
            "sampling",
            "What is computed of each text, and how texts are averaged.",
            fields=SAMPLING,
            constructor="Sampling",
            aside=True,
        ),
        seed(),
    )
)

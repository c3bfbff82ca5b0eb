"""What can be asked of `visibility`."""

from hiddenscope.catalog.parameters import Description, Parameter, seed, sites, texts

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
            "probes",
            "integer",
            "Random vectors that estimate a Frobenius norm.",
            aside=True,
        ),
        Parameter(
            "target",
            "word",
            "With logit: the token, in place of the true next one.",
            aside=True,
        ),
        seed(),
    )
)

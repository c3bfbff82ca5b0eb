"""Which public names may still change.

Every name that is not in `PROVISIONAL` is stable. docs/stability.md says what that
promises, and its table is written from here by `make docs`.
"""

PROVISIONAL = {
    "Adjustment": "how vectors are adjusted for comparison may get other fields",
    "Corpus": "belongs to `ExtractJob`",
    "Engine": "another cluster may need another protocol",
    "ExtractJob": "the parts of a job were named for one engine and Ray alone",
    "Lens": "a fitted lens may be saved in another layout",
    "Member": "belongs to `series`",
    "Pictures": "other methods of projection may need other options",
    "Sampling": "belongs to `visibility`",
    "cluster": "its choice of the number of clusters is young",
    "graft": "its scores have been tried on few pairs of models",
    "search": "how sources are named may change",
    "series": "it has been tried on few families of models",
    "steer": "its measures of cost have been tried on few models",
    "story": "the parts of a page of several results may get other names",
    "visibility": "its averages over many texts are young",
}
"""Public names and commands that may change in any version, and why."""


def is_provisional(name: str) -> bool:
    """Tell whether a public name may change in any version.

    >>> is_provisional("load"), is_provisional("graft")
    (False, True)
    """
    return name in PROVISIONAL

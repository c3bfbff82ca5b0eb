"""Independence: what an analysis takes for granted about its texts, and whether that is
plausible.
"""

from hiddenscope.results import Facts
from hiddenscope.views.drawing import quoted

MANY = 0.1  # the share of texts that nearly repeat another from which on it is told
SHOWN = 60  # characters of an example


def independence(facts: Facts, of: str = "") -> str:
    """Say that texts or groups are taken as independent, and when near duplicates make
    that implausible.

    >>> independence({"groups_given": True, "groups": 10})
    'The 10 groups of texts are taken as independent of one another, and each is kept together.'
    """
    alike = facts.get("near_duplicates")
    if facts.get("groups_given"):
        unit = (
            f"The {facts['groups']:,} groups of texts{of} are taken as independent of"
            " one another"
        )
        sentence = f"{unit}, and each is kept together."
    elif facts.get("groups", 0) < facts.get("texts", 0):
        sentence = (
            f"Texts{of} that differ in case, white space and punctuation alone are kept"
            f" together ({facts['groups']:,} groups); these are taken as independent of"
            " one another, since no other groups were given."
        )
    else:
        sentence = (
            f"The texts{of} are taken as independent of one another, since no groups"
            " were given."
        )
    if alike is None or alike["texts"] < MANY * alike["of"]:
        return sentence
    one, other = (quoted(_short(text)) for text in alike["example"])
    where = "a text of another group" if facts.get("groups_given") else "another"
    return (
        f"{sentence} That is doubtful: {alike['texts']:,} of {alike['of']:,} texts"
        f" nearly repeat {where}, such as {one} and {other}. Put such texts into one"
        " group: otherwise p-values can come out too small, intervals too narrow, and"
        " accuracies below chance."
    )


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"

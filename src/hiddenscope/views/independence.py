"""Independence: what an analysis takes for granted about its texts, and whether that is
plausible.
"""

from hiddenscope.results import Facts
from hiddenscope.views.sentences import quote, shortened

# From this share of texts that nearly repeat another on, a finding says so.
MANY = 0.1
# An example is cut here, in characters.
SHOWN = 60


def independence(facts: Facts, of: str = "") -> str:
    """Say that texts or groups are taken as independent, and when near duplicates or a
    drift along their order make that implausible.

    >>> print(independence({}))
    The texts are taken as independent of one another, since no groups were given.
    """
    groups_given = facts.get("groups_given")
    if groups_given:
        sentence = (
            f"The {facts['groups']:,} groups of texts{of} are taken as independent of"
            " one another, and each is kept together."
        )
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
    serial = facts.get("serial_inflation")
    if serial is not None:
        sentence += (
            " That is doubtful: labels and states both drift along the order of the"
            " texts, and what drifts goes together by chance (labels shifted along the"
            f" order explain {serial:.1f} times as much as permuted ones). So permuted"
            " labels are no comparison, and fresh texts may be read much worse. Put"
            " texts that follow one another, such as those of one document or day, into"
            " one group."
        )
    near = facts.get("near_duplicates")
    if near is None or near["texts"] < MANY * near["of"]:
        return sentence
    text, other = (quote(shortened(text, SHOWN)) for text in near["example"])
    repeated = "a text of another group" if groups_given else "another"
    return (
        f"{sentence} That is doubtful: {near['texts']:,} of {near['of']:,} texts"
        f" nearly repeat {repeated}, such as {text} and {other}. Put such texts into"
        " one group: otherwise p-values can come out too small, intervals too narrow,"
        " and accuracies below chance."
    )

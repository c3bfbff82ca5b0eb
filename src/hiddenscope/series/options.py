"""What a series can run, and the options of each analysis. This imports no torch."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from hiddenscope.arguments import shown
from hiddenscope.errors import ArgumentError

SeriesAnalysis: TypeAlias = Literal[
    "profile", "compare", "lens", "probe", "project", "drift"
]
AgainstMember: TypeAlias = Literal["first", "previous"]

OPTIONS: dict[str, tuple[str, ...]] = {
    "profile": ("sites", "final_norm", "sample", "targets", "truncate"),
    "compare": ("sites", "targets", "truncate", "directions"),
    "lens": ("sites", "k", "target", "targets"),
    "probe": ("sites", "task", "pool", "seed"),
    "project": ("sites", "method", "pool", "seed", "truncate"),
    "drift": ("sites",),
}
"""The analyses that a series can run, and the options of each."""

LABELLED = ("probe", "project")
PAIRED = ("compare", "drift")

PLAIN_OPTION = str | int | float | bool | None


def check_options(analysis: str, options: Mapping[str, Any]) -> None:
    """Refuse an analysis that a series cannot run, and options that it has not.

    >>> check_options("lens", {"layers": 3})
    Traceback (most recent call last):
    hiddenscope.errors.ArgumentError: No option 'layers' in a series of lens: it has sites, k, target, targets. Choose one of these.
    """  # noqa: E501
    if analysis not in OPTIONS:
        raise ArgumentError(
            f"Cannot run a series of {shown(analysis)}",
            f"a series runs {', '.join(OPTIONS)}",
            "Choose one of these.",
        )
    known = OPTIONS[analysis]
    for name, value in options.items():
        if name not in known:
            raise ArgumentError(
                f"No option {shown(name)} in a series of {analysis}",
                f"it has {', '.join(known)}",
                "Choose one of these.",
            )
        values = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(part, PLAIN_OPTION) for part in values):
            raise ArgumentError(
                f"Cannot use the option {name} in a series",
                f"it is {shown(value)}, which cannot be written down for a later job",
                "Give text or numbers.",
            )

"""The story of examples: what excites each direction, beside what does not."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from hiddenscope.results import (
    Explanation,
    Listing,
    Report,
    Result,
    Section,
    Table,
    frozen,
)
from hiddenscope.results.pictures import Grid, Measure, Words
from hiddenscope.results.sentences import (
    UNPROVED,
    UNTESTED,
    capitalised,
    counted,
    number,
    quoted_token,
)
from hiddenscope.results.story import table_of

# Directions that the table has at most; the data have all.
MOST_LISTED = 50
# Columns of a picture on either side of the example, which has room on a narrow page.
BEFORE, AFTER = 5, 3
# Tokens on either side of an example that the data have.
AROUND = 8


@frozen
class PreferredKind:
    """A kind of token that is strong more often than others, with its interval.

    `share` is that of its tokens which are strong, `others` that of all other tokens,
    and `low` to `high` the interval of the difference.
    """

    token: str = ""
    id: int
    tokens: int
    share: float
    others: float
    low: float
    high: float


@frozen
class DirectionRecord:
    """What was found of one direction.

    `massive` is how many tokens were left out at its site besides the first ones, and
    `copies` how many of the strongest are in a context that is shown already.
    """

    name: str
    site: str
    sparse: bool
    share: float
    massive: int = 0
    copies: int = 0
    strongest: str | None = None
    activation: float
    prefers: list[PreferredKind]


@frozen
class ExamplesReport(Report):
    """What was looked at, and what excites the first directions."""

    texts: int
    groups: int
    tokens: int
    first_left_out: int
    sampled: int
    threshold: float
    directions: int
    believed: bool = False
    listed: list[DirectionRecord]


def story(report: ExamplesReport, result: Result) -> Iterator[Section]:
    """Yield a table of all directions, and the examples of the first few."""
    general: tuple[str, ...] = (
        f"{counted(report.directions, 'direction')} looked up in"
        f" {counted(report.tokens, 'token')} of {counted(report.texts, 'text')};"
        f" {counted(report.first_left_out, 'first token')} left out.",
        Explanation(
            "A token is strong if it is active and among the strongest 5% of"
            f" {counted(report.sampled, 'sampled token')}. Half of the texts propose"
            " kinds of tokens, and the intervals are from the other half; they hold for"
            " all tested kinds and directions together."
        ),
        UNTESTED,
        *([UNPROVED] if report.believed else ()),
    )
    if report.directions > 1:
        yield Section(
            "What excites each direction",
            general,
            reading="The table has the share of tokens in which each direction is"
            " active, and the token in which it is strongest.",
            tables=tuple(_overview(report, result)),
        )
        general = ()
    for place, record in enumerate(report.listed):
        grid, listing = _shown(result, place, record)
        yield Section(
            f"What excites {record.name}",
            (*_findings(record, report), *general),
            (grid,),
            "Each row is an example, with the token itself in the middle and the tokens"
            " around it. The colour is the activation of the direction in each token."
            " Beside the strongest stand tokens from each quarter of"
            f" {'the active ones' if record.sparse else 'all'}, and some at random.",
            tables=(listing, table_of(listing)),
        )
        general = ()


def _findings(record: DirectionRecord, report: ExamplesReport) -> Iterator[str]:
    """Yield what excites one direction, how often it is active, and what it prefers."""
    # The name of a site stays as it is.
    name = record.name if "." in record.name else capitalised(record.name)
    level = number(report.threshold)
    if record.strongest is None:
        yield f"{name} is never above {level} at {record.site}."
        return
    yield (
        f"{name} is strongest at {quoted_token(record.strongest)}, with"
        f" {number(record.activation)} at {record.site}, and above {level} in"
        f" {record.share:.1%} of {counted(report.tokens - record.massive, 'token')}."
    )
    if record.massive:
        yield Explanation(
            f"{counted(record.massive, 'massive token')} left out as well: there the"
            " state is longer than 4 times the median."
        )
    if record.copies:
        yield (
            f"{counted(record.copies, 'token')} among its strongest left out, in the"
            " same context as one that is shown."
        )
    for kind in record.prefers:
        yield (
            f"It prefers {quoted_token(kind.token)}: {kind.share:.0%} of"
            f" {counted(kind.tokens, 'such token')} are strong, and"
            f" {kind.others:.1%} of all others (a difference of"
            f" {100 * kind.low:.0f} to {100 * kind.high:.0f} percentage points, 95%"
            " interval over texts)."
        )
    if not record.prefers:
        yield Explanation("No kind of token is shown to be preferred.")
    if not record.sparse:
        yield Explanation(
            f"The direction is linear: {level} is where its product with the state"
            " changes sign, or where a probe decides, and no threshold that it learned."
        )


def _overview(report: ExamplesReport, result: Result) -> Iterator[Listing | Table]:
    data = result.data.isel(direction=slice(MOST_LISTED))
    rows = zip(
        data["direction"].to_numpy().tolist(),
        data["site"].to_numpy().tolist(),
        data["share"].to_numpy().tolist(),
        data["activation"].to_numpy()[:, 0].tolist(),
        map(str, data["string"].to_numpy()[:, 0].tolist()),
        strict=True,
    )
    note = ""
    if report.directions > MOST_LISTED:
        note = f"The first {MOST_LISTED:,} of {report.directions:,}."
    columns = ("direction", "site", "share", "strongest", "token")
    listing = Listing("All directions", columns, tuple(rows), bar="share", note=note)
    yield listing
    yield table_of(listing)


def _shown(result: Result, place: int, record: DirectionRecord) -> tuple[Grid, Listing]:
    """Draw the examples one below another, the strongest on top, and list them in
    their contexts, which a narrow page shows too.
    """
    data = result.data.isel(direction=place, told=place)
    offsets, windows = data["offset"].to_numpy(), data["window"].to_numpy()
    kinds = data["kind"].to_numpy().tolist()
    known = np.flatnonzero(data["number"].to_numpy() >= 0)
    labels, rows = [], []
    for row in known.tolist():
        labels.append(f"{kinds[row]}, {kinds[: row + 1].count(kinds[row])}")
        words = windows[row].tolist()
        token = words[AROUND].strip() or words[AROUND]
        words[AROUND] = words[AROUND].replace(token, f"«{token}»")
        where = f"text {int(data['text'][row])}, token {int(data['position'][row])}"
        value = float(data["activation"][row])
        rows.append((labels[-1], value, where, "".join(words)))
    title = f"Examples of {record.name}"
    near = (offsets >= -BEFORE) & (offsets <= AFTER)
    cells = np.ix_(known[::-1], near)
    meaning: Any = "sequential" if record.sparse else "diverging"
    grid = Grid(
        title,
        tuple(labels[::-1]),
        tuple(f"{offset:+d}" for offset in offsets[near]),
        (Measure("activation", data["heat"].to_numpy()[cells], meaning=meaning),),
        words=Words.of(windows[cells][:, :, None]),
        x_name="tokens from the example",
        y_name="example",
    )
    columns = ("example", "activation", "where", "in context")
    return grid, Listing(f"{title} in context", columns, tuple(rows))

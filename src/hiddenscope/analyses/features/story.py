"""The story of features: which act, what they say, and beside what."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Listing, Report, Result, Section, frozen
from hiddenscope.results.drawing import grid_of
from hiddenscope.results.pictures import Lines, Series
from hiddenscope.results.report import Estimate
from hiddenscope.results.sentences import (
    UNPROVED,
    UNTESTED,
    counted,
    estimated,
    in_series,
    quoted_token,
    quoted_tokens,
)
from hiddenscope.results.story import table_of

# What is compared, as titles and sentences name it.
MEASURES = {
    "unexplained": "Share of the variance left unexplained",
    "recovered": "Share of the loss recovered",
    "divergence": "KL divergence of predictions, in nats",
    "auroc": "AUROC of the best single number on texts it was not selected on",
}


@frozen
class Score(Estimate):
    """A number of one way to say states; `gap` is how far the dictionary is above it.

    `number` is that of the single feature, neuron or direction that tells labels apart,
    and `larger` the label for which it is larger.
    """

    way: str
    gap: Estimate | None = None
    number: int | None = None
    larger: str | None = None


@frozen
class Comparison:
    """One measure of the dictionary, which is the first, and of what it is held to."""

    measure: str
    scores: list[Score]


@frozen
class Feature:
    """On how many tokens a feature acts, what it writes there on average, and the words
    that its direction would predict.
    """

    feature: int
    tokens: int
    written: float
    words: list[str]


@frozen
class FeaturesReport(Report):
    """Which features act, and what they say of states and of the loss.

    `massive` is how many tokens were left out besides the first ones. `losses` are as
    the model is, with the mean in the place of the states, and their difference.
    `believed`: the dictionary is from a file, and was not proved. `best` is the reading
    of its file that leaves least, if it is another.
    """

    site: str
    reads: str
    features: int
    texts: int
    tokens: int
    massive: int = 0
    silent: int
    active: Estimate
    believed: bool = False
    best: str = ""
    proved: float | None = None
    losses: list[Estimate]
    comparisons: list[Comparison]
    strongest: list[Feature]
    notes: list[str]


def story(report: FeaturesReport, result: Result) -> Iterator[Section]:
    """Yield the strongest features, and what they say beside simpler directions."""
    rows = []
    for feature in report.strongest:
        words = " ".join(quoted_tokens(feature.words))
        share = feature.tokens / report.tokens
        rows.append((f"{feature.feature}", share, feature.written, words))
    columns = "feature", "acts on this share", "writes there", "words"
    listing = Listing("Features that write most", columns, tuple(rows), columns[1])
    title = f"The strongest features of each token at {report.site}"
    grid = grid_of(result, ["unexplained", "active"], title)
    assert grid is not None, "it has a measure"
    yield Section(
        f"Features of {report.site}",
        tuple(_acting(report)),
        (grid,),
        "Each cell names the strongest features of a token by their numbers, with the"
        " share of each in what all of them write; first tokens and massive ones are"
        " left out. The list has those that write most over all tokens, and the words"
        " that their direction itself would predict at the last layer. Some of many"
        " features look meaningful by chance: nothing was tested here, and hs.examples"
        " shows where one acts.",
        tables=(listing, table_of(listing)),
    )
    views, values = [], []
    for comparison in report.comparisons:
        title, scores = MEASURES[comparison.measure], comparison.scores
        ends = np.array([(s.value, s.low, s.high) for s in scores], dtype=np.float32)
        value, low, high = ends.T
        bars = Series(title, value, low, high, "95% interval", "bar")
        names = tuple(score.way for score in scores)
        views.append(Lines(title, names, (bars,), "", title))
        for score in scores:
            values.append((title, score.way, estimated(score, ".3f")))
    table = Listing(
        "Beside simpler directions", ("measure", "way", "value"), tuple(values)
    )
    yield Section(
        "Beside neurons, principal components and random directions",
        tuple(_compared(report)),
        tuple(views),
        "Every way uses as many active numbers a token as the dictionary, and is fitted"
        " to the half of the texts that it is not scored on. Unexplained is the sum of"
        " squared errors over that of squared distances from the mean. Recovered is 1"
        " where the reconstruction in place of the states leaves the loss as it is, and"
        " 0 where it is that of the mean state. The intervals of one measure hold"
        " together, with 95%.",
        tables=(table, table_of(table)),
    )


def _acting(report: FeaturesReport) -> Iterator[str]:
    """Yield how many features act, and how many are silent."""
    if report.believed:
        yield UNPROVED
    read = "" if report.reads == report.site else f", read at {report.reads}"
    left_out = "first tokens"
    if report.massive:
        left_out += f" and {counted(report.massive, 'massive one')}"
    yield (
        f"Of {counted(report.features, 'feature')} at {report.site}{read},"
        f" {estimated(report.active, '.1f')} act on a token, over"
        f" {counted(report.tokens, 'token')} of {counted(report.texts, 'text')};"
        f" {left_out} are left out."
    )
    if report.silent:
        act = "acts" if report.silent == 1 else "act"
        yield (
            f"{report.silent:,} {act} on none of these tokens"
            f" ({report.silent / report.features:.0%}); other texts may wake some."
        )
    if report.proved is not None:
        yield (
            "Its file was tried on the texts of its proof: as it states it, it left"
            f" {report.proved:.1%} of the variance there unexplained."
        )
    if report.best:
        yield f"The best other reading of its file: {report.best}."


def _compared(report: FeaturesReport) -> Iterator[str]:
    """Yield every measure of every way, and where the dictionary is shown to differ."""
    if report.losses:
        whole, ablated, raised = report.losses
        yield (
            f"The loss is {estimated(whole, '.3f')} nats a token as it is, and"
            f" {estimated(ablated, '.3f')} with the mean state in the place of every"
            " one that counts."
        )
        if raised.side <= 0:
            yield "That was not shown to raise the loss, so none can be recovered."
    untested = False
    for comparison in report.comparisons:
        scores = comparison.scores
        untested = untested or scores[0].low is None
        parts = [f"{score.way} {estimated(score, '.3f')}" for score in scores]
        yield f"{MEASURES[comparison.measure]}: {'; '.join(parts)}."
        gaps = []
        for score in scores:
            if score.gap is not None and score.gap.low is not None:
                sides = "not shown to differ from", "more than", "less than"
                # What rounds to nothing is no difference.
                side = sides[score.gap.side * bool(round(score.gap.value, 3))]
                gap = estimated(score.gap, "+.3f")
                gaps.append(f"{side} that of {score.way}, by {gap}")
        if gaps:
            yield f"That of the dictionary is {in_series(gaps)}."
        best = scores[0]
        if best.larger is not None and best.low is not None:
            verb = "tells" if best.low > 0.5 else "is not shown to tell"
            yield (
                f"Of its features, number {best.number} {verb} the labels apart, larger"
                f" for {quoted_token(best.larger)}, with an AUROC of"
                f" {estimated(best, '.2f')} on the half of the texts that it was not"
                " selected on."
            )
    if untested:
        yield f"There are no intervals: they need eight groups of texts. {UNTESTED}"
    yield from report.notes

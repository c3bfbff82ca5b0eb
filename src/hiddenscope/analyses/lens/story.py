"""The story of a lens: what every layer would predict, and how predictions form."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from hiddenscope.results import Aside, Report, Result, Section, Table, frozen
from hiddenscope.results.drawing import grid_of, labels, long_name
from hiddenscope.results.pictures import Lines, Measure, Series
from hiddenscope.results.sentences import (
    UNTESTED,
    capitalised,
    counted,
    in_series,
    model_name,
    quoted_token,
    quoted_tokens,
)
from hiddenscope.sites import Site

PARTS = (
    " What a part of a block adds, such as a head, is read by itself. The final norm"
    " makes every state equally large, so that a part that writes very little shows a"
    " prediction as clear as any: hs.contributions tells how much a part adds."
)
OUTLINE = (
    "An outline marks the layer from which every layer predicts the same token as the"
    " last one."
)
DIRECTION = (
    "The direction, and its opposite, each go through the model's own final norm and"
    " unembedding, as if it were a whole state. The norm makes every state equally"
    " large, so that a probability does not say how strongly the direction acts."
)
SHARES = ("agreement", "settled_share", "accuracy")
MEASURES = ("entropy", "kl", "target_probability", "target_rank")
LENSES = {
    "logit": (
        "Every hidden state goes through the model's own final norm and unembedding, as"
        " if its layer were the last."
    ),
    "tuned": (
        "Every hidden state goes through a linear map that was fitted for its layer,"
        " then through the model's own final norm and unembedding."
    ),
    "jacobian": (
        "Every hidden state goes through the mean Jacobian of the last layer with"
        " respect to its own, then through the model's own final norm and unembedding."
    ),
}


@frozen
class LastToken:
    """What the model predicts after the last token of a single text."""

    token: str
    answer: str
    answer_id: int
    probability: float
    settled_from: str | None


@frozen
class Accuracy:
    """How often the last site predicts the true next token."""

    tokens: int
    site: str
    value: float
    half_from: str | None


@frozen
class TargetRank:
    """Where the target comes up after the last token of a single text."""

    token: str
    id: int | None
    site: str
    rank: int
    probability: float
    first_best_at: str | None
    first_in_top_k_at: str | None
    k: int
    most_probable_at: str | None
    # Older results have the place alone.
    highest_probability: float | None = None


@frozen
class MedianRank:
    """Where the target comes up over all tokens that have one."""

    token: str
    id: int | None
    site: str
    tokens: int
    median_rank: float


@frozen
class LogitRecipe:
    """How the logits were computed."""

    vocabulary: int
    method: str
    transform: str
    constant: float | None


@frozen
class LensReport(Report):
    """What each layer would predict."""

    lens: Literal["logit", "tuned", "jacobian"]
    texts: int
    tokens: int
    causal: bool
    # Results that were saved before parts could be read say nothing of them.
    parts: bool | None = None
    settled_known_from: str | None
    half_settled_from: str | None
    last_token: LastToken | None = None
    accuracy: Accuracy | None = None
    target: TargetRank | MedianRank | None = None
    # Not told of a direction.
    unembedding: LogitRecipe | None = None
    notes: list[str]
    # What was read in place of texts, by its title.
    direction: str = ""


def story(report: LensReport, result: Result) -> Iterator[Section]:
    """Yield what a direction writes, or what every layer predicts."""
    if report.direction:
        yield _words_section(report, result)
    else:
        yield from _predictions(report, result)


def _predictions(report: LensReport, result: Result) -> Iterator[Section]:
    """Yield the grid with what it shows, then how predictions form along the layers."""
    data, model, sites = result.data, model_name(result), labels(result.data, "site")
    lens = "" if report.lens == "logit" else f", by the {report.lens} lens"
    noun = "site" if report.parts else "layer"
    grid = grid_of(
        result,
        [name for name in MEASURES if name in data],
        f"What each {noun} of {model} would predict{lens}",
    )
    assert grid is not None, "every lens has an entropy"
    where = "next" if report.causal else "in this place"
    parts = PARTS if report.parts else ""
    # Grids show only so many tokens. Rank 0 is the top token.
    probability = result.data["probability"].to_numpy()[:, : len(grid.tokens), 0]
    top = Measure("probability of the top token", probability, limits=(0, 1))
    words, note = grid.words, grid.note
    # A grid compares its rows with the top one. That must be the model's own
    # prediction, and no layer above the lowest row may be left out.
    is_whole = report.settled_known_from == grid.sites[0]
    top_is_answer = result.data["agreement"].to_numpy()[-1] == 1
    if words is not None and is_whole and top_is_answer:
        words = replace(words, framed=True)
        # A note about outlines would only confuse where no prediction is settled.
        if any(row >= 0 for row in words.settled_rows()):
            note = f"{note} {OUTLINE}".strip()
    yield Section(
        "What would each layer predict?",
        tuple(_findings(report)),
        (replace(grid, measures=(top, *grid.measures), words=words, note=note),),
        f"{LENSES[report.lens]} A cell shows the token that this layer would predict"
        f" {where}, coloured first by the probability of that token. Other measures,"
        f" such as the entropy, can be chosen above the grid.{parts}",
        tables=(_table(result),) if report.texts == 1 else (),
    )
    shares = [data[name] for name in SHARES if name in data]
    right = " and is right" if "accuracy" in data else ""
    lines = [
        Lines(
            f"How often each {noun} of {model} agrees with the model's own"
            f" prediction{right}{lens}",
            sites,
            tuple(Series(long_name(share), share.to_numpy()) for share in shares),
            y_name="share of tokens",
        ),
        Lines(
            f"How far each {noun} of {model} is from the model's own prediction{lens}",
            sites,
            (Series("mean over tokens", data["kl_mean"].to_numpy()),),
            y_name="KL divergence",
            unit="nats",
            scale="log",
        ),
    ]
    rank = ""
    if isinstance(report.target, TargetRank):
        name = report.target.token
        ranks = data["target_rank"].to_numpy()[:, -1]
        rank = " The last shows the rank of the target."
        lines.append(
            Lines(
                f"The rank of {name} after the last token, in {model}{lens}",
                sites,
                (Series("rank", ranks),),
                y_name="rank, 1 is best",
                scale="log",
            )
        )
    meanings = ["how often the top token of a layer is the model's own prediction"]
    if "settled_share" in data:
        meanings.append("how often it is so and stays so in all layers above (settled)")
    if "accuracy" in data:
        meanings.append("how often it is the true next token")
    yield Section(
        "How predictions form along the layers",
        views=tuple(lines),
        reading=f"The first picture shows {in_series(meanings)}. The next shows the KL"
        " divergence of each layer's prediction from the model's own, which is 0 at the"
        f" last layer.{rank}",
        folded=True,
    )


def _words_section(report: LensReport, result: Result) -> Section:
    """Show the words of a direction and of its opposite."""
    title = f"The words that {report.direction} writes in {model_name(result)}"
    grid = grid_of(result, (), title)
    assert grid is not None, "every lens has words"
    sentences = []
    for site in labels(result.data, "site"):
        along, against = result.data["word"].sel(site=site).to_numpy().tolist()
        sentences.append(
            f"{capitalised(report.direction)} at {site} writes"
            f" {in_series(quoted_tokens(along))}, and its opposite"
            f" {in_series(quoted_tokens(against))}."
        )
    return Section(
        "Which words does the direction write?",
        tuple(sentences),
        (grid,),
        DIRECTION,
    )


def _findings(report: LensReport) -> Iterator[str]:
    """Yield the answer and where it is settled, how often layers are right, where the
    target comes up, and notes.
    """
    # The target is kept as the token's repr: its quotation marks are exchanged for
    # typographic ones.
    target = report.target
    name = target.token[1:-1] if target else ""
    last = report.last_token
    answer, target_name = quoted_tokens([last.answer if last else "", name])
    if last:
        place = "After" if report.causal else "In the place of"
        settled = ""
        if last.settled_from:
            settled = f", which is the top token from {last.settled_from} on"
        yield (
            f"{place} {quoted_token(last.token)} the model predicts {answer} with"
            f" probability {last.probability:.2f}{settled}."
        )
    # All layers above are needed to know where a prediction is settled.
    known = report.settled_known_from
    if known is None and report.parts:
        yield (
            "From which layer on a prediction stays the same is told by whole layers"
            " alone, not by parts."
        )
    elif known is None:
        yield (
            "From which layer on a prediction stays the same is not known, because"
            " layers above these were left out."
        )
    elif not known.endswith("layer.0"):
        yield (
            f"Whether a prediction stays the same is known from {known} on, because"
            " layers below were left out."
        )
    if report.half_settled_from:
        yield (
            "At half of the tokens the prediction no longer changes from"
            f" {report.half_settled_from} on."
        )
    accuracy = report.accuracy
    if accuracy:
        half = ""
        if accuracy.half_from:
            half = f"; layers from {accuracy.half_from} on reach at least half of that"
        yield Aside(
            f"{accuracy.site} predicts the true next token for {accuracy.value:.0%} of"
            f" {counted(accuracy.tokens, 'token')}{half}."
        )
    if isinstance(target, MedianRank):
        yield (
            f"{capitalised(target.token)} has a median rank of"
            f" {target.median_rank:,g} at {target.site}, over"
            f" {counted(target.tokens, 'token')}."
        )
    elif target:
        name = target.token if target.id is None else target_name
        # The last of some parts is no more than the others.
        if not Site.parse(target.site).part:
            yield (
                f"At {target.site}, {name} has rank {target.rank:,} and probability"
                f" {target.probability:.2g}."
            )
        best, highest = target.most_probable_at, target.highest_probability
        if best and highest is not None and Site.parse(best).part:
            yield (
                f"Among these sites, {best} gives {name} the highest"
                f" probability, {highest:.2g}."
            )
        if target.first_best_at:
            best = target.first_best_at
            yield f"{name} is the top token for the first time at {best}."
        elif target.first_in_top_k_at:
            yield (
                f"{name} is among the top {target.k} tokens for the first time at"
                f" {target.first_in_top_k_at}."
            )
    yield Aside(
        f"Measured with the {report.lens} lens on"
        f" {counted(report.texts, 'text')}, {counted(report.tokens, 'token')}."
    )
    yield from map(Aside, report.notes)
    yield UNTESTED


def _table(result: Result) -> Table:
    """Return what every layer predicts after the last token."""
    last = result.data.isel(token=-1)
    rows = []
    for site in labels(last, "site"):
        here = last.sel(site=site)
        words = zip(here["word"].values, here["probability"].values, strict=True)
        top = "  ".join(f"{word!r} {probability:.2f}" for word, probability in words)
        rows.append([site, f"{here['entropy']:.2f}", f"{here['kl']:.2f}", top])
    return Table(["site", "entropy", "KL", "top tokens"], rows, text_columns=(0, 3))

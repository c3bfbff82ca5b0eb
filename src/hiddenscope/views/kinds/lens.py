"""The lens: the grid of top tokens, and how predictions develop along the layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from hiddenscope.results import Result, Table
from hiddenscope.sites import Site
from hiddenscope.views.drawing import grid_of, labels, long_name, of_type
from hiddenscope.views.sentences import (
    UNTESTED,
    as_prose,
    capitalised,
    counted,
    in_series,
    model_name,
    quoted_token,
    quoted_tokens,
)
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

if TYPE_CHECKING:
    from hiddenscope.analyses.lens.facts import LensFacts

PARTS = (
    " What a part of a block adds, such as a head, is read by itself. The final norm"
    " makes every state equally large, so that a part that writes very little shows a"
    " prediction as clear as any: hs.contributions tells how much a part adds."
)
OUTLINE = (
    "An outline marks the layer from which every layer predicts the same token as the"
    " last one."
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


def views(result: Result) -> Iterator[View]:
    """Yield the grid of top tokens; how often layers are right; how far they are from
    the model's own prediction.
    """
    facts, data = cast("LensFacts", result.facts), result.data
    model, sites = model_name(result), labels(data, "site")
    lens = "" if facts["lens"] == "logit" else f", by the {facts['lens']} lens"
    noun = "site" if facts.get("parts") else "layer"
    grid = grid_of(
        result,
        [name for name in MEASURES if name in data],
        f"What each {noun} of {model} would predict{lens}",
    )
    if grid is not None:
        yield _with_outlines(result, grid)
    shares = [data[name] for name in SHARES if name in data]
    right = " and is right" if "accuracy" in data else ""
    yield Lines(
        f"How often each {noun} of {model} agrees with the model's own"
        f" prediction{right}{lens}",
        sites,
        tuple(Series(long_name(share), share.to_numpy()) for share in shares),
        y_name="share of tokens",
    )
    yield Lines(
        f"How far each {noun} of {model} is from the model's own prediction{lens}",
        sites,
        (Series("mean over tokens", data["kl_mean"].to_numpy()),),
        y_name="KL divergence",
        unit="nats",
        scale="log",
    )
    target = facts.get("target")
    if target and "rank" in target:
        yield Lines(
            f"The rank of {target['token']} after the last token, in {model}{lens}",
            sites,
            (Series("rank", data["target_rank"].to_numpy()[:, -1]),),
            y_name="rank, 1 is best",
            scale="log",
        )


def _with_outlines(result: Result, grid: Grid) -> Grid:
    """Return the grid coloured by the probability of the top token, with an outline
    where a prediction is settled.
    """
    # Grids show at most MOST_TOKENS. Rank 0 is the top token.
    probability = result.data["probability"].to_numpy()[:, : len(grid.tokens), 0]
    top = Measure("probability of the top token", probability, limits=(0, 1))
    words, note = grid.words, grid.note
    if words is not None and _shows_settled(result, grid):
        words = replace(words, framed=True)
        # A note about outlines would only confuse where no prediction is settled.
        if any(row >= 0 for row in words.settled_rows()):
            note = f"{note} {OUTLINE}".strip()
    return replace(grid, measures=(top, *grid.measures), words=words, note=note)


def _shows_settled(result: Result, grid: Grid) -> bool:
    """Check that the rows of a grid tell where predictions are settled.

    A grid compares its rows with the top one. That must be the model's own prediction,
    and no layer above the lowest row may be left out.
    """
    known_from = cast("LensFacts", result.facts)["settled_known_from"]
    top_agreement = result.data["agreement"].to_numpy()[-1]
    return known_from == grid.sites[0] and bool(top_agreement == 1)


def findings(result: Result) -> Iterator[str]:
    """Yield the answer and where it is settled, how often layers are right, where the
    target comes up, and notes.
    """
    facts = cast("LensFacts", result.facts)
    yield from _answers(facts)
    accuracy = facts.get("accuracy")
    if accuracy:
        half = ""
        if accuracy["half_from"]:
            site = accuracy["half_from"]
            half = f"; layers from {site} on reach at least half of that"
        yield (
            f"{accuracy['site']} predicts the true next token for"
            f" {accuracy['value']:.0%} of {counted(accuracy['tokens'], 'token')}{half}."
        )
    yield from _target(facts)
    yield (
        f"Measured with the {facts['lens']} lens on"
        f" {counted(facts['texts'], 'text')}, {counted(facts['tokens'], 'token')}."
    )
    yield from facts["notes"]
    yield UNTESTED


def sections(result: Result) -> Iterator[Section]:
    """Yield the grid with what it shows, then how predictions form along the layers."""
    facts, shown = cast("LensFacts", result.facts), tuple(views(result))
    where = "next" if _is_causal(facts) else "in this place"
    parts = PARTS if facts.get("parts") else ""
    yield Section(
        "What would each layer predict?",
        as_prose([*_answers(facts), *_target(facts), UNTESTED]),
        of_type(shown, Grid),
        f"{LENSES[facts['lens']]} A cell shows the token that this layer would predict"
        f" {where}, coloured first by the probability of that token. Other measures,"
        f" such as the entropy, can be chosen above the grid.{parts}",
    )
    shares = ["how often the top token of a layer is the model's own prediction"]
    if "settled_share" in result.data:
        shares.append("how often it is so and stays so in all layers above (settled)")
    if "accuracy" in result.data:
        shares.append("how often it is the true next token")
    lines = of_type(shown, Lines)
    rank = " The last shows the rank of the target." if len(lines) > 2 else ""
    yield Section(
        "How predictions form along the layers",
        "",
        lines,
        f"The first picture shows {in_series(shares)}. The next shows the KL divergence"
        " of each layer's prediction from the model's own, which is 0 at the last"
        f" layer.{rank}",
        folded=True,
    )


def tables(result: Result) -> Iterator[Table]:
    """Yield what every layer predicts after the last token of a single text."""
    if result.facts["texts"] != 1:
        return
    last = result.data.isel(token=-1)
    rows = []
    for site in labels(last, "site"):
        here = last.sel(site=site)
        words = zip(here["word"].values, here["probability"].values, strict=True)
        top = "  ".join(f"{word!r} {probability:.2f}" for word, probability in words)
        rows.append([site, f"{here['entropy']:.2f}", f"{here['kl']:.2f}", top])
    yield Table(["site", "entropy", "KL", "top tokens"], rows, text_columns=(0, 3))


def _is_causal(facts: "LensFacts") -> bool:
    """Tell whether the model predicts the token that follows, and not the one in its
    place.
    """
    return facts.get("causal", True)


def _answers(facts: "LensFacts") -> Iterator[str]:
    """Yield what the model predicts after the last token, and where predictions are
    settled.
    """
    last = facts.get("last_token")
    if last:
        place = "After" if _is_causal(facts) else "In the place of"
        settled = ""
        if last["settled_from"]:
            settled = f", which is the top token from {last['settled_from']} on"
        yield (
            f"{place} {quoted_token(last['token'])} the model predicts"
            f" {_answer_and_target(facts)[0]} with probability"
            f" {last['probability']:.2f}{settled}."
        )
    # A prediction is settled only if no layer above differs, so all of them are needed.
    known = facts["settled_known_from"]
    if known is None and facts.get("parts"):
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
    if facts["half_settled_from"]:
        yield (
            "At half of the tokens the prediction no longer changes from"
            f" {facts['half_settled_from']} on."
        )


def _answer_and_target(facts: "LensFacts") -> list[str]:
    """Quote the answer after the last token and the target, so that they differ."""
    answer = facts.get("last_token", {}).get("answer", "")
    # The fact is the token's repr, also in results that were saved earlier: its
    # quotation marks are exchanged for typographic ones.
    target = facts.get("target", {}).get("token", "")[1:-1]
    return quoted_tokens([str(answer), target])


def _target(facts: "LensFacts") -> Iterator[str]:
    """Yield where the target comes up."""
    target = facts.get("target")
    if not target:
        return
    name = target["token"]
    if "median_rank" in target:
        yield (
            f"{capitalised(name)} has a median rank of {target['median_rank']:,g} at"
            f" {target['site']}, over {counted(target['tokens'], 'token')}."
        )
        return
    if target["id"] is not None:
        _, name = _answer_and_target(facts)
    # The last of some parts is no more than the others.
    if not Site.parse(target["site"]).part:
        yield (
            f"At {target['site']}, {name} has rank {target['rank']:,} and probability"
            f" {target['probability']:.2g}."
        )
    best = target["most_probable_at"]
    if best and "highest_probability" in target and Site.parse(best).part:
        yield (
            f"Among these sites, {best} gives {name} the highest"
            f" probability, {target['highest_probability']:.2g}."
        )
    if target["first_best_at"]:
        yield (
            f"{name} is the top token for the first time at {target['first_best_at']}."
        )
    elif target["first_in_top_k_at"]:
        yield (
            f"{name} is among the top {target['k']} tokens for the first time at"
            f" {target['first_in_top_k_at']}."
        )

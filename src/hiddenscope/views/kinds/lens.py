"""What each layer would predict: the grid of top tokens, and how predictions develop
along the layers.
"""

from collections.abc import Iterator
from dataclasses import replace

from hiddenscope.results import Facts, Result, Table
from hiddenscope.views.drawing import (
    UNTESTED,
    as_prose,
    grid_of,
    in_series,
    labels,
    quoted,
)
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

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
    """Every cell with its top token; how often layers are right; how far they are from
    the model's own prediction.
    """
    data, model = result.data, str(result.source.get("model", "the model"))
    lens = (
        ""
        if result.facts["lens"] == "logit"
        else f", by the {result.facts['lens']} lens"
    )
    title = f"What each layer of {model} would predict{lens}"
    grid = grid_of(result, [name for name in MEASURES if name in data], title)
    if grid is not None:
        probability = data["probability"].to_numpy()[:, : len(grid.tokens), 0]
        best = Measure("probability of the top token", probability, limits=(0, 1))
        words = None if grid.words is None else replace(grid.words, framed=True)
        outlined = words is not None and any(row >= 0 for row in words.settled_rows())
        note = f"{grid.note} {OUTLINE if outlined else ''}".strip()
        yield replace(grid, measures=(best, *grid.measures), words=words, note=note)
    sites = labels(data, "site")
    shares = (data[name] for name in SHARES if name in data)
    series = tuple(
        Series(share.attrs["long_name"], share.to_numpy()) for share in shares
    )
    right = " and is right" if "accuracy" in data else ""
    title = (
        f"How often each layer of {model} agrees with the model's own"
        f" prediction{right}{lens}"
    )
    yield Lines(title, sites, series, y_name="share of tokens")
    mean = (Series("mean over tokens", data["kl_mean"].to_numpy()),)
    title = f"How far each layer of {model} is from the model's own prediction{lens}"
    yield Lines(title, sites, mean, y_name="KL divergence", unit="nats", scale="log")
    target = result.facts.get("target")
    if target and "rank" in target:
        ranks = (Series("rank", data["target_rank"].to_numpy()[:, -1]),)
        title = f"The rank of {target['token']} after the last token, in {model}{lens}"
        yield Lines(title, sites, ranks, y_name="rank, 1 is best", scale="log")


def findings(result: Result) -> Iterator[str]:
    """The answer and where it is settled, how often layers are right, where the target
    comes up, and notes.
    """
    facts = result.facts
    yield from _answers(facts)
    if accuracy := facts.get("accuracy"):
        half = (
            f"; layers from {accuracy['half_from']} on reach at least half of that"
            if accuracy["half_from"]
            else ""
        )
        yield (
            f"{accuracy['site']} predicts the true next token for"
            f" {accuracy['value']:.0%} of {accuracy['tokens']} tokens{half}."
        )
    yield from _target(facts)
    texts = f"{facts['texts']} text{'s' * (facts['texts'] != 1)}"
    yield (
        f"Measured with the {facts['lens']} lens on {texts}, {facts['tokens']} tokens."
    )
    yield from facts["notes"]
    yield UNTESTED


def sections(result: Result) -> Iterator[Section]:
    """The grid with what it shows, then how predictions develop along the layers."""
    shown, facts = tuple(views(result)), result.facts
    where = "next" if _is_causal(facts) else "in this place"
    reading = (
        f"{LENSES[facts['lens']]} A cell shows the token that this layer would predict"
        f" {where}, and its colour at first the probability of that token. Other"
        " measures, such as the entropy, can be chosen above the grid."
    )
    grids = tuple(view for view in shown if isinstance(view, Grid))
    told = as_prose([*_answers(facts), *_target(facts), UNTESTED])
    yield Section("What would each layer predict?", told, grids, reading)
    shares = ["is the model's own prediction"]
    shares += (
        ["is so and stays so in all layers above (settled)"]
        if "settled_share" in result.data
        else []
    )
    shares += ["is the true next token"] if "accuracy" in result.data else []
    lines = tuple(view for view in shown if isinstance(view, Lines))
    rank = " The last shows the rank of the target." if len(lines) > 2 else ""
    along = (
        "The first picture shows for how many tokens the top token of a layer"
        f" {in_series(shares)}. The next shows the KL divergence of each layer's"
        f" prediction from the model's own, which is 0 at the last layer.{rank}"
    )
    yield Section(
        "How predictions form along the layers", "", lines, along, folded=True
    )


def tables(result: Result) -> Iterator[Table]:
    """What every layer predicts after the last token of a single text."""
    if result.facts["texts"] != 1:
        return
    last = result.data.isel(token=-1)
    columns = (
        last[name].to_numpy().tolist()
        for name in ("site", "entropy", "kl", "word", "probability")
    )
    rows = [
        [
            site,
            f"{entropy:.2f}",
            f"{kl:.2f}",
            "  ".join(f"{word!r} {p:.2f}" for word, p in zip(*best, strict=True)),
        ]
        for site, entropy, kl, *best in zip(*columns, strict=True)
    ]
    yield Table(["site", "entropy", "KL", "top tokens"], rows, (0, 3))


def _is_causal(facts: Facts) -> bool:
    """Whether the model predicts the token that follows, and not the one in its place."""
    return bool(facts.get("causal", True))


def _answers(facts: Facts) -> Iterator[str]:
    """What the model predicts after the last token, and where predictions are settled."""
    if last := facts.get("last_token"):
        before, answer = (
            quoted(last[name].strip() or last[name]) for name in ("token", "answer")
        )
        settled = (
            f", which is the top token from {last['settled_from']} on"
            if last["settled_from"]
            else ""
        )
        place = "After" if _is_causal(facts) else "In the place of"
        yield (
            f"{place} {before} the model predicts {answer} with probability"
            f" {last['probability']:.2f}{settled}."
        )
    known = facts["settled_known_from"]
    if known is None:
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


def _target(facts: Facts) -> Iterator[str]:
    """Where the target comes up."""
    target = facts.get("target")
    if not target:
        return
    if "median_rank" in target:
        name = target["token"][:1].upper() + target["token"][1:]
        rank, tokens = target["median_rank"], target["tokens"]
        yield (
            f"{name} has a median rank of {rank:g} at {target['site']}, over {tokens}"
            " tokens."
        )
        return
    name = target["token"]
    if target["id"] is not None:
        word = name[1:-1]  # a word of the vocabulary is in quotation marks
        name = quoted(word.strip() or word)
    yield (
        f"At {target['site']}, {name} has rank {target['rank']:,} and probability"
        f" {target['probability']:.2g}."
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

"""What each layer would predict: the grid of best words, and how predictions develop along the layers."""

from collections.abc import Iterator
from dataclasses import replace

from hiddenscope.results import Facts, Result, Table
from hiddenscope.views.drawing import grid_of, labels, quoted
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

SHARES = ("agreement", "settled_share", "accuracy")
MEASURES = ("entropy", "kl", "target_probability", "target_rank")
UNTESTED = "These numbers describe these texts; differences between layers were not tested on others."


def views(result: Result) -> Iterator[View]:
    """Every cell with its best word; how often layers are right; how far they are from the model's own prediction."""
    data, model = result.data, str(result.source.get("model", "the model"))
    lens = "" if result.facts["lens"] == "logit" else f", by the {result.facts['lens']} lens"
    title = f"What each layer of {model} would predict{lens}"
    grid = grid_of(result, [name for name in MEASURES if name in data], title)
    if grid is not None:
        probability = data["probability"].to_numpy()[:, : len(grid.tokens), 0]
        best = Measure("probability of the best word", probability, limits=(0, 1))
        framed = "A frame marks where the word of the top row first appears in its column."
        words = None if grid.words is None else replace(grid.words, framed=True)
        note = f"{grid.note} {framed}".strip()
        yield replace(grid, measures=(best, *grid.measures), words=words, note=note)
    sites = labels(data, "site")
    shares = (data[name] for name in SHARES if name in data)
    series = tuple(Series(share.attrs["long_name"], share.to_numpy()) for share in shares)
    yield Lines(f"How often each layer of {model} is right{lens}", sites, series, y_name="share of tokens")
    mean = (Series("mean over tokens", data["kl_mean"].to_numpy()),)
    title = f"How far each layer of {model} is from the model's answer{lens}"
    yield Lines(title, sites, mean, y_name="KL from the model's answer", unit="nats", scale="log")
    target = result.facts.get("target")
    if target and "rank" in target:
        ranks = (Series("rank", data["target_rank"].to_numpy()[:, -1]),)
        title = f"The rank of {target['token']} after the last token, in {model}{lens}"
        yield Lines(title, sites, ranks, y_name="rank, 1 is best", scale="log")


def findings(result: Result) -> Iterator[str]:
    """The answer and where it is settled, how often layers are right, where the target comes up, and notes."""
    facts = result.facts
    yield f"{facts['texts']} text{'s' * (facts['texts'] != 1)}, {facts['tokens']} tokens, by the {facts['lens']} lens."
    yield from _answers(facts)
    if accuracy := facts.get("accuracy"):
        half = f", half of that or more from {accuracy['half_from']} on" if accuracy["half_from"] else ""
        yield (
            f"{accuracy['site']} predicts the true next token for {accuracy['value']:.0%} of {accuracy['tokens']} "
            f"tokens{half}."
        )
    yield from _target(facts)
    yield from facts["notes"]
    yield UNTESTED


def sections(result: Result) -> Iterator[Section]:
    """The grid with what it shows, then how predictions develop along the layers."""
    shown = tuple(views(result))
    texts = result.data.attrs.get("texts", [])
    text = quoted(texts[0]) if len(texts) == 1 else f"{result.facts['texts']} texts"
    opening = (
        f"Every state of {text} goes through the model's own final norm and unembedding, as if its layer were the "
        "last. Each cell shows the word that would be predicted there, and the colour its probability. Choose another "
        "measure to see the entropy, or the KL divergence from the model's own prediction."
    )
    described = " ".join([*_answers(result.facts), *_target(result.facts)])
    grids = tuple(view for view in shown if isinstance(view, Grid))
    yield Section("What each layer would predict", f"{opening}\n\n{described}", grids)
    settled = ", how often it is and stays so in every layer above" if "settled_share" in result.data else ""
    correct = ", and how often it is the true next token" if "accuracy" in result.data else ""
    along = (
        f"Along the layers: how often the best word is the model's own{settled}{correct}. The second picture shows the "
        f"KL divergence from the model's own prediction, which is zero at the last layer. {UNTESTED}"
    )
    yield Section("When the answer comes up", along, tuple(view for view in shown if isinstance(view, Lines)))


def tables(result: Result) -> Iterator[Table]:
    """What every layer predicts after the last token of a single text."""
    if result.facts["texts"] != 1:
        return
    last = result.data.isel(token=-1)
    columns = (last[name].to_numpy().tolist() for name in ("site", "entropy", "kl", "word", "probability"))
    rows = [
        [site, f"{entropy:.2f}", f"{kl:.2f}", "  ".join(f"{word!r} {p:.2f}" for word, p in zip(*best, strict=True))]
        for site, entropy, kl, *best in zip(*columns, strict=True)
    ]
    yield Table(["site", "entropy", "KL", "best words"], rows, (0, 3))


def _answers(facts: Facts) -> Iterator[str]:
    """What the model predicts after the last token, and where predictions are settled."""
    if last := facts.get("last_token"):
        before, answer = (quoted(last[name].strip() or last[name]) for name in ("token", "answer"))
        settled = f"; that is settled from {last['settled_from']} on" if last["settled_from"] else ""
        yield f"After {before} the model predicts {answer} with probability {last['probability']:.2f}{settled}."
    known = facts["settled_known_from"]
    if known is None:
        yield "Where answers are settled is not known, because not every layer above these sites was read."
    elif not known.endswith("layer.0"):
        yield f"Where answers are settled is known from {known} up; not every layer below was read."
    if facts["half_settled_from"]:
        yield f"Half of all answers are settled from {facts['half_settled_from']} on."


def _target(facts: Facts) -> Iterator[str]:
    """Where the target comes up."""
    target = facts.get("target")
    if not target:
        return
    if "median_rank" in target:
        name = target["token"][:1].upper() + target["token"][1:]
        rank, tokens = target["median_rank"], target["tokens"]
        yield f"{name} has a median rank of {rank:g} at {target['site']}, over {tokens} tokens."
        return
    name = target["token"]
    if target["id"] is not None:
        word = name[1:-1]  # a word of the vocabulary is in quotation marks
        name = quoted(word.strip() or word)
    yield f"At {target['site']}, {name} has rank {target['rank']:,} and probability {target['probability']:.2g}."
    if target["first_best_at"]:
        yield f"{name} is first the best word at {target['first_best_at']}."
    elif target["first_in_top_k_at"]:
        yield f"{name} is first among the {target['k']} best words at {target['first_in_top_k_at']}."

"""What each layer would say, shown and told."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hiddenscope.results import Result
from hiddenscope.views.drawing import grid_of, labels, quoted
from hiddenscope.views.values import Grid, Lines, Measure, Section, Series, View

ALONG = ("agreement", "settled_share", "accuracy")
MEASURES = ("entropy", "kl", "target_probability", "target_rank")


def views(result: Result) -> Iterator[View]:
    """Every cell with its best word; how often that is right along the layers; how far from the answer they are."""
    model = str(result.source.get("model", "the model"))
    title = f"What each layer of {model} would say{_lens(result)}"
    grid = grid_of(result, [name for name in MEASURES if name in result.data], title)
    if grid is not None:
        shares = result.data["probability"].to_numpy()[:, : len(grid.tokens), 0]
        best = Measure("probability of the best word", shares, limits=(0, 1))
        yield replace(grid, measures=(best, *grid.measures))
    sites = labels(result.data, "site")
    named = [
        (result.data[name].attrs["long_name"], result.data[name].to_numpy()) for name in ALONG if name in result.data
    ]
    title = f"How often each layer of {model} says the answer{_lens(result)}"
    yield Lines(title, sites, tuple(Series(name, y) for name, y in named), y_name="share of tokens")
    series = [Series("mean over tokens", result.data["kl_mean"].to_numpy())]
    title = f"How far each layer of {model} is from the answer{_lens(result)}"
    yield Lines(title, sites, tuple(series), y_name="KL from the model's answer", unit="nats", scale="log")
    yield from _target(result, model, sites)


def _target(result: Result, model: str, sites: tuple[str, ...]) -> Iterator[Lines]:
    """The target after the last token of one text."""
    target = result.facts.get("target", {})
    if "id" not in target or result.facts.get("texts") != 1:
        return
    ranks = result.data["target_rank"].to_numpy()[:, -1]
    title = f"The rank of {target['token']} after the last token, in {model}{_lens(result)}"
    yield Lines(title, sites, (Series("rank", ranks),), y_name="rank, 1 is best", scale="log")


def _lens(result: Result) -> str:
    kind = result.facts.get("lens", "logit")
    return "" if kind == "logit" else f", by the {kind} lens"


def sections(result: Result) -> Iterator[Section]:
    """What there is to see, in words."""
    shown = tuple(views(result))
    texts = result.data.attrs.get("texts", [])
    text = quoted(texts[0]) if len(texts) == 1 else f"{result.facts['texts']} texts"
    how = (
        f"Every state of {text} goes through the model's own last steps, as if its layer were the last. Each cell "
        "shows the word that would be said there, and the colour how probable it is; the entropy, and how far it is "
        "from the model's own answer, are a click away."
    )
    told = " ".join(_sentences(result.facts))
    yield Section(
        "What each layer would say", f"{how}\n\n{told}", tuple(view for view in shown if isinstance(view, Grid))
    )
    stays = "how often it stays so from there on, " if "settled_share" in result.data else ""
    along = (
        f"Along the layers: how often the best word is the one that the model says in the end, {stays}"
        "and how often it is the word that really comes next. The second picture is the KL divergence "
        "from the model's own answer, which is zero at the last layer."
    )
    yield Section("When the answer comes up", along, tuple(view for view in shown if isinstance(view, Lines)))


def _sentences(facts: Mapping[str, Any]) -> Iterator[str]:
    if last := facts.get("last token"):
        before, answer = (quoted(token.strip() or token) for token in (last["token"], last["answer"]))
        said = f"After {before} the model says {answer}"
        from_where = f", and that is settled from `{last['settled from']}` on" if "settled from" in last else ""
        yield f"{said} with a probability of {last['probability']:.2f}{from_where}."
    if "half of the answers are settled from" in facts:
        yield f"Half of all answers are settled from `{facts['half of the answers are settled from']}` on."
    target = facts.get("target", {})
    if "first best at" in target:
        word = target["token"][1:-1]  # it is given with its quotation marks
        yield f"{quoted(word.strip() or word)} is first the best word at `{target['first best at']}`."

"""How large is every state, how do states spread, and how alike are layers?"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch

from hiddenscope import progress
from hiddenscope.analyses.profile.findings import profile_dataset, profile_stack_facts
from hiddenscope.analyses.profile.statistics import stack_statistics
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import StatesError, TextError
from hiddenscope.measures import FEWEST
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Texts, resume
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, SitePatterns, select
from hiddenscope.states import Pair, Readable, Source, States

FinalNorm: TypeAlias = Literal["apart", "everywhere", "mixed"]


@checked
def profile(
    source: ModelLike | Readable | Pair,
    texts: Texts | None = None,
    *,
    sites: SitePatterns = "layer.*,final",
    final_norm: FinalNorm = "apart",
    sample: int = 1000,
    targets: Texts | None = None,
    truncate: bool = False,
) -> Result:
    """Measure every state: its norm, how states spread, and how alike layers are.

    Give a model and texts, or states, or anything that can be read block by block.
    Layers are raw and `final` is normed: with `final_norm="apart"` layers are compared
    with layers only, with "everywhere" every layer first goes through the model's final
    norm, and with "mixed" all sites are compared as they are. Neighbours and CKA are
    measured on at most `sample` tokens.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.profile(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["norm"].sizes), result.data["norm_median"].dims
    ({'site': 5, 'token': 3}, ('site',))
    """
    source = as_source(source)
    _check(final_norm, sample)
    captured = _states(source, texts, sites, targets, truncate)
    stacks: list[Readable] = (
        [captured.encoder, captured.decoder]
        if isinstance(captured, Pair)
        else [captured]
    )
    selected = [_selected(stack, sites) for stack in stacks]
    if final_norm == "everywhere":
        stacks[0] = _through_final_norm(source, captured, selected[0])
        selected[0] = stacks[0].sites
    statistics = []
    with progress.track("Profiling", total=sum(map(len, selected))) as advance:
        for stack, stack_sites in zip(stacks, selected, strict=True):
            compared = _compared(stack_sites, final_norm)
            statistics.append(
                stack_statistics(stack, stack_sites, compared, sample, advance)
            )
    pooled = statistics[0].pooled
    word = "tokens" if pooled is None else "vectors"
    facts: Facts = {
        "texts": stacks[0].tokens.count,
        "pooled": pooled,
        word: sum(len(stack.tokens) for stack in stacks),
        f"{word}_kept": sum(stack.stored_tokens for stack in statistics),
        "computed_in": "float64",
        "final_norm": final_norm,
        "stacks": [profile_stack_facts(stack) for stack in statistics],
    }
    data = profile_dataset(statistics, normed=final_norm == "everywhere")
    origin = getattr(stacks[0], "source", None)
    return Result("profile", data, facts, origin if isinstance(origin, Source) else {})


def _check(final_norm: str, sample: int) -> None:
    if final_norm not in get_args(FinalNorm):
        choices = ", ".join(map(repr, get_args(FinalNorm)))
        raise StatesError(
            f"No final_norm {str(final_norm)[:40]!r}",
            f"it is one of {choices}",
            "Choose one of these.",
        )
    integer(sample, "sample", FEWEST)


def _states(
    source: object,
    texts: Texts | None,
    sites: SitePatterns,
    targets: Texts | None,
    truncate: bool,
) -> Readable | Pair:
    if isinstance(source, Model):
        if texts is None:
            raise TextError(
                f"Cannot profile {source.name}",
                "there are no texts",
                "Give one or several.",
            )
        return source.capture(texts, sites, targets=targets, truncate=truncate)
    if texts is not None or targets is not None:
        raise TextError(
            "Cannot profile states",
            "texts were given too",
            "Leave them out, or give a model.",
        )
    if not isinstance(source, Pair | Readable):
        raise StatesError(
            "Cannot profile this",
            f"it is {type(source).__name__}",
            "Give a model, states, or what has sites, tokens and blocks().",
        )
    if not isinstance(source, Pair) and not len(source.tokens):
        raise StatesError(
            "Cannot profile these states", "there are no tokens", "Give at least one."
        )
    return source


def _selected(stack: Readable, sites: SitePatterns) -> tuple[Site, ...]:
    if isinstance(stack, States):
        return stack.select(sites=sites).sites
    return select(sites, stack.sites)


def _compared(sites: Sequence[Site], final_norm: str) -> frozenset[Site]:
    """Return the sites that are compared with one another.

    A normed `final` is not compared with raw layers, unless that is wanted.
    """
    raw = frozenset(site for site in sites if site.layer is not None)
    if final_norm == "apart" and raw:
        return raw
    return frozenset(sites)


def _through_final_norm(
    source: object, captured: object, sites: tuple[Site, ...]
) -> States:
    """Take each captured layer through the model's own final norm.

    `layer.L` is then the same as `final`.
    """
    problem = "Cannot take layers through the final norm"
    if not isinstance(source, Model):
        reason = "that takes the model, and states were given"
        raise StatesError(problem, reason, "Give a model of one stack and texts.")
    if not isinstance(captured, States):
        reason = "there are two stacks"
        raise StatesError(problem, reason, "Give a model of one stack and texts.")
    stack = source.anatomy.stacks[0]
    if stack.proof.final is None:
        reason = f"{source.name} has no final norm"
        raise StatesError(problem, reason, "Leave final_norm='apart'.")
    layers = tuple(site for site in sites if site.layer is not None and not site.part)
    if not layers:
        reason = "no whole layers were chosen"
        raise StatesError(problem, reason, "Leave final_norm='apart'.")
    raw = captured.select(sites=list(layers))
    normed = [
        _normed(source, raw.of(text), stack.depth) for text in range(raw.tokens.count)
    ]
    return States(layers, torch.cat(normed, 1), raw.tokens, raw.source)


def _normed(model: Model, states: States, depth: int) -> torch.Tensor:
    """Return every layer of one text after the final norm.

    Each enters the pass where the last layer does: one batch, with a row for each.
    """
    layers, tokens = len(states.sites), len(states.tokens)
    batch = [states.tokens.ids.tolist()] * layers
    run = resume(model, batch, Site(depth), states.values, "final", logits=False)
    assert isinstance(run.states, States)
    return run.states["final"].reshape(layers, tokens, -1)

"""How large is every state, how do states spread, and how alike are layers?"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch

from hiddenscope import progress
from hiddenscope.analyses.profile.findings import data_of, stack_facts
from hiddenscope.analyses.profile.statistics import pooled_as, stack_statistics
from hiddenscope.arguments import checked
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
    """The norm of every state, how states spread, what each block adds, and how alike
    layers are.

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
    chosen = [_chosen(stack, sites) for stack in stacks]
    if final_norm == "everywhere":
        stacks[0], chosen[0] = _through_final_norm(source, captured, chosen[0])
    with progress.track("Profiling", total=sum(map(len, chosen))) as advance:
        statistics = [
            stack_statistics(
                stack, sites, _compared(sites, final_norm), sample, advance
            )
            for stack, sites in zip(stacks, chosen, strict=True)
        ]
    facts: Facts = {
        "texts": stacks[0].tokens.count,
        **_counted(stacks, sum(stack.kept for stack in statistics)),
        "computed_in": "float64",
        "final_norm": final_norm,
        "stacks": [stack_facts(stack) for stack in statistics],
    }
    origin = getattr(stacks[0], "source", None)
    data = data_of(statistics, normed=final_norm == "everywhere")
    return Result("profile", data, facts, origin if isinstance(origin, Source) else {})


def _counted(stacks: Sequence[Readable], kept: int) -> Facts:
    """How many rows there are, and how many are kept one by one: tokens, or vectors
    where states are pooled.
    """
    how = pooled_as(stacks[0])
    word = "tokens" if how is None else "vectors"
    return {
        "pooled": how,
        word: sum(len(stack.tokens) for stack in stacks),
        f"{word}_kept": kept,
    }


def _check(final_norm: str, sample: int) -> None:
    if final_norm not in get_args(FinalNorm):
        choices = ", ".join(map(repr, get_args(FinalNorm)))
        raise StatesError(
            f"No final_norm {str(final_norm)[:40]!r}",
            f"it is one of {choices}",
            "Choose one of these.",
        )
    if isinstance(sample, bool) or sample < FEWEST:
        reason = "neighbours and CKA need three tokens or more"
        raise StatesError(
            f"sample must be an integer >= {FEWEST}, got {str(sample)[:40]}",
            reason,
            "Give a larger one.",
        )


def _states(
    source: Any,
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
        reason = f"it is {type(source).__name__}"
        raise StatesError(
            "Cannot profile this",
            reason,
            "Give a model, states, or what has sites, tokens and blocks().",
        )
    if not isinstance(source, Pair) and not len(source.tokens):
        raise StatesError(
            "Cannot profile these states", "there are no tokens", "Give at least one."
        )
    return source


def _chosen(stack: Readable, sites: SitePatterns) -> tuple[Site, ...]:
    return (
        stack.select(sites=sites).sites
        if isinstance(stack, States)
        else select(sites, stack.sites)
    )


def _compared(sites: Sequence[Site], final_norm: str) -> frozenset[Site]:
    """The sites that are compared with one another: without a normed `final`, unless
    there is nothing else.
    """
    raw = frozenset(site for site in sites if site.layer is not None)
    return raw if final_norm == "apart" and raw else frozenset(sites)


def _through_final_norm(
    source: Any, captured: Any, sites: tuple[Site, ...]
) -> tuple[Readable, tuple[Site, ...]]:
    """The captured layers, each taken through the model's own exit; `layer.L` is then
    `final`.
    """
    problem = "Cannot take layers through the final norm"
    if not isinstance(source, Model) or not isinstance(captured, States):
        reason = (
            "there are two stacks"
            if isinstance(source, Model)
            else "that takes the model, and states were given"
        )
        raise StatesError(problem, reason, "Give a model of one stack and texts.")
    stack, layers = (
        source.anatomy.stacks[0],
        tuple(site for site in sites if site.layer is not None and not site.part),
    )
    if stack.proof.final is None or not layers:
        reason = (
            f"{source.name} has no final norm"
            if stack.proof.final is None
            else "no whole layers were chosen"
        )
        raise StatesError(problem, reason, "Leave final_norm='apart'.")
    raw = captured.select(sites=list(layers))
    normed = [
        _normed(source, raw.of(text), stack.depth) for text in range(raw.tokens.count)
    ]
    return States(layers, torch.cat(normed, 1), raw.tokens, raw.source), layers


def _normed(model: Model, states: States, depth: int) -> torch.Tensor:
    """Every layer of one text enters the pass where the last one does: one batch, with
    a row for each layer.
    """
    batch = [states.tokens.ids.tolist()] * len(states.sites)
    final = resume(
        model, batch, Site(depth), states.values, "final", logits=False
    ).states
    assert isinstance(final, States)
    return final["final"].reshape(len(states.sites), len(states.tokens), -1)

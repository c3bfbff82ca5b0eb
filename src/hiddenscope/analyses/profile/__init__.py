"""What are the states like, layer by layer: how large, how spread, how alike?

footing    raw states beside raw ones, or normed beside normed
sweep      one reading of a site, a few states at a time
table      the numbers of all sites in one Dataset
findings   what they show
"""

from typing import Any

from hiddenscope import progress
from hiddenscope.analyses.profile.findings import findings
from hiddenscope.analyses.profile.footing import SAID, beside_others, footed
from hiddenscope.analyses.profile.sweep import sampled, sweep
from hiddenscope.analyses.profile.table import Part, data_of
from hiddenscope.errors import StatesError, TextError
from hiddenscope.measures import FEWEST, linear_cka
from hiddenscope.model import Model
from hiddenscope.passes import Texts
from hiddenscope.results import Result
from hiddenscope.sites import Site, select
from hiddenscope.states import Pair, Readable, Source, States

MOST_CELLS = 1 << 23  # numbers of one variable over site and token, 32 MiB; a longer source is told in its first tokens


def profile(
    source: Model | Readable | Pair,
    texts: Texts | None = None,
    *,
    sites: str | Site | list[str] = "layer.*,final",
    footing: str = "raw",
    sample: int = 1000,
    targets: Texts | None = None,
    truncate: bool = False,
) -> Result:
    """The laminar profile: how large states are, how they spread, what each block adds, and how alike layers are.

    Give a model and texts, or states, or anything that can be read block by block. With `footing="raw"` layers are
    compared as they are and `final` stands beside them; "normed" takes every layer through the model's final norm;
    "mixed" compares all sites as they are. Neighbours and likeness are those of at most `sample` tokens.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.profile(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["norm"].sizes), result.data["norm_median"].dims
    ({'site': 5, 'token': 3}, ('site',))
    """
    if footing not in SAID or sample < FEWEST:
        problem = f"A profile on the footing {footing!r} of {sample} sampled tokens"
        raise StatesError(problem, f"footings are {', '.join(SAID)}", f"Choose one, and {FEWEST} tokens or more.")
    captured = _states(source, texts, sites, targets, truncate)
    stacks: list[Readable] = [captured.encoder, captured.decoder] if isinstance(captured, Pair) else [captured]
    chosen = [_chosen(stack, sites) for stack in stacks]
    if footing == "normed":
        stacks[0], chosen[0] = footed(source, captured, chosen[0])
    with progress.track("Profiling", total=sum(map(len, chosen))) as advance:
        parts = [_part(*pair, footing, sample, advance) for pair in zip(stacks, chosen, strict=True)]
    facts: dict[str, Any] = {"texts": stacks[0].tokens.count, "tokens": sum(len(stack.tokens) for stack in stacks)}
    facts |= {"computed in": "float64", "footing": SAID[footing]}
    for part in parts:
        facts |= findings(part) if len(parts) == 1 else {str(part.sites[0].stack): _nested(findings(part))}
    known = getattr(stacks[0], "source", None)
    return Result("profile", data_of(parts, footing), facts, known if isinstance(known, Source) else {})


def _states(source: Any, texts: Texts | None, sites: Any, targets: Texts | None, truncate: bool) -> Readable | Pair:
    if isinstance(source, Model):
        if texts is None:
            raise TextError(f"A profile of {source.name}", "there are no texts", "Give one or several, or give states.")
        return source.capture(texts, sites, targets=targets, truncate=truncate)
    if texts is not None or targets is not None:
        raise TextError("A profile of states", "texts were given too", "Leave them out, or give a model.")
    if not isinstance(source, Pair | Readable):
        reason = f"it is {type(source).__name__}"
        raise StatesError("A profile", reason, "Give a model, states, or what has sites, tokens and blocks(site).")
    if not isinstance(source, Pair) and not len(source.tokens):
        raise StatesError("A profile of states", "there are no tokens", "Give one at least.")
    return source


def _chosen(stack: Readable, sites: Any) -> tuple[Site, ...]:
    return stack.select(sites=sites).sites if isinstance(stack, States) else select(sites, stack.sites)


def _part(stack: Readable, sites: tuple[Site, ...], footing: str, sample: int, advance: Any) -> Part:
    """Every site of one stack, and all pairs of those that stand on one footing."""
    beside = beside_others(sites, footing)
    rows = sampled(len(stack.tokens), sample)
    kept = max(1, MOST_CELLS // len(sites))
    seen = []
    for place, site in enumerate(sites):
        below = sites[place - 1] if place and _makes(sites[place - 1], site) else None
        seen.append(sweep(stack, site, below, rows, kept, shape=site in beside))
        advance(1)
    return _alike(Part(stack, sites, seen, rows))


def _makes(below: Site, site: Site) -> bool:
    """Whether one block lies between two sites."""
    whole = not below.part and not site.part
    return whole and below.layer is not None and site.layer == below.layer + 1


def _alike(part: Part) -> Part:
    """Linear CKA between all pairs of layers, with and without first tokens, over the sampled tokens."""
    samples = [one.sample for one in part.seen if one.sample is not None]
    part.alike = [site for site, one in zip(part.sites, part.seen, strict=True) if one.sample is not None]
    fine = [sample.isfinite().all(1) for sample in samples]
    every = next(iter(fine)).clone()
    for one in fine:
        every &= one
    first = every.new_tensor(part.source.tokens.positions[part.rows] == 0)
    part.counts = int(every.sum()), int((every & ~first).sum())
    if part.counts[0] >= FEWEST:
        part.cka, part.chance = linear_cka([sample[every] for sample in samples])
    if part.counts[1] >= FEWEST:
        part.cka_others, part.chance = linear_cka([sample[every & ~first] for sample in samples])
    return part


def _nested(facts: dict[str, Any]) -> dict[str, Any]:
    """The findings of one of two stacks: the norm's first, and those of the others beside them."""
    return {**facts.pop("norm"), **facts}

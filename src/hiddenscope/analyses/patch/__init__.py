"""Which states carry the answer? Put those of one run in another, one at a time, and see what it says."""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from hiddenscope import progress
from hiddenscope.analyses.patch import donors
from hiddenscope.analyses.patch.cells import Plan, run
from hiddenscope.analyses.patch.findings import data_of, facts_of
from hiddenscope.analyses.patch.pairs import pairs
from hiddenscope.errors import PassError, SiteError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Texts
from hiddenscope.passes.edit import plan as changeable
from hiddenscope.results import Result
from hiddenscope.sites import Site

Answers: TypeAlias = str | int | Sequence[str | int]

PATTERNS = {"layer": "layer.*", "attn": "*.attn", "mlp": "*.mlp"}


def patch(
    model: Model,
    *,
    clean: Texts | None = None,
    corrupt: Texts | None = None,
    answer: Answers | None = None,
    other: Answers | None = None,
    what: Literal["layer", "attn", "mlp", "block"] | None = None,
    direction: Literal["denoise", "noise"] = "denoise",
    method: Literal["exact", "attribution", "both"] = "exact",
    window: int = 1,
    layers: int | None = None,
    targets: Texts | None = None,
    position: int | None = None,
    donor: Model | None = None,
    data: Sequence[tuple[Any, Any]] | None = None,
) -> Result:
    """Put one state of the clean run in the corrupt one, at every site and token, and see what it brings back.

    The effect is the share of the logit difference between `answer` and `other` that comes back: 0 as in the corrupt
    run, 1 as in the clean one; with `direction="noise"` corrupt states go into the clean run, and it is the share that
    is lost. `window` tokens are exchanged at a time, and `layers` in a row where whole layers are (0: none). Pairs, as
    lists, are averaged. What is exchanged is the state of a whole layer, or what `attn` or `mlp` add. With `donor=`
    and `data=[(prompt, answer), ...]` windows of so many blocks, of what their branches add, or the states of one layer
    at a time come from another model of one shape.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> result = hs.patch(model, clean=[[5, 6, 7]], corrupt=[[5, 9, 7]], answer=11, other=12)
    >>> result.data["effect"].sel(site="layer.0").values.round(5).tolist()
    [0.0, 1.0, 0.0]
    """
    if donor is not None or data is not None:
        _alone(clean, corrupt, answer, other, layers, targets, position)
        return donors.patch_from(model, donor, data, what=what or "block", window=window)
    given = {"clean": clean, "corrupt": corrupt, "answer": answer, "other": other}
    missing = [name for name, value in given.items() if value is None]
    if missing:
        remedy = "Give clean=, corrupt=, answer= and other=, or donor= and data=."
        raise TextError(f"Patching {model.name}", f"there is no {' and no '.join(missing)}", remedy)
    what = what or "layer"
    _one_of("what", what, tuple(PATTERNS))
    _one_of("direction", direction, ("denoise", "noise"))
    _one_of("method", method, ("exact", "attribution", "both"))
    if model.anatomy.head is None:
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(f"Patching {model.name}", "it has no head that gives logits", remedy)
    sites, left_out = _sites(model, PATTERNS[what])
    plan = Plan(
        sites,
        _many("window", window),
        _many("layers", max(1, model.anatomy.stacks[-1].depth // 6) if layers is None else layers, least=0),
        direction == "denoise",
        method != "attribution",
        method != "exact",
    )
    listed = pairs(model, (clean or "", corrupt or ""), (answer, other), targets, position)
    columns = sum(len(some) for pair in listed for some in pair.columns.values())
    with progress.track("Patching", total=len(sites) * (columns + 2 * len(listed))) as advance:
        made = [run(model, pair, plan, advance) for pair in listed]
    found = data_of(model, listed, plan, made, (clean, corrupt))
    source = model.source(sites[-1].stack)
    return Result("patch", found, facts_of(model, listed, plan, made, found, left_out), source)


def _sites(model: Model, pattern: str) -> tuple[tuple[Site, ...], list[Site]]:
    """The sites that can be changed, and those that cannot."""
    chosen = model.anatomy.select(pattern)
    kept: list[Site] = []
    for site in chosen:
        try:
            changeable(model.anatomy, {site: lambda states: states})
            kept.append(site)
        except SiteError:
            if len(chosen) == 1:
                raise
    return tuple(kept), [site for site in chosen if site not in kept]


def _one_of(name: str, given: Any, choices: tuple[str, ...]) -> None:
    if given not in choices:
        raise TextError(f"{name}={given!r}", f"there are {', '.join(map(repr, choices))}", "Choose one of these.")


def _many(name: str, given: Any, *, least: int = 1) -> int:
    if isinstance(given, bool) or not isinstance(given, int) or given < least:
        raise TextError(f"{name}={given!r}", f"it is no whole number from {least} on", "Give one.")
    return given


def _alone(*given: Any) -> None:
    if any(one is not None for one in given):
        reason = "clean, corrupt, answer, other, layers, targets or position were given too"
        raise TextError("Patching from a donor over data", reason, "Leave them out, or leave donor and data out.")

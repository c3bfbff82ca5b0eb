"""Which states carry the answer?

Put states of one run into another and see how much of the answer comes along.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.patch.cells import (
    Effects,
    Into,
    PatchedValues,
    Plan,
    patch_contrast,
    patched_at,
)
from hiddenscope.analyses.patch.contrast import (
    Contrast,
    EncodedContrast,
    encode_contrasts,
)
from hiddenscope.analyses.patch.findings import patch_dataset, patch_facts
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import PassError, SiteError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import load_with_head
from hiddenscope.passes.edit import plan as changeable
from hiddenscope.results import Result
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states.arrays import Ints
from hiddenscope.texts import number_groups

PatchMethod: TypeAlias = Literal[
    "exact", "attribution", "both", "zero", "mean", "resample"
]
# The methods that ablate: what they put into the clean run.
ABLATIONS: dict[str, PatchedValues] = {
    "zero": "zero",
    "mean": "mean",
    "resample": "run",
}


@checked
def patch(
    model: ModelLike,
    contrasts: Contrast | Sequence[Contrast],
    *,
    sites: SitePatterns = "layer.*",
    into: Into = "corrupt",
    window: int | Sequence[int] | None = None,
    layers: int | None = None,
    method: PatchMethod = "exact",
) -> Result:
    """Patch states of the clean run into the corrupt run and see what they restore.

    One token is patched at one site at a time. The effect is the share of the logit
    difference between `answer` and `other` that comes back: 0 as in the corrupt run, 1
    as in the clean one. With `into="clean"` corrupt states go into the clean run, and
    it is the share that is lost. `window` tokens are patched at a time, or those at a
    list of positions of the clean prompt at once; of heads and neurons all tokens are
    by default. Whole layers are patched too, `layers` of them in a row (0: none).
    Several contrasts are averaged; a copy counts once, and those of a `group` belong
    together. `method="attribution"` estimates all effects from one gradient. The
    methods "zero", "mean" and "resample" ablate: they put zeros, the mean over all
    prompts, or the corrupt run's states into the clean run.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> result = hs.patch(model, hs.Contrast([5, 6, 7], [5, 9, 7], answer=11, other=12))
    >>> result.data["effect"].sel(site="layer.0").values.round(5).tolist()
    [0.0, 1.0, 0.0]
    """
    model = as_model(model)
    all_contrasts = _listed(contrasts)
    _check_choice("into", into, get_args(Into))
    _check_choice("method", method, get_args(PatchMethod))
    if not model.anatomy.makes_logits:
        raise PassError(
            f"Cannot patch {model.name}",
            "it has no head, and makes no logits",
            load_with_head(model),
        )
    selected, left_out = _changeable_sites(model, sites)
    plan = _plan(model, selected, into, window, layers, method)
    # A copy says nothing new: the first of its kind stands for it.
    distinct: dict[Hashable, tuple[Contrast, EncodedContrast]] = {}
    for contrast, encoded in zip(
        all_contrasts,
        encode_contrasts(model, all_contrasts, one_form=not plan.together),
        strict=True,
    ):
        distinct.setdefault(encoded.key, (contrast, encoded))
    encodings = [encoded for _, encoded in distinct.values()]
    groups = _groups(encodings)
    # Each site has a cell for every column, one for a layer and one for a window of
    # layers.
    cells = 0
    for encoded in encodings:
        cells += 2 + sum(map(len, encoded.columns.values()))
    means = _means(model, encodings, plan)
    with progress.track("Patching", total=len(selected) * cells) as advance:
        effects = [
            patch_contrast(model, encoded, plan, advance, means)
            for encoded in encodings
        ]
    data = patch_dataset(model, encodings[0], plan, effects, groups)
    if isinstance(all_contrasts[0].clean, str):
        data.attrs["texts"] = [contrast.clean for contrast, _ in distinct.values()]
        data.attrs["other_texts"] = [
            contrast.corrupt for contrast, _ in distinct.values()
        ]
    copies = len(all_contrasts) - len(encodings)
    group_count = int(groups.max()) + 1
    notes = [
        *_notes_on_evidence(len(encodings), copies, group_count),
        *_notes(encodings, effects, left_out),
    ]
    facts = {
        **patch_facts(model, encodings, plan, effects, data),
        "method": method,
        "copies": copies,
        "groups": group_count,
        "notes": notes,
    }
    return Result("patch", data, facts, model.source(selected[-1].stack))


def _plan(
    model: Model,
    sites: tuple[Site, ...],
    into: Into,
    window: int | Sequence[int] | None,
    layers: int | None,
    method: PatchMethod,
) -> Plan:
    """Return what is patched, from the arguments of `patch`."""
    positions = None
    together = window is None and all(site.index is not None for site in sites)
    if window is not None and not isinstance(window, int):
        positions = tuple(_check_position(position) for position in window)
        together = True
    size = 1 if together or window is None else window
    if layers is None:
        layers = max(1, model.anatomy.stacks[-1].depth // 6)
    # A window of layers is made of whole states.
    if together or any(site.index is not None for site in sites):
        layers = 0
    if method in ABLATIONS:
        into = "clean"
    return Plan(
        sites,
        integer(size, "window", 1),
        integer(layers, "layers", 0),
        into,
        exact=method != "attribution",
        attribution=method in ("attribution", "both"),
        together=together,
        positions=positions,
        values=ABLATIONS.get(method, "run"),
    )


def _check_position(position: object) -> int:
    if isinstance(position, bool) or not isinstance(position, int):
        raise TextError(
            "window must be a number of tokens or a list of positions",
            f"got {position!r:.60} among the positions",
            "Give integers; -1 is the last token of the clean prompt.",
        )
    return position


def _means(
    model: Model, contrasts: Sequence[EncodedContrast], plan: Plan
) -> dict[Site, Tensor]:
    """Return the mean state at each patched site, over all tokens of all prompts."""
    if plan.values != "mean":
        return {}
    sites = {patched_at(model, site).site for site in plan.sites}
    sums: dict[Site, Tensor] = {}
    tokens: Counter[Site] = Counter()
    for contrast in contrasts:
        states = model.capture(contrast.inputs, tuple(sorted(sites)))
        for site in sites:
            rows = states[site].double()
            sums[site] = sums.get(site, 0) + rows.sum(0)
            tokens[site] += len(rows)
    return {site: total / tokens[site] for site, total in sums.items()}


def _groups(contrasts: Sequence[EncodedContrast]) -> Ints:
    """Number the groups: contrasts of one named group, or of the same prompts."""
    names: list[Hashable] = []
    for number, contrast in enumerate(contrasts):
        if contrast.group is None:
            names.append(("contrast", number))
        else:
            names.append(("group", contrast.group))
    return number_groups([contrast.prompts for contrast in contrasts], names)


def _listed(contrasts: Contrast | Sequence[Contrast]) -> list[Contrast]:
    if isinstance(contrasts, Contrast):
        return [contrasts]
    if (
        not isinstance(contrasts, list | tuple)
        or not contrasts
        or not all(isinstance(contrast, Contrast) for contrast in contrasts)
    ):
        raise TextError(
            "contrasts must be a Contrast or a list of them",
            f"got {contrasts!r:.60}",
            "Give hs.Contrast(clean, corrupt, answer, other).",
        )
    return list(contrasts)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = " or ".join(map(repr, choices))
        raise TextError(
            f"{name} must be {known}", f"got {value!r}", "Choose one of these."
        )


def _changeable_sites(
    model: Model, patterns: SitePatterns
) -> tuple[tuple[Site, ...], list[Site]]:
    """Return the sites whose states can be changed, and those whose cannot."""
    selected = model.anatomy.select(patterns)
    if not selected:
        raise SiteError(
            "No sites to patch",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    changeable_sites: list[Site] = []
    left_out: list[Site] = []
    # All heads of a block are changed in one place.
    known: set[Site] = set()
    for site in selected:
        # The plan of an edit refuses a state that cannot be changed.
        try:
            place = patched_at(model, site).site
            if place not in known:
                changeable(model.anatomy, {place: lambda states: states})
                known.add(place)
            changeable_sites.append(site)
        except SiteError:
            if len(selected) == 1:
                raise
            left_out.append(site)
    return tuple(changeable_sites), left_out


def _notes_on_evidence(contrasts: int, copies: int, groups: int) -> Iterator[str]:
    """Say which contrasts are no further evidence."""
    if copies == 1:
        yield "One pair of prompts is a copy of another and counted once."
    elif copies:
        yield f"{copies:,} pairs of prompts are copies of another and counted once."
    if groups == 1 < contrasts:
        yield "All pairs of prompts belong together, so there is no standard error."


def _notes(
    contrasts: Sequence[EncodedContrast],
    effects: Sequence[Effects],
    left_out: Sequence[Site],
) -> list[str]:
    notes: list[str] = []
    for contrast in contrasts:
        notes += contrast.notes
    for of_contrast in effects:
        notes += of_contrast.notes
    if left_out:
        notes.append(f"{summarise(left_out)} cannot be changed and was left out.")
    for columns in contrasts[0].columns.values():
        if any(None in column for column in columns):
            notes.append(
                "The prompts have different lengths: tokens that only one of them has"
                " are gaps."
            )
    return list(dict.fromkeys(notes))

"""The story of a drift: where a candidate leaves its reference, and how the error
grows along the layers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from hiddenscope.results import Report, Result, Section, Table, frozen
from hiddenscope.results.drawing import grid_of, labels
from hiddenscope.results.pictures import Lines, PackedFloats, Series
from hiddenscope.results.report import ABSENT, Absent
from hiddenscope.results.sentences import (
    capitalised,
    counted,
    number,
    quote,
    side_names,
)

MEASURES = ("relative", "local", "inherited", "max_abs", "ulp", "mismatched", "cosine")
LINES = {
    "total_error": "total error",
    "local_error": "local error, on the reference's own input",
    "inherited_error": "error inherited from the layers before",
}
NOISE = {
    "float64": "the reference in float64",
    "dtype": "the reference in the candidate's dtype",
    "kernel": "the reference with the candidate's attention kernel",
    "kernel_batch_threads": (
        "the reference with another attention kernel, batch and number of threads"
    ),
}
ERRORS = {
    "local_error": (
        "The local error of a part is measured on the reference's own input."
    ),
    "inherited_error": (
        "The inherited error is what a part makes of the error in its input."
    ),
}
CHANGES = {
    "quantisation": "quantisation",
    "adapter": "an adapter",
    "dtype": "a dtype of fewer digits",
}
MOST_ROWS = 8


@frozen
class SiteError:
    """The error at a site."""

    site: str
    error: float


@frozen
class SiteBeyond:
    """How many times over the noise envelope a site is."""

    site: str
    beyond: float


@frozen
class DriftingSite:
    """A site that differs by more than noise."""

    site: str
    beyond: float
    error: float


@frozen
class Systematic:
    """A difference that is the same at every token."""

    part: str
    pattern: str
    size: float
    beyond: float


@frozen
class SmallestFault:
    """How small a systematic difference would have shown."""

    typical: float
    largest: float
    part: str


@frozen
class WeightChange:
    """A weight that differs, and by how much of its norm."""

    name: str
    relative: float


@frozen
class WorstToken:
    """The token at which a site is farthest off."""

    text: int
    position: int
    token: str


@frozen
class Passes:
    """How many passes were run."""

    reference: float
    candidate: float


@frozen
class Noise:
    """What the noise envelope is made of."""

    made_of: list[str]
    margin: float


@frozen
class SelfCheck:
    """Whether observing the candidate changed its output; None where unknown."""

    observing_changed_nothing: bool | None


@frozen
class SitePair:
    """The names of a site and of its places on both sides."""

    site: str
    reference: str
    candidate: str


@frozen
class Pairing:
    """By what tensors were paired, and the pairs."""

    by: str
    pairs: list[SitePair]

    @classmethod
    def of(cls, by: str, places: Mapping[str, tuple[str, str]]) -> "Pairing":
        """Pair the places of each site on the two sides."""
        pairs = [
            SitePair(site=site, reference=reference, candidate=candidate)
            for site, (reference, candidate) in places.items()
        ]
        return cls(by=by, pairs=pairs)


@frozen
class Hint:
    """What a fault looks like: the name of a fault, and the evidence in a sentence."""

    fault: str
    evidence: str


@frozen
class Restored:
    """The share of the output's change that the reference's states at sites remove."""

    sites: list[str]
    share: float


@frozen
class Consequences:
    """What the drift does to the output."""

    kl_mean: float
    kl_max: float
    top1_changed: int
    of: int
    restored: list[Restored]


# Smaller shares are written as 0.00%.
LEAST_SHOWN = 5e-5


@frozen
class MovedLayer:
    """How far a layer moved: by its own weights, and with what it inherited.

    Both are medians over the tokens; `largest` is the largest local error of a token.
    """

    site: str
    local: float
    total: float
    largest: float


@frozen
class MovedToken:
    """How far the state of a token moved at the last site, and its output."""

    text: int
    position: int
    token: str
    error: float
    kl: float | None


@frozen
class Baseline:
    """The baseline that was written or applied."""

    file: str
    written: bool
    sites: int


@frozen
class DriftReport(Report):
    """Whether and where a candidate differs from its reference.

    The fields that may be absent are not in the results of older versions.
    """

    drifted: bool
    explained_by: (
        Literal["quantisation", "adapter", "weights", "dtype"] | Absent | None
    ) = ABSENT
    unexplained: DriftingSite | Absent | None = ABSENT
    first_site: str | None
    module: str | None
    beyond: float
    own_code: bool
    error: float
    envelope: float
    as_given: SiteError | None
    systematic: Systematic | None
    smallest_fault: SmallestFault | None
    changed_weights: list[WeightChange]
    first_token: WorstToken | None
    largest: SiteBeyond
    drifting_sites: list[DriftingSite]
    moved_layers: list[MovedLayer] | None = None
    moved_tokens: list[MovedToken] | None = None
    reference: str
    candidate: str
    compared: Literal["parts", "passes"]
    texts: int
    tokens: int
    sites: int
    passes: Passes
    noise: Noise
    self_check: SelfCheck
    pairing: Pairing
    hints: list[Hint]
    consequences: Consequences | None
    notes: list[str]
    baseline: Baseline | None = None


def story(report: DriftReport, result: Result) -> Iterator[Section]:
    """Yield the verdict with the errors by site and token; then how they grow along
    the sites, with the noise envelope.
    """
    data = result.data
    reference, candidate = report.reference, report.candidate
    other = result.source.get("candidate")
    # Two sides of one model are named with what differs, such as the dtype.
    if reference == candidate and isinstance(other, dict):
        reference, candidate = side_names({**result.source, "other": other})
    title = f"The error of {candidate} against {reference}"
    grid = grid_of(result, [name for name in MEASURES if name in data], title)
    heading = "Drift" if report.drifted else "No drift"
    if report.drifted and report.explained_by in CHANGES:
        heading = f"What {CHANGES[str(report.explained_by)]} costs"
    yield Section(
        heading,
        tuple(_findings(report)),
        () if grid is None else (grid,),
        "Every cell compares one hidden state of the candidate with that of the"
        " reference. The colour is at first the relative error: the L2 norm of the"
        " difference over the norm of the reference's state.",
        tables=tuple(_tables(report)),
    )
    series = [
        Series(words, _log_line(result, key))
        for key, words in LINES.items()
        if key in data
    ]
    series.append(Series("noise envelope", _log_line(result, "envelope"), style="dash"))
    lines = Lines(
        f"The error along the layers of {report.candidate}",
        labels(data, "site"),
        tuple(series),
        y_name="largest error",
        unit="L2 over the reference's norm",
        scale="log",
    )
    reading = [sentence for key, sentence in ERRORS.items() if key in data]
    reading.append("Errors below the dashed line, the noise envelope, can be rounding.")
    yield Section("How does the error grow?", views=(lines,), reading=" ".join(reading))


def _log_line(result: Result, key: str) -> PackedFloats:
    """Return a variable for a log scale, on which no error at all is a gap."""
    values = result.data[key].to_numpy()
    return np.where(values > 0, values, np.nan).astype(np.float32)


def _findings(report: DriftReport) -> Iterator[str]:
    """Yield the verdict; then the module, what it looks like, what it does to the
    output, and how it was measured.
    """
    yield _verdict(report)
    if report.explained_by and report.drifted:
        yield _explanation(report)
    left = report.unexplained
    if isinstance(left, DriftingSite):
        beyond = _times(left.beyond)
        differs = f"differs at `{left.site}`, by {beyond} the noise envelope"
        if report.explained_by == "weights":
            yield (
                "With the weights that are a rounding of the reference's, and no"
                f" others, its code {differs}. The fault is in the other weights."
            )
        else:
            yield (
                "The weights do not explain all of it: with the candidate's own"
                f" weights, the reference's code still {differs}. The fault is in code."
            )
    if report.module is not None:
        yield _module(report)
    if report.explained_by in CHANGES:
        yield from _moved(report)
    for hint in report.hints:
        yield hint.evidence
    consequences = report.consequences
    if consequences:
        yield _in_output(consequences)
    if consequences and consequences.kl_max:
        for part in consequences.restored:
            sites = part.sites
            share = part.share
            where = f"all {len(sites)} sites that differ"
            if len(sites) == 1:
                where = f"`{sites[0]}`"
            change = (
                f"removes {share:.1%} of" if share >= 0 else f"adds {-share:.1%} to"
            )
            yield (
                f"Putting the reference's states back at {where} {change} the KL"
                " divergence."
            )
    if not report.drifted and report.changed_weights:
        what = _which_weights(report.changed_weights, " all the same")
        yield f"{capitalised(what)}. The states do not show it on these texts."
    yield _measured(report)
    if report.self_check.observing_changed_nothing is False:
        yield (
            "A pass without hooks gave another output than the one that was compared:"
            " do not rely on this comparison."
        )
    baseline = report.baseline
    if baseline:
        use = "was applied"
        if baseline.written:
            use = "was written: later runs accept errors up to it"
        covered = counted(baseline.sites, "site")
        yield f"The baseline {baseline.file} of {covered} {use}."
    yield from report.notes


def _moved(report: DriftReport) -> Iterator[str]:
    """Yield the layers that add most by themselves, and the tokens that moved most."""
    layers = report.moved_layers or []
    tokens = report.moved_tokens or []
    names = [
        f"`{layer.site}` ({layer.local:.2%})"
        for layer in layers[:3]
        if layer.local >= LEAST_SHOWN
    ]
    if layers and not any(layer.largest for layer in layers):
        yield "No layer adds anything by itself: rounding is the whole of it."
    elif layers and not names:
        yield (
            "No layer adds 0.01% of the norm or more by itself, in the median over"
            " the tokens."
        )
    elif names:
        yield (
            "Most is added at " + ", ".join(names) + ": the median error over the"
            " tokens that the layer makes by itself, as a share of the norm."
        )
    if tokens:
        places = []
        for token in tokens[:3]:
            moved = f"{token.error:.2%} of the norm"
            if token.kl is not None:
                moved = f"{token.kl:.2g} nats"
            places.append(
                f"{quote(token.token)} (position {token.position} of text"
                f" {token.text}, {moved})"
            )
        yield f"The tokens that moved most are {', '.join(places)}."


def _tables(report: DriftReport) -> Iterator[Table]:
    """Yield the sites that differ, the first of them in front."""
    if report.explained_by in CHANGES and report.drifted:
        # Those that add most in front.
        layer_rows = [
            (
                layer.site,
                f"{layer.local:.2%}",
                f"{layer.largest:.2%}",
                f"{layer.total:.2%}",
            )
            for layer in (report.moved_layers or [])[: 2 * MOST_ROWS]
        ]
        yield Table(
            ("site", "added here", "at its worst token", "with what came before"),
            layer_rows,
            title=f"What {CHANGES[str(report.explained_by)]} costs, layer by layer",
        )
        return
    rows = [
        (site.site, f"{site.error:.3g}", _times(site.beyond))
        for site in report.drifting_sites[:MOST_ROWS]
    ]
    if len(rows) > 1:
        yield Table(
            ("site", "error", "over the envelope"),
            rows,
            title="Sites that differ by more than noise",
        )


def _verdict(report: DriftReport) -> str:
    if not report.drifted:
        largest = report.largest
        as_given = report.as_given
        if largest.beyond:
            sentence = (
                f"No drift: the largest difference is {largest.beyond:.2g} times the"
                f" noise envelope, at `{largest.site}`."
            )
        else:
            sentence = (
                "No drift: in one dtype and with one attention kernel, the two are the"
                " same bit for bit."
            )
        if as_given and as_given.error:
            sentence += (
                f" As they were given, the two differ by at most {as_given.error:.2g}"
                f" of the norm, at `{as_given.site}`."
            )
        return sentence
    drift = f"Drift: the two first differ at `{report.first_site}`"
    # Within the envelope at every token, but too alike at all of them to be noise.
    if report.beyond <= 1 and report.systematic:
        systematic = report.systematic
        size = systematic.size
        differences = {
            "scale": f"is {1 + size:.5g} times the reference's",
            "bias": f"is shifted by {size:.2%} of its size, the same at every token",
            "gain": f"has channels that are scaled by {size:.2%} of its size",
            "linear": (
                f"differs by {size:.2%} of its size, as a linear function of the state"
            ),
        }
        return (
            f"{drift}. No token shows it alone, but over all of them"
            f" `{systematic.part}` {differences[systematic.pattern]},"
            f" {_times(systematic.beyond)} what sound programs differ by."
        )
    token = report.first_token
    if token:
        drift += (
            f" (largest at {quote(token.token)}, position {token.position} of"
            f" text {token.text})"
        )
    return f"{drift}, by {_times(report.beyond)} the noise envelope."


def _in_output(consequences: Consequences) -> str:
    """Say how far the predictions of the next token are apart."""
    kl, positions = consequences.kl_max, counted(consequences.of, "position")
    where = "the one position" if consequences.of == 1 else f"all of {positions}"
    if not kl:
        return f"In the output, the KL divergence is 0 at {where}."
    if consequences.of == 1:
        changed = "another" if consequences.top1_changed else "the same"
        return (
            f"In the output, the KL divergence is {kl:.3g} nats at {where}; the most"
            f" likely next token is {changed}."
        )
    return (
        f"In the output, the KL divergence is {consequences.kl_mean:.3g} nats on"
        f" average and {kl:.3g} at most; the most likely next token changes at"
        f" {consequences.top1_changed:,} of {positions}."
    )


def _explanation(report: DriftReport) -> str:
    """Say which change of weights explains the difference."""
    explained_by = report.explained_by
    if explained_by == "adapter":
        return (
            "This is an adapter and not a fault of code: without it, the two give the"
            " same states."
        )
    what = _which_weights(report.changed_weights)
    if explained_by == "weights" and report.unexplained:
        return (
            f"This is a change of weights and not a fault of code, but not quantisation"
            f" alone: {what}, which rounding cannot do."
        )
    return (
        f"This is {CHANGES.get(str(explained_by), 'a change of weights')} and not a"
        f" fault of code: with the candidate's own weights, the reference's code gives"
        f" the candidate's states. {capitalised(what)}."
    )


def _which_weights(changed: Sequence[WeightChange], all_the_same: str = "") -> str:
    """Say how many weights differ, and which of them most."""
    largest = max(changed, key=lambda weight: weight.relative)
    which = f"`{largest.name}` by {number(largest.relative, 2)} of its norm"
    if len(changed) > 1:
        return f"{len(changed)} weights differ{all_the_same}, most of all {which}"
    mark = ":" if all_the_same else ","
    return f"one weight differs{all_the_same}{mark} {which}"


def _times(beyond: float) -> str:
    return "infinitely many times" if np.isinf(beyond) else f"{number(beyond)} times"


def _module(report: DriftReport) -> str:
    name = "the candidate itself, outside all of its submodules"
    if report.module:
        name = f"`{report.module}`"
    in_code = ""
    if report.own_code:
        in_code = "; its parts and weights agree, so the fault is in its own code"
    sentence = f"The module at fault is {name}{in_code}."
    others = len(report.drifting_sites) - 1
    # Sites of whole passes were not compared on equal input.
    if report.compared != "parts" or not others:
        return sentence
    differ = "site differs" if others == 1 else "sites differ"
    return f"{sentence} {others} more {differ} on equal input."


def _measured(report: DriftReport) -> str:
    noise = report.noise
    passes = report.passes
    if noise.made_of == ["tolerance"]:
        return (
            "Noise was not measured, as both sides are saved: the envelope is the"
            " rounding tolerance of the dtype."
        )
    sources = "; ".join(NOISE.get(name, name) for name in noise.made_of)
    measured = "No noise could be measured"
    if sources:
        measured = f"Noise was measured with {sources}"
    sentence = (
        f"{measured}. The noise envelope is {noise.margin} times that noise"
        f" ({passes.reference:g} passes of the reference and"
        f" {passes.candidate:g} of the candidate)."
    )
    smallest = report.smallest_fault
    if smallest is None:
        return sentence
    typical = f"{100 * smallest.typical:.2g}%"
    largest = f"{100 * smallest.largest:.2g}%"
    sentence += (
        f" A difference that is the same at every token shows from about {typical} of a"
        " part's output on"
    )
    if typical == largest:
        return f"{sentence}."
    return (
        f"{sentence}, and in the least sensitive part, `{smallest.part}`, from"
        f" {largest} on."
    )

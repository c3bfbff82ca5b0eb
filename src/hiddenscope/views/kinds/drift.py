"""Where a candidate leaves its reference: the verdict, errors by site and token, and
their growth along the layers.
"""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Facts, Result, Table
from hiddenscope.views.drawing import as_prose, grid_of, labels, quoted, side_names
from hiddenscope.views.values import Grid, Lines, Section, Series, View

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
MOST_ROWS = 8


def views(result: Result) -> Iterator[View]:
    """Errors by site and token; then along the sites, with the noise envelope."""
    grid = grid_of(
        result, [name for name in MEASURES if name in result.data], _title(result)
    )
    if grid is not None:
        yield grid
    series = [
        Series(words, _drawn(result, key))
        for key, words in LINES.items()
        if key in result.data
    ]
    series.append(Series("noise envelope", _drawn(result, "envelope"), style="dash"))
    title = f"The error along the layers of {result.facts['candidate']}"
    unit = "L2 over the reference's norm"
    yield Lines(
        title,
        labels(result.data, "site"),
        tuple(series),
        y_name="largest error",
        unit=unit,
        scale="log",
    )


def _drawn(
    result: Result, key: str
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """A line on a log scale: no error at all is a gap."""
    values = result.data[key].to_numpy()
    return np.where(values > 0, values, np.nan).astype(np.float32)


def _title(result: Result) -> str:
    """The two sides; where they are one model, each with what differs: its dtype, say."""
    reference, candidate = (
        str(result.facts[name]) for name in ("reference", "candidate")
    )
    if reference == candidate and isinstance(
        other := result.source.get("candidate"), dict
    ):
        reference, candidate = side_names({**result.source, "other": other})
    return f"The error of {candidate} against {reference}"


def findings(result: Result) -> Iterator[str]:
    """The verdict first; then the module, what it looks like, what it does to the
    output, and how it was measured.
    """
    facts = result.facts
    yield _verdict(facts)
    if facts["module"] is not None:
        yield _module(facts)
    yield from (f"{hint['evidence']}" for hint in facts["hints"])
    if facts["consequences"]:
        yield from _consequences(facts["consequences"])
    if not facts["drifted"] and facts.get("changed_weights"):
        yield _changed_weights(facts["changed_weights"])
    yield _measured(facts)
    if facts["self_check"]["observing_changed_nothing"] is False:
        yield (
            "A pass without hooks gave another output than the one that was compared:"
            " do not rely on this comparison."
        )
    if baseline := facts.get("baseline"):
        done = (
            "was written: later runs accept errors up to it"
            if baseline["written"]
            else "was applied"
        )
        yield f"The baseline {baseline['file']} of {baseline['sites']} sites {done}."
    yield from facts["notes"]


def _verdict(facts: Facts) -> str:
    if not facts["drifted"]:
        return _no_drift(facts)
    where = f"`{facts['first_site']}`"
    if facts["beyond"] <= 1:
        return (
            f"Drift: the two first differ at {where}."
            f" {_systematically(facts['systematic'])}"
        )
    if token := facts["first_token"]:
        where += (
            f" (largest at {quoted(token['token'])}, position {token['position']} of"
            f" text {token['text']})"
        )
    return (
        f"Drift: the two first differ at {where}, by {_times(facts['beyond'])} the"
        " noise envelope."
    )


def _no_drift(facts: Facts) -> str:
    """Say how near the envelope the largest difference comes, and how far apart the two
    are as they were given.
    """
    largest, as_given = facts["largest"], facts.get("as_given")
    if largest["beyond"]:
        how = (
            f"{largest['beyond']:.2g} times the noise envelope, at `{largest['site']}`"
        )
        sentences = [f"No drift: the largest difference is {how}."]
    else:
        sentences = [
            "No drift: in one dtype and with one attention kernel, the two are the same"
            " bit for bit."
        ]
    if as_given and as_given["error"]:
        plain = f"{as_given['error']:.2g} of the norm, at `{as_given['site']}`"
        sentences.append(f"As they were given, the two differ by at most {plain}.")
    return " ".join(sentences)


def _systematically(systematic: Facts) -> str:
    """Describe a difference that is too small to show at any one token."""
    size, part = systematic["size"], f"`{systematic['part']}`"
    does = {
        "scale": f"is {1 + size:.5g} times the reference's",
        "bias": f"is shifted by {size:.2%} of its size, the same at every token",
        "gain": f"has channels that are scaled by {size:.2%} of its size",
        "linear": (
            f"differs by {size:.2%} of its size, as a linear function of the state"
        ),
    }[systematic["pattern"]]
    words = f"No token shows it alone, but over all of them {part} {does}"
    return f"{words}, {_times(systematic['beyond'])} what sound programs differ by."


def _changed_weights(changed: list[Facts]) -> str:
    """Say which weights differ although no state does."""
    largest = max(changed, key=lambda weight: weight["relative"])
    which = f"`{largest['name']}` by {largest['relative']:.2g} of its norm"
    if len(changed) == 1:
        return (
            f"One weight differs all the same: {which}. The states do not show it on"
            " these texts."
        )
    return (
        f"{len(changed)} weights differ all the same, most of all {which}. The states"
        " do not show it on these texts."
    )


def _times(beyond: float) -> str:
    return "infinitely many times" if np.isinf(beyond) else f"{beyond:,.3g} times"


def _module(facts: Facts) -> str:
    name = (
        f"`{facts['module']}`"
        if facts["module"]
        else "the candidate itself, outside all of its submodules"
    )
    own = (
        "; its parts and weights agree, so the fault is in its own code"
        if facts["own_code"]
        else ""
    )
    others = len(facts["drifting_sites"]) - 1
    more = (
        f" {others} more {'site differs' if others == 1 else 'sites differ'} on equal"
        " input."
        if others
        else ""
    )
    more = more if facts["compared"] == "parts" else ""
    return f"The module at fault is {name}{own}.{more}"


def _consequences(facts: Facts) -> Iterator[str]:
    changed, of = facts["top1_changed"], facts["of"]
    mean, largest = facts["kl_mean"], facts["kl_max"]
    yield (
        f"In the output, the KL divergence is {mean:.3g} nats on average and"
        f" {largest:.3g} at most; the most likely next token changes at {changed:,} of"
        f" {of:,} positions."
    )
    for part in facts.get("restored", []):
        where = (
            f"`{part['sites'][0]}`"
            if len(part["sites"]) == 1
            else f"all {len(part['sites'])} sites that differ"
        )
        share = part["share"]
        does = f"removes {share:.1%} of" if share >= 0 else f"adds {-share:.1%} to"
        yield (
            f"Putting the reference's states back at {where} {does} the KL divergence."
        )


def _measured(facts: Facts) -> str:
    if facts["noise"]["made_of"] == ["tolerance"]:
        return (
            "Noise was not measured, as both sides are saved: the envelope is the"
            " rounding tolerance of the dtype."
        )
    sources = "; ".join(NOISE.get(name, name) for name in facts["noise"]["made_of"])
    passes = facts["passes"]
    counted = (
        f"{passes['reference']:g} passes of the reference and {passes['candidate']:g}"
        " of the candidate"
    )
    measured = (
        f"Noise was measured with {sources}"
        if sources
        else "No noise could be measured"
    )
    sentence = (
        f"{measured}. The noise envelope is {facts['noise']['margin']} times that noise"
        f" ({counted})."
    )
    smallest = facts.get("smallest_fault")
    if smallest is None:
        return sentence
    typical, largest = (f"{100 * smallest[key]:.2g}%" for key in ("typical", "largest"))
    shows = (
        f"A difference that is the same at every token shows from about {typical} of a"
        " part's output on"
    )
    if typical == largest:
        return f"{sentence} {shows}."
    return (
        f"{sentence} {shows}, and in the least sensitive part, `{smallest['part']}`,"
        f" from {largest} on."
    )


def sections(result: Result) -> Iterator[Section]:
    """The verdict with the grid, then the growth."""
    shown = tuple(views(result))
    maps, lines = (
        tuple(view for view in shown if isinstance(view, kind))
        for kind in (Grid, Lines)
    )
    reading = (
        "Every cell compares one hidden state of the candidate with that of the"
        " reference. The colour is at first the relative error: the L2 norm of the"
        " difference over the norm of the reference's state."
    )
    yield Section(
        "Drift" if result.facts["drifted"] else "No drift",
        as_prose(findings(result)),
        maps,
        reading,
    )
    explained = [sentence for key, sentence in ERRORS.items() if key in result.data]
    how = " ".join(
        [
            *explained,
            "Errors below the dashed line, the noise envelope, can be rounding.",
        ]
    )
    yield Section("How does the error grow?", "", lines, how)


def tables(result: Result) -> Iterator[Table]:
    """The sites that differ, the first of them in front."""
    rows = [
        (site["site"], f"{site['error']:.3g}", _times(site["beyond"]))
        for site in result.facts["drifting_sites"][:MOST_ROWS]
    ]
    if len(rows) > 1:
        yield Table(
            ("site", "error", "over the envelope"),
            rows,
            title="Sites that differ by more than noise",
        )

"""Monitors: probes that pool the scores of tokens, and their test on other texts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hiddenscope.analyses.probe.design import Design, ProbeTarget
from hiddenscope.analyses.probe.labels import Rows, labelled_rows
from hiddenscope.analyses.probe.story import Alarm, ProbeReport, TestScore
from hiddenscope.errors import StatesError
from hiddenscope.linear.intervals import wilson
from hiddenscope.linear.probe import Probe, Task, negatives_needed
from hiddenscope.measures.grouped import effective_count
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.states.arrays import Floats, Ints
from hiddenscope.texts import number_groups

# A pooling is learnt again for every labelling, which takes as long as the first time.
PERMUTATIONS = 19
CONTROLS = 2
# Shares of false alarms for which a test says where a probe rings.
RATES = (0.05, 0.01, 0.001)


def pooled_design(rows: Rows, target: ProbeTarget, design: Design) -> Design:
    """Return a design with fewer labellings; refuse all but two classes."""
    if target.classes is None or len(target.classes) > 2:
        raise StatesError(
            f"Cannot pool the scores of tokens of {rows.name}",
            "that takes two classes, of which a token has one score",
            'Give labels of two classes, or use pool="mean".',
        )
    smallest = design.smallest_p
    if smallest is not None:
        smallest = max(smallest, 1 / (PERMUTATIONS + 1))
    return replace(
        design,
        targets=design.targets[: 1 + CONTROLS],
        permuted=design.permuted[: 1 + PERMUTATIONS],
        smallest_p=smallest,
    )


def rows_of_test(
    source: Any, test: Any, train: Rows, task: Task, pool: Pooling | None
) -> Rows:
    """Read a test, without groups of texts of which one is in the training data."""
    if not isinstance(source, Model):
        is_pair = isinstance(test, tuple) and len(test) == 2
        source, test = test if is_pair else (None, None)
        if not isinstance(source, Readable | Pair):
            reason = "it has no states"
            raise StatesError("Cannot test", reason, "Give test=(states, labels).")
    rows = labelled_rows(source, test, task, train.sites, pool)
    problem = f"Cannot test on {rows.name}"
    unknown = set(map(str, rows.labels)) - set(map(str, train.labels))
    if task == "classify" and unknown:
        reason = f"the class {min(unknown)[:40]!r} is not in the training data"
        raise StatesError(problem, reason, "Leave its texts out.")
    known = train.keys
    pairs = zip(rows.text_names, rows.groups, strict=True)
    shared = {group for name, group in pairs if name.partition("\0")[0] in known}
    fresh = [row for row, group in enumerate(rows.groups) if group not in shared]
    if not fresh:
        reason = "all of its texts, or of their groups, are in the training data"
        raise StatesError(problem, reason, "Give other texts.")
    return replace(rows.select(fresh), left_out=len(rows.labels) - len(fresh))


def tested(result: Result, report: ProbeReport, rows: Rows) -> Result:
    """Score the probes of all rows on a test, at every site; an R² has no interval."""
    labels = np.array(rows.labels)
    if "class" in result.data.coords:
        labels = labels.astype(str).astype(result.data["class"].dtype)
    count = effective_count(number_groups(rows.groups))
    by_site = {}
    for number, site in enumerate(rows.sites):
        states: Any = rows.values[number]
        if rows.scored is not None:
            states = [text[number] for text in rows.scored]
        score = Probe.of(result, site).score(states, labels)
        by_site[str(site)] = [score]
        if report.score == "accuracy":
            by_site[str(site)] += wilson(score, count)
    columns = np.array(list(by_site.values())).T
    for end, values in zip(("", "_low", "_high"), columns, strict=False):
        name = f"test_{report.score}{end}"
        result.data[name] = "site", values, {"long_name": name.replace("_", " ")}
    score, *ends = by_site[report.best.site]
    scores: dict[str, Any] = {report.score: score}
    test = TestScore(
        **rows.belonging.facts | {"texts": len(set(rows.text_names))},
        data=rows.name,
        shared=rows.left_out,
        interval=ends or None,
        **scores,
    )
    if ends:
        most = max(Counter(rows.labels).values())
        test = replace(test, chance=most / len(labels))
    if rows.scored is not None:
        probe = Probe.of(result)
        row = list(map(str, rows.sites)).index(report.best.site)
        peaks = np.array([probe.highest(text[row]) for text in rows.scored])
        groups = np.array(number_groups(rows.groups))
        is_negative = labels == probe.classes_[0]
        # Of texts that belong together the loudest counts.
        negatives = [
            peaks[is_negative & (groups == group)].max()
            for group in np.unique(groups[is_negative])
        ]
        alarms = _alarms(probe, negatives, peaks[~is_negative], groups[~is_negative])
        test = replace(test, negatives=len(negatives), alarms=list(alarms))
    return Result("probe", result.data, replace(report, test=test), result.source)


def _alarms(
    probe: Probe, negatives: list[float], positives: Floats, groups: Ints
) -> Iterator[Alarm]:
    """Yield for each rate the threshold and what it catches, or what that takes."""
    for rate in RATES:
        needed = negatives_needed(rate)
        if len(negatives) < needed:
            yield Alarm(rate=rate, needed=needed)
            continue
        threshold = probe.threshold(negatives, false_positives=rate)
        alarm = Alarm(
            rate=rate,
            needed=needed,
            value=threshold.value,
            alarms=threshold.alarms,
            at_most=threshold.at_most,
        )
        if len(positives):
            caught = float((positives > threshold.value).mean())
            interval = list(wilson(caught, effective_count(groups)))
            alarm = replace(alarm, caught=caught, interval=interval)
        yield alarm

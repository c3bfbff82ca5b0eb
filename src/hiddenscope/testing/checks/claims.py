"""Laws of claims: what is said is computed and tested, copies make nothing surer, and
few texts claim nothing.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import hiddenscope as hs
from hiddenscope.results.report import FEWEST_GROUPS
from hiddenscope.testing.checks.law import (
    answer_to,
    hold,
    law,
    none_of,
    only_if,
    result_of,
)
from hiddenscope.testing.checks.outcomes import hold_ours
from hiddenscope.testing.comparing import ROUNDING, differences, flat_facts
from hiddenscope.testing.entries import Entry, data_of, outcome_of
from hiddenscope.testing.sentences import (
    NUMBER,
    bare,
    sentences,
    unbacked,
    unsound,
)
from hiddenscope.testing.subjects import Subject

GROUPED = ("contrast", "pairs", "data", "texts")
# What says how sure a number is, among variables and among facts.
SURE = re.compile(r"(^|_)(p|low|high)$|^verdict")
# An end of an interval may move by this share of its width: it holds for several
# numbers together, of which one may be rounding. Twice the texts move it by 0.15.
SHIFT = 0.1
# A number that is zero but for rounding.
NOTHING = 1e-9
EVERY = hs.Sampling(per_text=10**6)


@law()
def check_sentences_are_sound(entry: Entry, subject: Subject) -> None:
    """No sentence has a NaN, a number that cannot be, more of some than there are, an
    interval without a width, a plural of one, or says nothing of nothing.
    """
    none_of(_unsound(result_of(entry, subject)), "it says")


@law()
def check_what_compares_is_tested(entry: Entry, subject: Subject) -> None:
    """A sentence that compares numbers has a test or an interval, or the result says
    that nothing was tested.
    """
    none_of(unbacked(result_of(entry, subject)), "it compares without a test")


def _unsound(result: hs.Result) -> list[str]:
    problems: list[str] = []
    for sentence in dict.fromkeys(sentences(result)):
        problems += unsound(sentence)
    return problems


@law()
def check_few_groups_have_no_interval(entry: Entry, subject: Subject) -> None:
    """With fewer than eight groups only a share has an interval, whose width does not
    follow from how the few differ; and no p-value is 0.
    """
    none_of(_too_sure(result_of(entry, subject)), "it is too sure")


def _too_sure(result: hs.Result) -> list[str]:
    facts = dict(flat_facts(result.facts))
    problems = []
    for path, value in facts.items():
        if path.rpartition(".")[2] == "p" and value == 0:
            problems.append(f"{path} is 0")
    groups = [
        value
        for path, value in facts.items()
        if path.rpartition(".")[2] == "groups" and isinstance(value, int)
    ]
    for path, low in facts.items():
        if not path.endswith(".low") or low is None:
            continue
        high = facts.get(f"{path.removesuffix('low')}high")
        value = facts.get(f"{path.removesuffix('low')}value")
        if high is None:
            continue
        if low == high:
            problems.append(f"{path} is {low}, and so is high")
        few = min(groups, default=FEWEST_GROUPS) < FEWEST_GROUPS
        if few and value is not None and not 0 <= low <= high <= 1:
            problems.append(f"{path} is {low} over {min(groups)} groups")
    return problems


@law()
def check_sentences_are_computed(entry: Entry, subject: Subject) -> None:
    """Other weights give other numbers in the sentences that have measured ones."""
    first = _by_template(result_of(entry, subject))
    second = _by_template(result_of(entry, subject.redrawn))
    both = [template for template in first if template in second]
    only_if(both, "it says nothing of numbers")
    same = [
        template
        for template in both
        if any(map(_is_measured, first[template]))
        and first[template] == second[template]
    ]
    none_of(
        [f"{', '.join(first[template])} in {template!r}" for template in same],
        "the same for other weights: compute it, or say what is constant in words",
    )


def _is_measured(number: str) -> bool:
    """Tell whether a number has three digits, and one behind the point."""
    digits = re.sub(r"e.*|[^\d.]", "", number)
    # What is behind the point is 0 where a number is at its bound, or a count.
    _, _, behind = digits.partition(".")
    return bool(behind.strip("0")) and len(digits.replace(".", "").lstrip("0")) >= 3


def _by_template(result: hs.Result) -> Mapping[str, list[str]]:
    """Return the numbers of each sentence, by its words."""
    found: dict[str, list[str]] = {}
    for sentence in sentences(result):
        text = bare(sentence)
        found.setdefault(re.sub(NUMBER, "#", text), []).extend(re.findall(NUMBER, text))
    return found


@law()
def check_copies_make_nothing_surer(entry: Entry, subject: Subject) -> None:
    """Every row that may be in a group, given twice in its own group, leaves intervals,
    p-values and verdicts as they were.
    """
    once, twice = _given_twice(entry, subject)
    if "sampling" in entry.kinds.values():
        # Draws from more texts are others.
        once, twice = once | {"sampling": EVERY}, twice | {"sampling": EVERY}
    first = answer_to(entry, subject, **once)
    second = answer_to(entry, subject, **twice)
    one, other = data_of(first), data_of(second)
    names = [str(name) for name in one.data_vars if SURE.search(str(name))]
    names = [name for name in names if not {"token", "text"} & set(one[name].dims)]
    # The ends of a band that holds half of the tokens are no interval.
    names = [name for name in names if "quartile" not in one[name].attrs["long_name"]]
    facts = [_sure_facts(answer) for answer in (first, second)]
    only_if(names or facts[0], "it is sure of nothing")
    tolerance = max(ROUNDING, subject.rounding)
    missing = [name for name in names if name not in other]
    none_of(missing, "for copies there is no")
    none_of(differences(one[names], other[names], tolerance), "with every row twice")
    hold(facts[0].keys() == facts[1].keys(), "copies have other facts")
    for path, value in facts[0].items():
        same = value == facts[1][path]
        if isinstance(value, float) and facts[1][path] is not None:
            same = (
                abs(value - facts[1][path]) <= SHIFT * _width(facts[0], path) + NOTHING
            )
        hold(same, f"facts.{path} is {facts[1][path]} with each twice, not {value}")


def _width(facts: Mapping[str, Any], path: str) -> float:
    """Return how wide the interval of a fact is; of a p-value, 1."""
    low, high = (
        facts.get(f"{path.rpartition('.')[0]}.{end}") for end in ("low", "high")
    )
    return 1.0 if low is None or high is None else float(high - low)


def _sure_facts(answer: Any) -> dict[str, Any]:
    if not isinstance(answer, hs.Result):
        return {}
    return {
        path: value
        for path, value in flat_facts(answer.facts)
        if SURE.search(path.rpartition(".")[2])
    }


def _given_twice(
    entry: Entry, subject: Subject
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows, each in a group of its own, and the same with each twice."""
    arguments = entry.arguments(subject)
    only_if(not subject.encoder_decoder, "its texts have two sides")
    kinds = {entry.kinds.get(name): name for name in arguments}
    kind = next((kind for kind in GROUPED if kind in kinds), None)
    only_if(kind, "nothing of it is in a group")
    assert kind is not None
    name = kinds[kind]
    if kind in ("contrast", "pairs"):
        pairs: Any = subject.contrasts if kind == "contrast" else subject.pairs
        grouped = [replace(pair, group=number) for number, pair in enumerate(pairs)]
        return {name: grouped}, {name: grouped * 2}
    rows = _rows(subject.labelled[0] if kind == "texts" else arguments[name])
    only_if(len(rows) > 1, "it takes one text")
    if kind == "texts":
        return {name: rows}, {name: rows * 2}
    numbers = list(range(len(rows)))
    once, twice = hs.read(rows, group=numbers), hs.read(rows * 2, group=numbers * 2)
    return {name: once}, {name: twice}


def _rows(data: Any) -> list[Any]:
    """Return labelled texts as pairs, and other texts as they are."""
    if isinstance(data, tuple):
        return list(zip(*data, strict=True))
    return list(data) if isinstance(data, list) else []


@law()
def check_the_smallest_questions(entry: Entry, subject: Subject) -> None:
    """One text, one token, two rows, equal texts, labels that are all the same: each is
    refused in our words, or what is said of it is sound and tested.
    """
    asked_of = list(smallest(entry, subject))
    only_if(asked_of, "it takes no texts")
    problems = []
    for what, changes in asked_of:
        came = outcome_of(partial(entry.run, subject, **changes))
        hold_ours(came, f"{what}: ")
        if isinstance(came.answer, hs.Result):
            said = [*_unsound(came.answer), *unbacked(came.answer)]
            said += _too_sure(came.answer)
            problems += [f"{what}: {problem}" for problem in said]
    none_of(problems, "it says")


def smallest(entry: Entry, subject: Subject) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield questions of the smallest sizes, and what is small in them."""
    arguments = entry.arguments(subject)
    for name, value in arguments.items():
        kind = entry.kinds.get(name)
        if kind in ("text", "texts") and name != "targets":
            texts = [value] if isinstance(value, str) else value
            if not isinstance(texts, list) or not isinstance(texts[0], str):
                continue
            ids = list(subject.model.encode(texts[:1]).ids[0])
            choices: dict[str, Any] = {
                "one token": [ids[:1]],
                "two tokens": [ids[:2]],
            }
            if kind == "texts":
                choices |= {"one text": texts[:1], "equal texts": texts[:1] * 3}
        elif kind in ("contrast", "pairs"):
            pairs = subject.contrasts if kind == "contrast" else subject.pairs
            choices = {"one pair": pairs[:1], "two pairs": pairs[:2]}
            choices |= {"equal pairs": pairs[:1] * 3, "three pairs": pairs[:3]}
        elif kind == "data":
            choices = _small_data(value)
        else:
            continue
        for what, smaller in choices.items():
            changes = {name: smaller}
            if "targets" in arguments and arguments["targets"] is not None:
                changes["targets"] = arguments["targets"][: len(smaller)]
            yield f"{what} as {name}", changes


def _small_data(data: Any) -> dict[str, Any]:
    if not isinstance(data, tuple):
        return {"one row": data[:1], "two rows": data[:2], "equal rows": data[:1] * 3}
    texts, labels = data
    return {
        "one row": (texts[:1], labels[:1]),
        "two rows": (texts[:2], labels[:2]),
        "three rows": (texts[:3], labels[:3]),
        "equal labels": (texts, labels[:1] * len(texts)),
        "equal texts": (texts[:1] * len(texts), labels),
    }

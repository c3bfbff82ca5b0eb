"""What is said and drawn of a result of every analysis, number by number and word by
word, and what holds for all of them.
"""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hiddenscope.results import findings_of, story_of, views_of
from hiddenscope.results.pictures import Grid, Lines, Panels
from hiddenscope.views.page import inline
from hiddenscope.views.render import page
from tests.unit.views.recorded import KINDS, TOLD, all_told, names, recorded


@cache
def told() -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(TOLD.read_text("utf-8"))
    return recording


def of_kind(word: str) -> Iterator[str]:
    return (name for name in names() if name.rpartition("-")[0] == word)


def test_every_kind_is_recorded() -> None:
    assert set(names()) == set(told())
    assert {name.rpartition("-")[0] for name in names()} == set(KINDS)


@pytest.mark.parametrize("word", KINDS)
def test_what_is_said_and_drawn_is_what_was_recorded(word: str) -> None:
    for name in of_kind(word):
        now = json.loads(json.dumps(all_told(name)))
        for part, recording in told()[name].items():
            assert now[part] == recording, f"{name}: see tests/unit/views/record.py"


# One of several, a zero with a sign, none of none, and what is not a number.
VACUOUS = re.compile(
    r"\b1 (groups|layers|sites|texts|tokens|heads|pairs)\b|(?<!\d)0 of 0\b"
    r"|(?<![\w.])[-−]0(\.0+)?(?![\d.])|\bnan\b|\binf\b"
)


def test_no_sentence_says_nothing() -> None:
    for name in names():
        for finding in findings_of(recorded(name)):
            assert not VACUOUS.search(finding), (name, finding)


def test_words_beside_a_picture_speak_of_what_is_in_it() -> None:
    """A line, a list, a class or a scale is mentioned where there is one."""
    for name in names():
        for section in story_of(recorded(name)):
            check_the_words(section)


def check_the_words(section: Any) -> None:
    grids = [view for view in section.views if isinstance(view, Grid)]
    panels = [view for view in section.views if isinstance(view, Panels)]
    styles = set()
    for view in section.views:
        if isinstance(view, Lines):
            styles |= {series.style for series in view.series}
    says = section.reading
    for words, style in (
        ("dashed line", "dash"),
        ("solid line", "line"),
        ("The bars", "bar"),
    ):
        assert words not in says or style in styles
    for word in ("list", "table"):
        assert word not in says or section.tables
    assert "coloured by its class" not in says or all(view.labels for view in panels)
    assert "on a log scale" not in says or grids[0].measures[0].scale == "log"
    for view in grids:
        framed = view.words is not None and view.words.framed
        outlined = framed and max(view.words.settled_rows()) >= 0
        assert ("An outline" in view.note) == outlined
        of_tokens = view.tokens != view.sites and view.x_name in ("token", "")
        assert (view.x_name == "token") == (of_tokens and view.y_name == "site")


def changed(facts: Any, change: Callable[[Any], Any]) -> Any:
    """Return facts with every number changed."""
    if isinstance(facts, dict):
        return {key: changed(value, change) for key, value in facts.items()}
    if isinstance(facts, list):
        return [changed(value, change) for value in facts]
    return change(facts)


def test_large_numbers_are_written_out() -> None:
    """Not "2.73e+04 times" beside "22,627"."""
    for word in ("compare", "drift", "profile", "series", "visibility"):
        result = recorded(f"{word}-0")
        large = changed(result.facts, lambda x: 2e4 * x if type(x) is float else x)
        told = " ".join(findings_of(replace(result, facts=large)))
        assert not re.search(r"\de\+\d", told), told


def test_one_thing_is_not_called_things() -> None:
    for word in ("compare", "embed", "graft", "lens", "steer", "visibility"):
        result = recorded(f"{word}-0")
        one = changed(result.facts, lambda x: min(x, 1) if type(x) is int else x)
        told = " ".join(findings_of(replace(result, facts=one)))
        assert not re.search(r"\b1 (?!is|moves)\w+s\b", told), told


def test_a_page_begins_with_one_finding_and_explains_every_number() -> None:
    """What was found is read before the picture, how to read it after."""
    for word in KINDS:
        result = recorded(f"{word}-0")
        html = page(result)
        lead = inline(next(iter(findings_of(result))))
        picture = min(
            html.index(mark)
            for mark in ("<section data-view", '<figure class="listing')
            if mark in html
        )
        assert html.index('class="prose claim"') < html.index(lead) < picture
        assert "{'" not in html.partition("<main>")[2].partition("<noscript>")[0]
        # `embed` is shown by the app, beside words of its own.
        if result.kind == "embed":
            continue
        assert picture < html.index('class="prose guide"')
        sections = story_of(result)
        assert all(section.reading for section in sections), word
        assert sections[0].prose and not sections[0].folded
        shown = [view.title for section in sections for view in section.views]
        drawn = [view.title for view in views_of(result)]
        # A search shows lists in the place of its grids.
        assert sorted(shown) == sorted(drawn) or result.kind == "search"
        # Notes are printed too, where nobody can point.
        assert not any("Point at" in view.note for view in views_of(result))

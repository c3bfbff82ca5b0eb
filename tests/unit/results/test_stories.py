"""Tell the results of an analysis that is in somebody else's package."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import xarray

import hiddenscope as hs
from hiddenscope.catalog import STORIES
from hiddenscope.results.story import story_of

DECLARATION = '''
import xarray

from hiddenscope.interface import analysis
from hiddenscope.results import Result
from {story} import SizesReport

@analysis()
def {word}(model):
    """Measure one size."""
    data = xarray.Dataset({{"size": ("site", [1.0, 2.5])}}, {{"site": ["a", "b"]}})
    return Result("{word}", data, SizesReport(largest=2.5), {{"model": "toy"}})
'''
STORY = '''
from hiddenscope.results import Report, Section, frozen

@frozen
class SizesReport(Report):
    largest: float

def story(report: SizesReport, result):
    """Yield one section."""
    yield Section("Sizes", (f"The largest is {report.largest:g}.",))
'''


@pytest.fixture(autouse=True)
def _same_stories() -> Iterator[None]:
    before = dict(STORIES)
    yield
    STORIES.clear()
    STORIES.update(before)
    for name in ("theirs", "theirs.story", "plain"):
        sys.modules.pop(name, None)


def write_package(folder: Path, word: str) -> None:
    (folder / "theirs").mkdir()
    declaration = DECLARATION.format(word=word, story="theirs.story")
    (folder / "theirs" / "__init__.py").write_text(declaration, "utf-8")
    (folder / "theirs" / "story.py").write_text(STORY, "utf-8")


def test_the_story_beside_somebody_elses_analysis_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "sizes")
    monkeypatch.syspath_prepend(tmp_path)
    result = importlib.import_module("theirs").sizes(None)
    assert result.summary() == "sizes of toy\n  The largest is 2.5."
    (section,) = story_of(result)
    # The docs of this package have no page of it.
    assert (section.title, section.docs) == ("Sizes", "")
    result.save(tmp_path / "sizes.json")
    assert hs.Result.load(tmp_path / "sizes.json").summary() == result.summary()
    # A page shows the story in place of a list of facts.
    result.save(tmp_path / "sizes.html")
    page = (tmp_path / "sizes.html").read_text("utf-8")
    assert "The largest is 2.5." in page and "What was found" not in page


def test_a_word_of_the_catalog_keeps_its_story(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path, "lens")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("theirs")
    assert STORIES["lens"] == "hiddenscope.analyses.lens.story"


def test_an_analysis_without_a_story_shows_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declaration = STORY + DECLARATION.format(word="sizes", story="__main__")
    declaration = declaration.replace("from __main__ import SizesReport\n", "")
    (tmp_path / "plain.py").write_text(declaration, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    result = importlib.import_module("plain").sizes(None)
    assert result.summary() == "sizes of toy\n  largest  2.5"
    assert "sizes" not in STORIES


def test_a_file_names_no_module(tmp_path: Path) -> None:
    data = xarray.Dataset({"size": ("site", [1.0, 2.5])}, {"site": ["a", "b"]})
    result = hs.Result("theirs.story", data, {"largest": 2.5}, {"model": "toy"})
    result.save(tmp_path / "result.json")
    assert "largest  2.5" in hs.Result.load(tmp_path / "result.json").summary()

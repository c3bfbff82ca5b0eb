"""What the docs show runs, and what they link to is there."""

import re
from pathlib import Path

import pytest

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES
from hiddenscope.loading import zoo
from tests.places import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
# These run in a kernel: tests/test_notebooks.py.
NOTEBOOKS = ROOT / "docs" / "notebooks"
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
# What a page of a question says, in this order.
SECTIONS = ["How to read it", "Formula", "Cost", "Pitfalls", "Reference"]
# Pages that are laid out otherwise.
OTHERWISE = {"visibility"}
QUESTIONS = [
    *(analysis.word for analysis in ANALYSES if analysis.word not in OTHERWISE),
]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def has_examples(page: Path) -> bool:
    runs_here = page.parent != NOTEBOOKS
    return runs_here and bool(EXAMPLE.search(page.read_text("utf-8")))


@pytest.fixture(scope="module")
def _default_model() -> None:
    try:
        hs.load()
    except hs.errors.Unreachable as error:
        pytest.skip(f"the docs use the default model: {error}")


@pytest.mark.real
@pytest.mark.usefixtures("_default_model")
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if has_examples(page)],
    ids=name,
)
def test_the_examples_of_a_page_run_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = page.read_text("utf-8")
    namespace: dict[str, object] = {"__name__": "example"}
    for example in EXAMPLE.finditer(text):
        # So that a traceback points at the line of the page.
        above = text[: example.start(1)].count("\n")
        exec(compile("\n" * above + example[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [
        link
        for link in LINK.findall(page.read_text("utf-8"))
        if not (page.parent / link).exists()
    ]
    assert missing == []


@pytest.mark.parametrize("word", QUESTIONS)
def test_the_page_of_a_question_is_laid_out_like_the_others(word: str) -> None:
    text = (ROOT / "docs" / f"{word}.md").read_text("utf-8")
    headings = [heading for heading in HEADING.findall(text) if heading in SECTIONS]
    assert headings == SECTIONS
    opening = text.partition("\n## ")[0]
    assert "](pictures/" in opening, "a picture comes first"
    assert EXAMPLE.search(opening), "and an example"
    formula = text.partition("## Formula")[2].partition("\n## ")[0]
    assert "$$" in formula


def test_every_model_of_the_zoo_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "models.md").read_text("utf-8")
    assert [
        row.name
        for row in zoo.listing()
        if not re.search(rf"`{row.name}` .*\| {row.licence} \|", page)
    ] == []

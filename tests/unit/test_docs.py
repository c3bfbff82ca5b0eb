"""What the docs link to is there, and pages of one kind are laid out alike."""

import json
import re
import tomllib
from pathlib import Path

import pytest

import hiddenscope as hs
from docs.outputs import same_output, shown_output, with_output
from docs.site.notebooks import notebook_text
from docs.site.structure import name_groups, sections
from hiddenscope.catalog import ANALYSES, PUBLIC
from hiddenscope.diagnosis import NOT_FOR_USERS
from hiddenscope.loading import zoo
from tests.places import ROOT
from tests.slow.docs.running import DOCS, EXAMPLE, NOTEBOOKS, PAGES

LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
NAME = re.compile(r"(?<![\w.\"'/])hs\.([A-Za-z]\w*(?:\.[A-Za-z]\w*)*)")
HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
# What a page of a question says, in this order.
SECTIONS = ["How to read it", "Formula", "Cost", "Pitfalls", "Reference"]
# Pages that are laid out otherwise.
OTHERWISE = {"visibility"}
# A reader sees it beside its example.
LINES_OF_OUTPUT = 25


def test_links_lead_somewhere() -> None:
    missing = []
    for page in PAGES:
        for link in LINK.findall(page.read_text("utf-8")):
            if not (page.parent / link).exists():
                missing.append(f"{page.relative_to(ROOT)}: {link}")
    assert missing == []


def test_names_in_the_docs_exist() -> None:
    """In prose too, which is not run."""
    missing = []
    for page in PAGES:
        for name in set(NAME.findall(page.read_text("utf-8"))):
            value: object = hs
            for part in name.split("."):
                # What an object has is not known from its class.
                fields = getattr(value, "__dataclass_fields__", {})
                if part not in fields and not hasattr(value, part):
                    missing.append(f"{page.relative_to(ROOT)}: hs.{name}")
                value = getattr(value, part, None)
    assert missing == []


def test_pages_of_one_kind_are_laid_out_alike() -> None:
    for word in {analysis.word for analysis in ANALYSES} - OTHERWISE:
        text = (DOCS / f"{word}.md").read_text("utf-8")
        found = [heading for heading in HEADING.findall(text) if heading in SECTIONS]
        assert found == SECTIONS, word
        opening = text.partition("\n## ")[0]
        assert "](pictures/" in opening and EXAMPLE.search(opening), word
        assert "$$" in text.partition("## Formula")[2].partition("\n## ")[0], word
    for page in (DOCS / "experiments").glob("*.md"):
        text = page.read_text("utf-8")
        assert f"python examples/{page.stem.replace('-', '_')}.py" in text
        for heading in ("Expected", "Seen", "What it does not show"):
            assert f"## {heading}" in text, page.name


@pytest.mark.parametrize("word", [analysis.word for analysis in ANALYSES])
def test_the_page_of_an_analysis_shows_what_its_example_prints(word: str) -> None:
    """That it prints just this is seen by tests/slow/docs/test_docs.py."""
    page = (DOCS / f"{word}.md").read_text("utf-8")
    output = shown_output(page)
    assert output and output.strip(), f"run `python -m docs.outputs {word}`"
    assert len(output.splitlines()) <= LINES_OF_OUTPUT
    assert with_output(page, output) == page


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("a   0.78\nb  -0.01", "a 0.77\nb 0.00"),
        ("a norm of 22,628", "a norm of 22,900"),
        ("98% (84% to 100%)", "97% (85% to 100%)"),
        ("an error of at most 6e-08", "an error of at most 1.2e-07"),
        ("by 158 times the noise envelope", "by 77.1 times the noise envelope"),
    ],
)
def test_outputs_agree_that_machines_rounded_differently(
    printed: str, shown: str
) -> None:
    assert same_output(printed, shown)


@pytest.mark.parametrize(
    ("printed", "shown"),
    [
        ("from layer.24 on", "from layer.25 on"),
        ("17 values", "18 values"),
        ("a cosine of 0.34", "a cosine of 0.37"),
        ("1.1e-03 nats", "1.2e-03 nats"),
        ("adds +0.91", "adds -0.91"),
        ("at 3 tokens", "at 3 tokens\nand more"),
        ("by 158 times the norm", "by 77.1 times the norm"),
    ],
)
def test_outputs_that_say_something_else_do_not_agree(printed: str, shown: str) -> None:
    assert not same_output(printed, shown)


def test_everything_is_in_the_docs_once() -> None:
    """Models of the zoo in their table, pages in a section, names in the reference."""
    models = (DOCS / "models.md").read_text("utf-8")
    for model in zoo.ZOO.values():
        row = rf"`{model.name}` .*\| {model.licence} \|"
        assert re.search(row, models), model.name
    listed = [DOCS / "index.md"]
    for section in sections():
        listed += [section.page.path, *(page.path for page in section.pages)]
    # What was tried and failed is for engineers, who read it in the repository.
    expected = {*DOCS.rglob("*.md"), *ROOT.glob("*.md")} - {DOCS / "log.md"}
    assert sorted(listed) == sorted(expected), "see docs/site/structure.toml"
    names = [name for group in name_groups() for name in group.names]
    assert sorted(names) == sorted([*PUBLIC, "errors"])


def test_how_to_install_it_is_said_as_it_is() -> None:
    """Every extra is in the table, and no page takes it from an index that has it not."""
    table = (DOCS / "install.md").read_text("utf-8").partition("## Extras")[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in set(project["optional-dependencies"]) - NOT_FOR_USERS:
        assert f"\n| `{extra}` |" in table, extra
    opening = (DOCS / "index.md").read_text("utf-8").partition("<!-- sections")[0]
    for said in ("make demo", "(install.md)", "<!-- live: "):
        assert said in opening, "the first page shows a result, and how to have one"
    for page in (*PAGES, *NOTEBOOKS.glob("*.ipynb")):
        text = page.read_text("utf-8")
        assert not re.search(r"pip install hiddenscope(?![-\[])", text), page.name


@pytest.mark.parametrize(
    "path", sorted((DOCS / "results").glob("*.nc")), ids=lambda path: path.stem
)
def test_results_that_older_versions_saved_are_told(path: Path) -> None:
    """The site shows them, and a newer version reads what an older one wrote."""
    assert len(hs.Result.load(path).summary().splitlines()) > 1


def test_notebooks_are_made_of_their_pages_and_hold_no_outputs() -> None:
    pages = sorted(NOTEBOOKS.glob("*.md"))
    assert len(pages) == 3
    for page in pages:
        stored = page.with_suffix(".ipynb").read_text("utf-8")
        assert stored == notebook_text(page), "run `make docs`"
        cells = [cell for cell in json.loads(stored)["cells"] if "outputs" in cell]
        assert len(cells) >= 4
        for cell in cells:
            assert cell["outputs"] == [] and cell["execution_count"] is None
        # Neighbours of the page do not come with the notebook.
        assert "](" not in stored

"""The public namespace is flat, whole and honest."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES, PUBLIC, Analysis
from hiddenscope.cli.main import app
from hiddenscope.views.kinds.registry import KINDS
from tests.places import ROOT


def run(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [name for name in hs.__all__ if name != "__version__"])
def test_every_public_name_is_ours_and_says_what_it_is(name: str) -> None:
    value = getattr(hs, name)
    assert value.__doc__
    assert getattr(value, "__module__", value.__name__).startswith("hiddenscope")
    assert name in dir(hs)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hs.nothing  # type: ignore[attr-defined]


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "pandas", "xarray", "rich"}
    loaded = run("import hiddenscope, sys; print(*sys.modules)").split()
    assert not heavy & set(loaded)


ROOM, FUNCTION = (
    "from hiddenscope.extract.job import ExtractJob",
    "from hiddenscope.extract.extract import extract",
)


@pytest.mark.parametrize(
    "steps", [(ROOM, FUNCTION), (FUNCTION, ROOM)], ids=["room first", "function first"]
)
def test_extract_is_the_function_whatever_was_imported_before(
    steps: tuple[str, str],
) -> None:
    same = "assert callable(hs.extract), hs.extract"
    first, second = steps
    lines = ["import hiddenscope as hs", first, same, second, same]
    run("; ".join([*lines, "import hiddenscope.extract", same]))


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(hs.__file__).read_text("utf-8"))
    imports = [
        node for block in tree.body if isinstance(block, ast.If) for node in block.body
    ]
    seen = {
        (node.module, alias.name)
        for node in imports
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    listed = {(f"hiddenscope.{module}", name) for name, module in PUBLIC.items()}
    missing = [
        f"from {module} import {name} as {name}"
        for module, name in sorted(listed - seen)
    ]
    assert not missing, "add to hiddenscope/__init__.py:\n" + "\n".join(missing)
    assert not seen - listed, f"not in the catalog: {sorted(seen - listed)}"


def by_word(analysis: Analysis) -> str:
    return analysis.word


@pytest.mark.parametrize("analysis", ANALYSES, ids=by_word)
def test_an_analysis_is_one_word_everywhere(analysis: Analysis) -> None:
    word = analysis.word
    assert callable(getattr(hs, word))
    assert word in get_command(app).commands  # type: ignore[attr-defined]
    assert (word in KINDS) == (analysis.in_app or analysis.result)
    assert (ROOT / "docs" / f"{word}.md").is_file()
    assert any((ROOT / "tests").glob(f"*/test_{word}.py"))


@pytest.mark.parametrize("analysis", ANALYSES, ids=by_word)
def test_the_docs_and_the_readme_name_every_analysis(analysis: Analysis) -> None:
    questions, readme = (
        (ROOT / page).read_text("utf-8") for page in ("docs/questions.md", "README.md")
    )
    assert (
        f"| [{analysis.word}]({analysis.word}.md) | {analysis.question} |" in questions
    )
    assert re.search(rf"\bhs\.{analysis.word}\b", readme)
    assert f"](docs/{analysis.word}.md)" in readme

"""The public namespace is flat, whole and honest."""

import ast
import re
from pathlib import Path

import pytest
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES, PUBLIC
from hiddenscope.cli.main import app
from tests.places import ROOT


def test_every_public_name_is_ours_and_says_what_it_is() -> None:
    for name in set(hs.__all__) - {"__version__"}:
        value = getattr(hs, name)
        assert value.__doc__, name
        assert getattr(value, "__module__", value.__name__).startswith("hiddenscope")
        assert name in dir(hs)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hs.nothing  # type: ignore[attr-defined]


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
    listed.add(("hiddenscope", "testing"))
    missing = [
        f"from {module} import {name} as {name}"
        for module, name in sorted(listed - seen)
    ]
    assert not missing, "add to hiddenscope/__init__.py:\n" + "\n".join(missing)
    assert not seen - listed, f"not in the catalog: {sorted(seen - listed)}"


def test_an_analysis_is_one_word_everywhere() -> None:
    questions = (ROOT / "docs" / "questions.md").read_text("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    for analysis in ANALYSES:
        word = analysis.word
        assert callable(getattr(hs, word))
        assert word in get_command(app).commands  # type: ignore[attr-defined]
        assert (ROOT / "docs" / f"{word}.md").is_file()
        test = f"test_{word}.py"
        assert any((ROOT / "tests" / "unit").glob(f"*/{test}")), f"write a {test}"
        assert f"| [{word}]({word}.md) | {analysis.question} |" in questions
        assert re.search(rf"\bhs\.{word}\b", readme)
        assert f"](docs/{word}.md)" in readme

"""Sentences that readers had to read twice stay gone, in the docs, on the pages and in
errors.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from hiddenscope import errors
from hiddenscope.catalog import ANALYSES
from hiddenscope.results import Result

ROOT = Path(__file__).parents[1]
WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN += [
    path for kind in ("py", "js") for path in sorted((ROOT / "src").rglob(f"*.{kind}"))
]
TWICE = [
    r"took? the place of its own",
    r"\bis seen of\b|\bsees of\b",
    r"proved to be it",
    r"[Ff]or 1 on\b",
    r"[Cc]ompare of\b",
    r"half or more layer\.",
    r"\bnine tenths\b",
    r"reaches one half",
    r"\bdiffer nowhere\b",
    r"\bbest words?\b",  # top token
    (
        r"(?<!there )\b(?:is|are) no (?:model|grid|array|folder|store|figure|JSON|plain"
        r" file|embeddings?|\.\w+ file)\b"
    ),
    r"\bin disguise\b",
    r"\bknow their texts\b",
]
SAYS = re.compile(
    r"^(?:Cannot|No|Nothing|Too (?:few|little|many)|More than|Text \{\}|\{\}"
    r" \{\})(?: |$)"
    r"|\b(?:cannot|must|has|have|hold|holds|is|are|was|were|takes?|do|does|names|gives?|imports|leaves|needs?|fit|failed)\b"
)
ERRORS = {
    name
    for name in dir(errors)
    if name != "Error" and isinstance(getattr(errors, name), type)
}


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_sentence_has_to_be_read_twice(path: Path) -> None:
    # What was tried, and the names of rows that were measured.
    if path.name in {
        "log.md",
        "bench.md",
    }:
        pytest.skip("a record of what was")
    text = re.sub(r"\s+", " ", path.read_text("utf-8"))
    assert [found[0] for pattern in TWICE for found in re.finditer(pattern, text)] == []


def problems(tree: ast.Module) -> Iterator[str]:
    """The first sentence of every error that a module raises, with {} for what is
    filled in.
    """
    for function in (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
    ):
        assigned = {
            target.id: node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and len(node.args) == 3:
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                yield from strings(node.args[0], assigned) if name in ERRORS else ()


def strings(node: ast.expr, assigned: Mapping[str, ast.expr]) -> Iterator[str]:
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}"
            for part in node.values
        )
    elif isinstance(node, ast.IfExp):
        yield from strings(node.body, assigned)
        yield from strings(node.orelse, assigned)
    elif isinstance(node, ast.Name) and node.id in assigned:
        yield from strings(assigned[node.id], {})


def test_an_error_says_what_cannot_be_done_or_what_is_wrong() -> None:
    found = {
        path.relative_to(ROOT): sentence
        for path in sorted((ROOT / "src").rglob("*.py"))
        for sentence in problems(ast.parse(path.read_text("utf-8")))
        if not SAYS.search(sentence)
    }
    assert found == {}, (
        'an error begins with a sentence ("Cannot use this contrast"), not with a noun'
        ' ("A contrast")'
    )
    checked = problems(
        ast.parse(
            "def f():\n    reason = 'A contrast'\n    raise TextError(reason, 'x', 'y')"
        )
    )
    assert [sentence for sentence in checked if not SAYS.search(sentence)] == [
        "A contrast"
    ]


def test_the_title_of_a_result_is_not_a_verb() -> None:
    import xarray

    verbs = {"compare", "project", "patch", "steer", "cluster", "probe", "graft"}
    for analysis in ANALYSES:
        title = Result(analysis.word, xarray.Dataset(), {}, {"model": "toy"}).title
        assert title.endswith(" toy")
        assert title.split()[0] not in verbs
        bare = Result(analysis.word, xarray.Dataset(), {}, {}).title
        assert bare and not bare.endswith((" in", " of")), bare

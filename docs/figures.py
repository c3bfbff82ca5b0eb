"""Count how heavy and how dense the package is, and write the table of
docs/architecture.md.

python -m docs.figures           print the figures that are read from the sources
python -m docs.figures --run     also those that take running hiddenscope and node
python -m docs.figures --write   also write the first into docs/architecture.md

They inform and fail nothing: a figure that is reached by making the code worse is
missed.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from pathlib import Path

from docs.running import running_rows

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hiddenscope"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"

LAYOUT = {
    tokenize.NEWLINE,
    tokenize.NL,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
# A docstring that opens with one of these describes a thing instead of an action.
NOT_A_VERB = re.compile(
    r"(The|A|An|What|Whether|Which|How|Where|Who|Every|Each|No|All|One|Some|Those"
    r"|This|These)\b"
)
# Names that say nothing of what they hold.
EMPTY_NAMES = {
    "one",
    "own",
    "given",
    "kept",
    "said",
    "told",
    "found",
    "seen",
    "chosen",
    "asked",
    "tried",
    "made",
    "fed",
    "alone",
}


def count(package: Path) -> Counter[str]:
    """Count tokens, statements, comments and constructs of every module."""
    counts: Counter[str] = Counter()
    for path in sorted(package.rglob("*.py")):
        source = path.read_text("utf-8")
        tree = ast.parse(source)
        counts["modules"] += 1
        counts["lines"] += source.count("\n")
        count_tokens(source, docstring_lines(tree), guard_lines(tree), counts)
        for node in ast.walk(tree):
            count_node(node, counts)
        count_private(source, tree, counts)
    return counts


def guard_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that only refuse."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            guard = node.name.lstrip("_").startswith(("check_", "require_"))
        elif isinstance(node, ast.If):
            guard = isinstance(node.body[-1], ast.Raise) and not node.orelse
        else:
            continue
        if guard:
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return lines


def count_private(source: str, tree: ast.Module, counts: Counter[str]) -> None:
    """Count private functions, and those whose name is used at one place."""
    uses = Counter(re.findall(r"\b_[a-z]\w*", source))
    names = [node.name for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    private = {name for name in names if name.startswith("_") and name[1] != "_"}
    counts["functions"] += len(names)
    counts["private"] += len(private)
    counts["called once"] += sum(uses[name] <= 2 for name in private)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings cover."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def count_tokens(
    source: str, docstrings: set[int], guards: set[int], counts: Counter[str]
) -> None:
    """Count the tokens of the code; docstrings and comments are no code."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            counts["comments"] += token.line.strip().startswith("#")
        elif line in docstrings:
            continue
        elif token.type == tokenize.NEWLINE:
            counts["statements"] += 1
        elif token.type not in LAYOUT:
            counts["tokens"] += 1
            counts["guards"] += line in guards
            code.update(range(line, token.end[0] + 1))
            counts["any"] += token.string == "Any"
    counts["code"] += len(code)


def count_node(node: ast.AST, counts: Counter[str]) -> None:
    """Count what makes a statement hard to unfold."""
    if isinstance(node, COMPREHENSIONS):
        counts["comprehensions"] += 1
    elif isinstance(node, ast.IfExp):
        counts["conditionals"] += 1
        inner = (node.body, node.orelse)
        counts["nested"] += any(isinstance(branch, ast.IfExp) for branch in inner)
    elif isinstance(node, ast.Name):
        counts["empty names"] += node.id in EMPTY_NAMES
    elif isinstance(node, ast.arg):
        counts["empty names"] += node.arg in EMPTY_NAMES
    elif isinstance(node, FUNCTIONS):
        docstring = ast.get_docstring(node)
        counts["docstrings"] += docstring is not None
        counts["nouns"] += bool(docstring and NOT_A_VERB.match(docstring))


def source_rows(counts: Counter[str]) -> list[tuple[str, str, str]]:
    """Return the figures that are read from the sources, beside their aims."""
    statements, lines = counts["statements"] / 100, counts["lines"] / 100
    private = counts["private"] / counts["functions"]
    once = counts["called once"] / counts["private"]
    nouns = counts["nouns"] / counts["docstrings"]
    pages = (ROOT / "docs").rglob("*.md")
    words = sum(len(page.read_text("utf-8").split()) for page in pages)
    return [
        ("modules", f"{counts['modules']}", "270"),
        ("tokens of code", f"{counts['tokens']:,}", "360,000"),
        ("tokens of guards", f"{counts['guards']:,}", "22,000"),
        ("private functions, of all", f"{private:.0%}", "35%"),
        ("private functions that are called once", f"{once:.0%}", "45%"),
        ("tokens per line", f"{counts['tokens'] / counts['code']:.1f}", "6 to 8"),
        ("tokens per statement", f"{counts['tokens'] / statements / 100:.1f}", "11"),
        (
            "comprehensions per 100 statements",
            f"{counts['comprehensions'] / statements:.1f}",
            "4",
        ),
        (
            "inline conditionals per 100 statements",
            f"{counts['conditionals'] / statements:.1f}",
            "2.5",
        ),
        ("nested inline conditionals", f"{counts['nested']}", "0"),
        (
            "full-line comments per 100 lines",
            f"{counts['comments'] / lines:.1f}",
            "2 or more",
        ),
        ("`Any` per 100 lines", f"{counts['any'] / lines:.1f}", "1.5"),
        ("docstrings that do not open with a verb", f"{nouns:.0%}", "4%"),
        ("names such as `one`, `given`, `found`", f"{counts['empty names']}", "0"),
        ("words of docs", f"{words:,}", "66,000"),
    ]


def table(rows: list[tuple[str, str, str]]) -> str:
    """Return figures as a table, beside where good codebases stand."""
    lines = ["| figure | here | aim |", "|---|---|---|"]
    lines += [f"| {name} | {value} | {aim} |" for name, value, aim in rows]
    return "\n".join(lines)


def main() -> None:
    """Print the tables, and write the first into the page if that is asked for."""
    figures = table(source_rows(count(PACKAGE)))
    print(figures)
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}", "utf-8")
    if "--run" in sys.argv[1:]:
        print("\n".join(table(running_rows()).splitlines()[2:]))


if __name__ == "__main__":
    main()

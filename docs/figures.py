"""Count how dense the package is to read, and write the table of docs/architecture.md.

python docs/figures.py           print the figures
python docs/figures.py --write   also write them into docs/architecture.md

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
        count_tokens(source, docstring_lines(tree), counts)
        for node in ast.walk(tree):
            count_node(node, counts)
    return counts


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the numbers of the lines that docstrings cover."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return lines


def count_tokens(source: str, docstrings: set[int], counts: Counter[str]) -> None:
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


def table(counts: Counter[str]) -> str:
    """Return the figures as a table, beside where good codebases stand."""
    per_statement = counts["statements"] / 100
    per_line = counts["lines"] / 100
    nouns = counts["nouns"] / counts["docstrings"]
    rows = [
        ("modules", f"{counts['modules']}", ""),
        ("tokens of code", f"{counts['tokens']:,}", "300,000"),
        ("tokens per line", f"{counts['tokens'] / counts['code']:.1f}", "6 to 8"),
        (
            "tokens per statement",
            f"{counts['tokens'] / counts['statements']:.1f}",
            "11",
        ),
        (
            "comprehensions per 100 statements",
            f"{counts['comprehensions'] / per_statement:.1f}",
            "4",
        ),
        (
            "inline conditionals per 100 statements",
            f"{counts['conditionals'] / per_statement:.1f}",
            "2.5",
        ),
        ("nested inline conditionals", f"{counts['nested']}", "0"),
        (
            "full-line comments per 100 lines",
            f"{counts['comments'] / per_line:.1f}",
            "2 or more",
        ),
        ("`Any` per 100 lines", f"{counts['any'] / per_line:.1f}", "1.5"),
        ("docstrings that do not open with a verb", f"{nouns:.0%}", "4%"),
        ("names such as `one`, `given`, `found`", f"{counts['empty names']}", "0"),
    ]
    lines = ["| figure | here | aim |", "|---|---|---|"]
    lines += [f"| {name} | {value} | {aim} |" for name, value, aim in rows]
    return "\n".join(lines)


def main() -> None:
    """Print the table, and write it into the page if that is asked for."""
    figures = table(count(PACKAGE))
    print(figures)
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{figures}\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()

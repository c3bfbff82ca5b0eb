"""Write what the first example of a page prints, in a block below it: `make docs`.

    python -m docs.outputs [PAGE ...]

Without names: the page of every analysis, and each other page that has such a block.
tests/slow/docs/test_docs.py runs all examples, and compares what the first one prints.
"""

import io
import math
import re
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path

from hiddenscope.catalog import ANALYSES

DOCS = Path(__file__).parent
# The first match is the first example, with the block directly below it, if any.
EXAMPLE_WITH_OUTPUT = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
# The digits of a name, such as `layer.24` or `step16`, are part of a word.
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?%?(?!\w)")
# These numbers are not compared. All but the last measure rounding itself. The last is
# about edges drawn in proportion to their effects: rounding moves some of the draws.
NOISE = re.compile(
    r"(?<=by )[\d.,]+(?= times the noise envelope)"
    r"|(?<=to )[\d.,]+(?= of what rounding may do)"
    r"|(?<=shows from about ).+?(?= on\.)"
    r"|(?<=draws of edges the estimates are off by ).+?\)"
)
RELATIVE_TOLERANCE = 0.02
# Differences this small are rounding as well, such as 3e-7 against 5e-7.
ABSOLUTE_TOLERANCE = 1e-5


def shown_output(page: str) -> str | None:
    """Return the output that a page shows below its first example, if it does."""
    first = EXAMPLE_WITH_OUTPUT.search(page)
    if first is None:
        return None
    return first["output"]


def with_output(page: str, output: str) -> str:
    """Return a page that shows this output below its first example."""
    first = EXAMPLE_WITH_OUTPUT.search(page)
    assert first, "the page has no example"
    through_code = page[: first.end("code")]
    below = page[first.end() :]
    return f"{through_code}```\n\n```text\n{output.rstrip()}\n```\n{below}"


def run_example(code: str, place: str, namespace: dict[str, object]) -> str:
    """Run an example, and return what it prints."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, place, "exec"), namespace)
    return printed.getvalue()


def same_output(printed: str, shown: str) -> bool:
    """Tell whether two outputs have the same words, and numbers that agree.

    Machines round differently, so numbers agree within 2%. With decimals or a percent
    sign they may differ by one unit of the last digit, however small they are. Numbers
    that are made of rounding are not compared.
    """
    printed, shown = NOISE.sub("noise", printed), NOISE.sub("noise", shown)
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(_agree(*pair) for pair in pairs)


def _agree(number: str, other: str) -> bool:
    """Tell whether two printed numbers agree."""
    # In binary 0.13 - 0.12 is a little more than one unit.
    unit = 1.001 * max(_last_unit(number), _last_unit(other))
    return math.isclose(
        _value(number),
        _value(other),
        rel_tol=RELATIVE_TOLERANCE,
        abs_tol=max(unit, ABSOLUTE_TOLERANCE),
    )


def _value(number: str) -> float:
    return float(number.replace(",", "").rstrip("%"))


def _last_unit(number: str) -> float:
    """Return the unit of the last digit, or 0 for integers and powers of ten."""
    decimals = number.rstrip("%").partition(".")[2]
    if "e" in number:
        return 0.0
    if decimals or number.endswith("%"):
        return 10.0 ** -len(decimals)
    return 0.0


def main(names: list[str]) -> None:
    """Run the first examples of these pages, and write what they print."""
    for name in names or _pages_with_outputs():
        path = DOCS / f"{name}.md"
        page = path.read_text("utf-8")
        first = EXAMPLE_WITH_OUTPUT.search(page)
        assert first, f"docs/{name}.md has no example"
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            printed = run_example(first["code"], str(path), {"__name__": "example"})
        # Another machine rounds differently: that alone makes no new page.
        if first["output"] is None or not same_output(printed, first["output"]):
            path.write_text(with_output(page, printed), "utf-8")
            print(f"Wrote the output in docs/{name}.md", flush=True)


def _pages_with_outputs() -> list[str]:
    """Return the names of the pages that show what their first example prints."""
    names = [analysis.word for analysis in ANALYSES]
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).with_suffix("").as_posix()
        if name not in names and shown_output(path.read_text("utf-8")):
            names.append(name)
    return names


if __name__ == "__main__":
    main(sys.argv[1:])

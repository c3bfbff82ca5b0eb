"""A public name is its function, whatever was imported before it."""

import subprocess
import sys

import pytest

IMPORTS = (
    "from hiddenscope.extract.job import ExtractJob",
    "from hiddenscope.extract.job import extract",
    "import hiddenscope.extract",
)


@pytest.mark.parametrize("order", [IMPORTS, IMPORTS[::-1]])
def test_extract_is_the_function(order: tuple[str, ...]) -> None:
    same = "assert callable(hs.extract), hs.extract"
    lines = ["import hiddenscope as hs"]
    for step in order:
        lines += [step, same]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)

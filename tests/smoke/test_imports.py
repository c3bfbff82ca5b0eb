"""Importing the package and asking for help is cheap: no torch, no numpy."""

import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "transformers",
    "numpy",
    "pandas",
    "xarray",
    "rich",
    "gguf",
    "safetensors",
}
HELP = "from hiddenscope.cli.main import app; app(['--help'], standalone_mode=False)"
# Every command says what it takes, and checks that, before it needs anything heavy.
EVERY_COMMAND = """
from typer.main import get_command
from hiddenscope.cli.main import app
dict(get_command(app).commands)
"""


@pytest.mark.smoke
@pytest.mark.parametrize("program", ["import hiddenscope", HELP, EVERY_COMMAND])
def test_nothing_heavy_is_loaded(program: str) -> None:
    program = f"import sys; {program}\nprint(*sys.modules)"
    call = [sys.executable, "-c", program]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())

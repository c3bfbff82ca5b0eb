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


@pytest.mark.smoke
@pytest.mark.parametrize("program", ["import hiddenscope", HELP])
def test_nothing_heavy_is_loaded(program: str) -> None:
    program = f"import sys; {program}; print(*sys.modules)"
    call = [sys.executable, "-c", program]
    done = subprocess.run(call, capture_output=True, text=True, check=True)
    assert not HEAVY & set(done.stdout.split())

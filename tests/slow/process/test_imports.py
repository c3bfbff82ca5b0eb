"""What is read without a heavy library does not import it."""

import subprocess
import sys
from pathlib import Path

import pytest

from hiddenscope.testing.stores import tiny_store

READ = """
import hiddenscope as hs
store = hs.open(sys.argv[1])
store["layer.1"][[0, 31]].sum(), store.of(3).tokens, store.to_xarray().dims
assert len(store.tokens) == 32
"""


@pytest.mark.parametrize(
    ("program", "without"),
    [
        (READ, "torch"),
        ("import hiddenscope.results", "torch numpy xarray"),
        ("import hiddenscope.states.pooling", "torch numpy"),
    ],
)
def test_what_is_light_loads_nothing_heavy(
    program: str, without: str, tmp_path: Path
) -> None:
    tiny_store(tmp_path)
    script = f"import sys\n{program}\nprint(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not set(without.split()) & set(loaded.stdout.split())

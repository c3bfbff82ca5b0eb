"""A kernel on the hub is never fetched, where the library that would do so is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.loading.test_folder import KERNEL_KEYS, KERNELS

STAND_IN = """
import sys
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"__init__": lambda *a, **k: None, "__call__": lambda self, given=None, *a, **k: given})
def get_kernel(*given, **options):
    open(sys.argv[1], "a").write(repr(given))
    raise FileNotFoundError("a stand-in has none")
"""
LOADING = """
import json, pathlib, sys
import transformers.utils.import_utils as libraries
assert libraries.is_kernels_available(), "the stand-in must be taken for real"
from hiddenscope.errors import LoadError, Unsafe
from hiddenscope.loading import open_source
folder = pathlib.Path(sys.argv[2])
config = json.loads((folder / "config.json").read_text())
open_source(folder, device="cpu")  # which works with the stand-in
for entries in json.loads(sys.argv[3]):
    (folder / "config.json").write_text(json.dumps({**config, **entries}))
    try:
        open_source(folder, device="cpu")
        print("loaded", entries)
    except Unsafe:
        pass
for attention in json.loads(sys.argv[4]):
    (folder / "config.json").write_text(json.dumps(config))
    try:
        open_source(folder, device="cpu", attention=attention)
        print("loaded", attention)
    except Unsafe:
        pass
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Write a package `kernels` that transformers takes for the real one, and that
    writes down what it is asked for.
    """
    from transformers.utils import import_utils

    package = tmp_path / "packages"
    info = package / f"kernels-{import_utils.KERNELS_MIN_VERSION}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion:"
        f" {import_utils.KERNELS_MIN_VERSION}\n"
    )
    (info / "top_level.txt").write_text("kernels\n")
    (info / "RECORD").write_text("kernels/__init__.py,,\n")
    for name in ("kernels", "kernels/layer", "kernels/layer/mode"):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text(STAND_IN)
    return package


def test_a_kernel_is_never_fetched_in_whatever_form_it_is_named(
    llama: Path, stand_in: Path, tmp_path: Path
) -> None:
    values = [*KERNELS.values(), "flash_attention_2"]
    entries: list[dict[str, object]] = [
        {key: value} for key in KERNEL_KEYS for value in values
    ]
    entries += [{"sub_config": entry} for entry in entries[:5]]
    options = [value for value in values if isinstance(value, str)]
    trap = tmp_path / "asked"
    command = [sys.executable, "-c", LOADING, str(trap), str(llama)]
    command += [json.dumps(entries), json.dumps(options)]
    path = os.pathsep.join([str(stand_in), *sys.path])
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert not trap.exists()

"""Whatever is a pipe is refused: to read it would wait without end."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import hiddenscope as hs
from hiddenscope.analyses.drift.result import read_baseline
from hiddenscope.causes.contrast import read_interchanges
from hiddenscope.cli.arguments import read_saved
from hiddenscope.errors import FileError
from hiddenscope.loading.folder import read_json, stored_tensors

READERS: dict[str, Callable[[Path], object]] = {
    ".json": read_json,
    ".safetensors": stored_tensors,
    ".baseline": read_baseline,
    ".nc": hs.Result.load,
    ".gguf": hs.Direction.load,
    ".npz": hs.States.read,
    ".npy": read_saved,
    ".jsonl": lambda path: read_interchanges(str(path)),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_no_reader_waits_for_a_pipe(tmp_path: Path) -> None:
    for suffix, read in READERS.items():
        path = tmp_path / f"x{suffix}"
        os.mkfifo(path)
        with pytest.raises(FileError, match="is a named pipe"):
            read(path)

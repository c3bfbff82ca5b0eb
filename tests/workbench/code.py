"""The code that the page offers beside a result, run as somebody would run it."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.cli.main import app


def run_python(answer: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the program of an answer in a folder; return the names that it has made."""
    namespace: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        # A page takes longer to write, and is tested elsewhere.
        exec(answer["python"].replace(".html'", ".json'"), namespace)
    return namespace


def run_command(answer: dict[str, Any], folder: Path) -> Path:
    """Run the command of an answer in a folder; return the file that it has written."""
    program, *words = shlex.split(answer["command"])
    assert program == "hiddenscope"
    place = words.index("--out") + 1
    words[place] = words[place].replace(".html", ".json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with pytest.raises(SystemExit) as left:
            get_command(app)(args=words)
    # Drift says with its exit code that two models differ.
    assert left.value.code == (1 if words[0] == "drift" else 0)
    return folder / words[place]


def check_code(answer: dict[str, Any], expected: hs.Result, folder: Path) -> None:
    """Run the code of an answer, and compare its numbers with those of the page."""
    assert same(run_python(answer, folder)["result"], expected)
    if answer["command"] is None:
        assert "Python only" in answer["command_reason"]
    else:
        assert same(hs.Result.load(run_command(answer, folder)), expected)


def same(first: hs.Result, second: hs.Result) -> bool:
    """The same numbers; texts know where they came from, and say so in attributes."""
    return bool(first.kind == second.kind and first.data.equals(second.data))

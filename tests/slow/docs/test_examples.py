"""Run every experiment at its smallest size, as a reader runs it."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.places import ROOT
from tests.slices import sliced

PAGES = sorted((ROOT / "docs" / "experiments").glob("*.md"))


@pytest.mark.real
@pytest.mark.parametrize("page", sliced(PAGES, 3), ids=lambda page: page.stem)
def test_an_experiment_runs_with_one_command(
    page: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = ROOT / "examples" / f"{page.stem.replace('-', '_')}.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--quick", "--out", "out"])
    # Python puts a script's folder on the path: experiments share a reader of texts.
    monkeypatch.syspath_prepend(str(script.parent))
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert list((tmp_path / "out").rglob("*.png"))

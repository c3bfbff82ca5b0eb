"""The tutorial of the docs, from top to bottom, with the default model."""

from pathlib import Path

import pytest

from tests.slow.docs.running import DOCS, run_page


@pytest.mark.smoke
@pytest.mark.real
def test_the_examples_of_the_tutorial_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(DOCS / "start.md")

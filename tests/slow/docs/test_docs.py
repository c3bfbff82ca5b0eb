"""What the docs show runs, and prints what they show."""

from pathlib import Path

import pytest

from docs.outputs import same_output, shown_output
from tests.places import ROOT
from tests.slow.docs.running import run_page, with_examples


@pytest.mark.real
@pytest.mark.parametrize(
    "page", with_examples(), ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_examples_of_a_page_run_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_page(page)[0]
    shown = shown_output(page.read_text("utf-8"))
    if shown is not None:
        # Both stand in the message, so that the difference can be read.
        assert same_output(printed, shown), f"{printed}\nis not\n{shown}"

"""What the docs show runs."""

from pathlib import Path

import pytest

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
    run_page(page)

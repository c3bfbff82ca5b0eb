"""The notebooks of the docs run from top to bottom, in a kernel, as a reader runs them."""

from pathlib import Path

import pytest

from tests.slow.docs.running import NOTEBOOKS

PAGES = sorted(NOTEBOOKS.glob("*.md"))
# Kernels start slowly on a busy machine.
SECONDS = 600


@pytest.mark.real
def test_notebooks_run_from_top_to_bottom(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    # One kernel for all: most of the time is that of its start and of importing torch.
    joined = nbformat.v4.new_notebook()
    for page in PAGES:
        notebook = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
        nbformat.validate(notebook)
        joined.cells.append(nbformat.v4.new_code_cell("%reset -f"))
        joined.cells += notebook.cells
    for number, cell in enumerate(joined.cells):
        cell.id = f"joined-{number}"
    resources = {"metadata": {"path": str(tmp_path)}}
    client = nbclient.NotebookClient(
        joined,
        timeout=SECONDS,
        startup_timeout=SECONDS,
        # After 4 seconds it would leave outputs out, and say nothing.
        iopub_timeout=SECONDS,
        resources=resources,
    )
    try:
        client.execute()
    except nbclient.exceptions.CellExecutionError as error:
        if error.ename != "Unreachable":
            raise
        pytest.skip(f"the notebooks use the default model: {error.evalue}")
    shown = 0
    for cell in joined.cells:
        for output in cell.get("outputs", []):
            shown += "hiddenscope view" in output.get("data", {}).get("text/html", "")
    # The lens twice, the panels, and the comparison.
    assert shown == 4
    for name in ("mine.html", "difference.pdf", "median.pdf", "difference.nc"):
        assert (tmp_path / name).stat().st_size > 1000

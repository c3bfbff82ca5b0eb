"""What an error of ours looks like in a notebook."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import hiddenscope as hs

CELL = """
def ask():
    import hiddenscope as hs
    return hs.Site.parse("layer.x")

ask()
"""


def test_a_notebook_shows_the_callers_lines_and_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactiveshell.InteractiveShell.instance()
    try:
        shell.run_line_magic("colors", "nocolor")
        with pytest.raises(hs.errors.SiteError) as caught:
            hs.Site.parse("layer.x")
        shell.run_cell(CELL)
        shown = capsys.readouterr().out
        assert [line.strip() for line in shown.splitlines() if line.strip()] == [
            "line 5: ask()",
            'line 3: return hs.Site.parse("layer.x")',
            f"SiteError: {caught.value}",
            "(`%tb Verbose` shows the whole traceback.)",
        ]
        # A thread of its own handles no error of another test, which `%tb` would show.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(shell.run_line_magic, "tb", "Verbose").result()
        whole = capsys.readouterr().out
        assert "sites.py" in whole and len(whole.splitlines()) > 20
        # Errors of others are shown as ever.
        shell.run_cell("1 / 0")
        assert "Traceback (most recent call last)" in capsys.readouterr().out
    finally:
        interactiveshell.InteractiveShell.clear_instance()

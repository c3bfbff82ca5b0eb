"""The status line of a terminal is drawn in its place, and gone when it is done."""

import io
import time

import pytest

from hiddenscope import progress
from hiddenscope.progress import ERASE, STEP, _Line


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_status_is_drawn_again_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    line = _Line()
    line.say("Loading")
    while terminal.getvalue().count("Loading") < 2:
        time.sleep(STEP)
    with line.aside():
        assert terminal.getvalue().endswith(ERASE)
    line.say("")
    said = terminal.getvalue()
    assert said.endswith(ERASE)
    time.sleep(3 * STEP)
    assert terminal.getvalue() == said, "nothing is drawn without a message"


@pytest.mark.parametrize(("seconds", "shown"), [(90, "0:01:30"), (1_435_250, None)])
def test_a_bar_says_how_long_it_takes_unless_that_is_absurd(
    seconds: float, shown: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes of a download, by which it would take 398 hours."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    remaining = property(lambda task: seconds)
    monkeypatch.setattr("rich.progress.Task.time_remaining", remaining)
    with progress.track("Downloading", total=100, unit="bytes") as advance:
        advance(1)
        time.sleep(3 * STEP)
    said = terminal.getvalue()
    assert "Downloading" in said
    assert shown is None or shown in said
    assert "398" not in said

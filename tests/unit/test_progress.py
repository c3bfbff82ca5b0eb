"""The status line of a terminal is drawn in its place, and gone when it is done."""

import io
import time

import pytest

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
